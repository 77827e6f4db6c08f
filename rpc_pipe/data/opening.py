"""A source chosen by the names of its files."""

from __future__ import annotations

from collections import Counter

from ..dependency import ConfigError
from . import maps, packing, tables, token_files
from .shards import Roots, find_shards, roots_of
from .source import Source
from .storage import Storage

_SIZE = 224
_ENDINGS = {"tokens": token_files.ENDINGS, "tables": tables.ENDINGS, "images": maps.IMAGES, "text": packing.ENDINGS}
#: argument -> the kind of source that it is of
_READ = {"dtype": "tokens", "inputs": "tables", "targets": "tables", "tokenizer": "text"}


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
    columns = _columns(source, storage, inputs, targets) if kind == "tables" else None
    kind = "text" if kind == "tables" and columns is None else kind
    asked = {"dtype": dtype, "inputs": inputs, "targets": targets, "tokenizer": tokenizer}
    for name, value in asked.items():
        if value not in (None, "bytes") and kind != _READ[name]:
            raise ConfigError(f"{name} {value}: is of {_READ[name]}, and this is read as {kind}; leave it out")
    if kind == "tokens":
        return token_files.tokens(source, context, dtype=dtype, storage=storage)
    if kind == "images":
        (root,) = roots_of(source)
        return maps.images(root, size=_SIZE, storage=storage)
    if columns is not None:
        return tables.table(source, *columns, storage=storage)
    return packing.text(source, context, tokenizer=tokenizer, storage=storage)


def _kind(source: Roots, storage: Storage) -> str:
    known = tuple(dict.fromkeys(ending for endings in _ENDINGS.values() for ending in endings))
    shards, index = find_shards(source, known, storage.options)
    if index:
        return "tokens"
    sizes: Counter[str] = Counter()
    for shard in shards:
        kinds = (kind for kind, endings in _ENDINGS.items() if shard.name.lower().endswith(endings))
        sizes.update({kind: shard.num_bytes for kind in [*kinds][:1]})
    if not sizes:
        raise ConfigError(f"data {shards[0].name}: must end in one of {', '.join(known)}, which say what it holds")
    return max(sizes, key=lambda kind: sizes[kind])


def _columns(source: Roots, storage: Storage, inputs: str | None, targets: str | None) -> tuple[str, str] | None:
    """Return which columns are read; None if there are no numbers."""
    shards, _ = find_shards(source, tables.ENDINGS, storage.options)
    schema = tables.schema_of(shards[0], storage)
    found = [column.name for column in schema if tables.is_numeric(column.type)]
    if not found and not (inputs and targets):
        return None
    inputs, targets = inputs or found[0], targets or found[-1]
    if {inputs, targets} - set(schema.names):
        raise ConfigError(f"columns {inputs}, {targets}: the table has {', '.join(schema.names)}")
    return inputs, targets
