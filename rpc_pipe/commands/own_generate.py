"""The script that `rpc-pipe generate` runs in every worker: the texts of prompts, the first one as it grows."""

import json
import sys
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ..checkpoints.collective import everywhere
from ..dependency import ConfigError
from ..dependency.errors import first_sentence
from ..launching import launcher_link as link
from ..pipeline import Pipeline
from ..verifying.proof import seeded


def main() -> None:
    """Generate, and print texts on worker 0."""
    typed = json.loads(sys.argv[2])
    seed, prompts = typed.get("seed", 0), typed["prompt"]
    made, tokenizer = seeded(sys.argv[1], seed), _tokenizer(typed)
    tokens, at_once = [_tokens(prompt, tokenizer) for prompt in prompts], typed.get("rows", len(prompts))
    pipe = Pipeline(made.model, made.loss_fn, num_microbatches=min(8, at_once), example=made.batch, seed=seed)
    if "weights" in typed:
        pipe.weights.load_pretrained(typed["weights"])
    config: Any = getattr(pipe.partition.config, "generation", None)
    end, pad = getattr(config, "eos_token_id", None), getattr(config, "pad_token_id", None)
    ends = {end} if isinstance(end, int) else {*(end or ())}
    pad = next(iter(ends), 0) if pad is None else pad
    how = {name: typed[name] for name in ("temperature", "top_k", "top_p") if name in typed}
    how |= {"do_sample": bool(how), "pad_token_id": pad}
    new, texts = list[list[int]](), list[str]()
    for first in range(0, len(prompts), at_once):
        part = [torch.tensor(row) for row in tokens[first : first + at_once]]
        ids = pad_sequence(part, True, pad, "left")
        mask = pad_sequence([torch.ones_like(row) for row in part], True, 0, "left")
        shown = _Shown(partial(_behind, tokenizer, tokens[first]), ends, prompts[first])
        found = pipe.generate(ids, typed.get("max_new_tokens", 64), attention_mask=mask, on_tokens=shown, **how)
        new += [_until(row[ids.shape[1] :].tolist(), ends) for row in found]
        texts += [_behind(tokenizer, tokens[n], new[n]) for n in range(first, len(new))]
        if pipe.worker == 0:
            whole = [*map("".join, zip(prompts, texts, strict=False))][first:]
            link.tell(kind="piece", text="\n".join([whole[0][shown.length :], *whole[1:], ""]))
        if any(pipe._session.each(lambda actor: everywhere(actor, "stop", actor.stop_requested))[0]):
            raise KeyboardInterrupt
    if pipe.worker == 0:
        told = {"prompts": prompts, "texts": texts, "tokens": new}
        link.tell(kind="result", text=f"{sum(map(len, new))} new tokens", json=told)
    pipe.barrier()


class _Shown:
    """Shows the first text as its tokens arrive."""

    def __init__(self, behind: Callable[[list[int]], str], ends: Collection[int], prompt: str) -> None:
        self._behind, self._ends, self._prompt, self._new = behind, ends, prompt, list[int]()
        #: characters that have been shown
        self.length = 0

    def __call__(self, rows: range, tokens: Tensor) -> None:
        """Take the newest tokens of some rows."""
        if rows.start == 0:
            self._new.append(int(tokens[0, 0]))
            text = self._prompt + self._behind(_until(self._new, self._ends))
            if not text.endswith("\ufffd"):  # a character of several tokens
                link.tell(kind="piece", text=text[self.length :])
                self.length = len(text)


class _Numbers:
    """Reads and writes tokens as numbers."""

    @staticmethod
    def encode(text: str) -> list[int]:
        """Return the tokens of a text such as 5,17,3."""
        return [int(each) for each in text.replace(",", " ").split()]

    @staticmethod
    def decode(tokens: list[int]) -> str:
        """Return a text to append to another one."""
        return "".join(f",{token}" for token in tokens)


def _tokenizer(typed: Mapping[str, Any]) -> Any:
    """Return an object that encodes and decodes texts.

    Raises:
        ConfigError: the folder has no tokenizer.
    """
    folder = Path(typed.get("tokenizer", typed.get("weights", "")))
    if "tokenizer" in typed or (folder / "tokenizer_config.json").is_file():
        from transformers import AutoTokenizer

        try:
            return AutoTokenizer.from_pretrained(str(folder.resolve(strict=True)))
        except Exception as error:
            raise ConfigError(f"--tokenizer {folder}: cannot be read: {first_sentence(error)}") from error
    found = getattr(sys.modules[f"rpc_pipe_model_{Path(sys.argv[1].rpartition(':')[0]).stem}"], "tokenizer", _Numbers)
    return found if hasattr(found, "encode") else found()


def _tokens(prompt: str, tokenizer: Any) -> list[int]:
    """Return the tokens of a prompt.

    Raises:
        ConfigError: it has none.
    """
    try:
        if found := list(tokenizer.encode(prompt)):
            return found
    except ValueError:
        if tokenizer is not _Numbers:
            raise
    rule = "without a tokenizer it is token ids, as 5,17,3" if tokenizer is _Numbers else "has no token"
    raise ConfigError(f"--prompt {prompt!r}: {rule}")


def _behind(tokenizer: Any, prompt: list[int], new: list[int]) -> str:
    """Return the text of new tokens behind a prompt; alone, SentencePiece leaves out the space before a word."""
    return str(tokenizer.decode([*prompt, *new])[len(tokenizer.decode(prompt)) :])


def _until(tokens: list[int], ends: Collection[int]) -> list[int]:
    """Return the tokens before the first that ends a text."""
    return tokens[: next((at for at, token in enumerate(tokens) if token in ends), None)]


if __name__.endswith("__main__"):  # with the name of its package before it, so that it may import relatively
    main()
