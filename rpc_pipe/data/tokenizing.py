"""Text to tokens, by the `tokenizers` library; bytes are their own tokens."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..dependency import ConfigError
from .source import need

#: what ends a text, by the names that tokenizers have for it
_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")


class Tokenizer:
    """Makes tokens of texts.

    Args:
        name: `bytes`; a `tokenizer.json` or a folder with one; or a model's name, for `transformers`.

    Raises:
        ConfigError: there is no such tokenizer.
    """

    def __init__(self, name: str | os.PathLike[str] = "bytes") -> None:
        self.name = os.fspath(name)
        self._tokenizer = None if self.name == "bytes" else _loaded(self.name)
        size = 256 if self._tokenizer is None else max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        #: the smallest type that all tokens fit into
        self.dtype = np.dtype(np.uint8 if size <= 2**8 else np.uint16 if size <= 2**16 else np.uint32)
        ends = [] if self._tokenizer is None else [self._tokenizer.token_to_id(name) for name in _ENDS]
        #: the token behind a text, if it has one
        self.end = next((end for end in ends if end is not None), None)

    def __call__(self, texts: Sequence[bytes]) -> list[NDArray[Any]]:
        """Return the tokens of each text."""
        if self._tokenizer is None:
            return [np.frombuffer(text, np.uint8) for text in texts]
        decoded = [text.decode(errors="replace") for text in texts]
        found = self._tokenizer.encode_batch(decoded, add_special_tokens=False)
        return [np.array(each.ids, self.dtype) for each in found]


def _loaded(name: str) -> Any:
    tokenizers = need("tokenizers", f"tokenizer {name}")
    path = Path(name) / "tokenizer.json" if Path(name).is_dir() else Path(name)
    if path.is_file():
        try:
            return tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare ones
            raise ConfigError(f"tokenizer {name}: {path} cannot be read: {error}") from error
    if Path(name).exists() or name.endswith(".json"):
        raise ConfigError(f"tokenizer {name}: must be bytes, a tokenizer.json, a folder with one, or a model's name")
    transformers = need("transformers", f"tokenizer {name}")
    try:
        return transformers.AutoTokenizer.from_pretrained(name).backend_tokenizer
    except (OSError, ValueError, AttributeError) as error:
        first = str(error).strip().split("\n")[0]
        raise ConfigError(
            f"tokenizer {name}: is no file or folder, and cannot be loaded as a model's: {first}"
        ) from error
