"""Text as samples: made into shards of tokens once, in the user's cache, and read from there."""

from __future__ import annotations

import os
from pathlib import Path

from .documents import ENDINGS
from .packing import pack, tokenizer_digest
from .shards import Roots, find_shards, fingerprint
from .source import Source
from .storage import Storage
from .token_files import tokens


def text(
    source: Roots,
    context: int,
    *,
    tokenizer: str | os.PathLike[str] = "bytes",
    text_field: str = "text",
    storage: Storage | None = None,
) -> Source:
    """Return text, packed to samples of `context` tokens; texts follow each other without padding.

    The first call makes the tokens, on one worker while the others wait, which for much text `rpc-pipe data pack` does
    with a progress bar.

    Args:
        source: `.jsonl`, `.parquet` or text files, folders or patterns, here or as URLs.
        tokenizer: `bytes`; a `tokenizer.json` or a folder with one; or a model's name.
        text_field: key or column that has the text.

    Raises:
        ConfigError, DataError: there is no text or no such tokenizer.
    """
    storage = storage or Storage()
    files, _ = find_shards(source, ENDINGS, storage.options)
    # Here a file that was written to is another, whatever it looks like: to pack it again costs little.
    name = fingerprint(files, tokenizer_digest(os.fspath(tokenizer)), text_field, [file.modified_ns for file in files])
    folder = storage.folder.parent / "packed" / name
    with storage.alone(name):
        pack(source, folder, tokenizer=tokenizer, text_field=text_field, storage=storage)
    made = tokens(Path(folder), context, storage=storage)
    made.shards, made.stored_bytes = [file.name for file in files], sum(file.num_bytes for file in files)
    return made
