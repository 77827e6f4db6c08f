"""A source by what its files are called."""

from __future__ import annotations

from pathlib import Path

from ..dependency import ConfigError
from . import documents, image_files, tables, token_files
from .image_files import images
from .shards import INDEX, Roots, find_shards, roots_of
from .source import Source, need
from .storage import Storage
from .tables import table
from .text_files import text
from .token_files import tokens

_SIZE = 224


def open_source(
    source: Roots,
    *,
    context: int = 1024,
    dtype: str | None = None,
    tokenizer: str = "bytes",
    inputs: str | None = None,
    targets: str | None = None,
    storage: Storage | None = None,
) -> Source:
    """Return a source of the kind that most of the bytes have: tokens, a table, images or text.

    Args:
        context, dtype, tokenizer: of tokens and text.
        inputs, targets: columns of a table; by default its last column of numbers is the target.
    """
    storage = storage or Storage()
    kind = _kind(source, storage)
    if kind == "tokens":
        return tokens(source, context, dtype=dtype, storage=storage)
    if kind == "images":
        (root,) = roots_of(source)
        return images(root, size=_SIZE, storage=storage)
    if kind == "tables" and (found := _columns(source, storage, inputs, targets)) is not None:
        return table(source, *found, storage=storage)
    return text(source, context, tokenizer=tokenizer, storage=storage)


def _kind(source: Roots, storage: Storage) -> str:
    if any((Path(root) / INDEX).is_file() for root in roots_of(source)):
        return "tokens"
    kinds = {
        "tokens": token_files.ENDINGS,
        "tables": tables.ENDINGS,
        "images": image_files.ENDINGS,
        "text": documents.ENDINGS,
    }
    known = tuple(dict.fromkeys(ending for endings in kinds.values() for ending in endings))
    shards, index = find_shards(source, known, storage.options)
    if index:
        return "tokens"
    sizes = dict.fromkeys(kinds, (0, 0))
    for shard in shards:
        kind = next((kind for kind, endings in kinds.items() if shard.name.lower().endswith(endings)), None)
        if kind is not None:
            size, count = sizes[kind]
            sizes[kind] = size + shard.num_bytes, count + 1
    if not any(count for _, count in sizes.values()):
        raise ConfigError(f"data {shards[0].name}: must end in one of {', '.join(known)}, which say what it holds")
    return max(sizes, key=lambda kind: sizes[kind])


def _columns(source: Roots, storage: Storage, inputs: str | None, targets: str | None) -> tuple[str, str] | None:
    """Return which columns are read; None if there are no numbers."""
    if inputs is not None and targets is not None:
        return inputs, targets
    arrow = need("pyarrow", "a table")
    shards, _ = find_shards(source, tables.ENDINGS, storage.options)
    schema = tables.schema_of(shards[0], storage)
    found = []
    for column in schema:
        kind = tables.element_of(column.type)
        if arrow.types.is_integer(kind) or arrow.types.is_floating(kind):
            found.append(column.name)
    if not found:
        return None
    inputs, targets = inputs or found[0], targets or found[-1]
    if {inputs, targets} - set(schema.names):
        raise ConfigError(f"columns {inputs}, {targets}: the table has {', '.join(schema.names)}")
    return inputs, targets
