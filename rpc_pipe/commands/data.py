"""`rpc-pipe data`: describe data and time reading them; `rpc-pipe data pack`: make shards from text."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from ..dependency import ConfigError
from ..launching.report import Reporter
from .options import Parser, refuse_typed
from .profile import progress
from .readers import whole

if TYPE_CHECKING:
    from ..data.survey import Survey

_READING = ("memory", "window", "seed", "rows", "inputs", "targets", "context", "dtype")
_PACKING = ("shard", "field")


def add(commands: Any) -> None:
    """Add `data` to the command line."""
    parser: Parser = commands.add_parser(
        "data",
        help="look at data, or pack text into shards",
        description="rpc-pipe data SOURCE...: shards, samples, order, memory and speed. "
        "rpc-pipe data pack TEXT... FOLDER: make shards of text; goes on where it was stopped.",
    )
    parser.add_argument("source", nargs="+", metavar="SOURCE", help="files, folders, patterns or URLs; or: pack")
    parser.take("json")
    parser.add_argument("--tokenizer", help="of text: bytes, a tokenizer.json or its folder, a model's name (bytes)")
    read = parser.add_argument_group("to look at data")
    read.add_argument("--memory", help="limit for chunks and batches (1GB)")
    read.add_argument("--window", type=whole(1), help="chunks in memory, of which samples are mixed (as many as fit)")
    read.add_argument("--seed", type=whole(0, 2**63 - 1), help="of the order (0)")
    read.add_argument("--rows", type=whole(1), help="of a batch (16)")
    read.add_argument("--context", type=whole(1), help="tokens of a sample (1024)")
    read.add_argument("--dtype", help="of raw tokens (uint16)")
    read.add_argument("--inputs", help="column of a table")
    read.add_argument("--targets", help="column of a table")
    packing = parser.add_argument_group("to pack text")
    packing.add_argument("--shard", help="size of a shard (64MB)")
    packing.add_argument("--field", help="key or column that has the text (text)")


def command(typed: dict[str, Any], argv: list[str]) -> int:
    """Describe or pack data; return the exit code."""
    named = typed["source"]
    packs = named[0] == "pack"
    refuse_typed(typed, _READING if packs else _PACKING, f"is {'not ' * packs}for rpc-pipe data pack")
    return _pack(typed, named[1:]) if packs else _look(typed, named)


def _look(typed: dict[str, Any], named: list[str]) -> int:
    from ..data.loader import Loader
    from ..data.opening import open_source
    from ..data.survey import survey

    reading = {key: typed[key] for key in ("context", "dtype", "tokenizer", "inputs", "targets") if key in typed}
    source = open_source(named, **reading)
    batches = {key: typed[key] for key in ("memory", "window", "seed") if key in typed}
    found = survey(Loader(source, rows=typed.get("rows", 16), **batches))
    if "json" in typed:
        print(json.dumps(found._asdict()))
    for line in _lines(found):
        Reporter("json" in typed).text(line)
    return 0


def _lines(found: Survey) -> list[str]:
    return [
        f"{_count(found.shards, 'shard')}, {_count(found.samples, 'sample')}, {found.bytes / 1e6:,.3f} MB in "
        f"{_count(found.chunks, 'chunk')}",
        f"order: mixed from {_count(found.mixed, 'chunk')} at a time; one sample is stored {found.mean_distance:,.0f} "
        f"samples from the next on average (a full shuffle has {found.samples / 3:,.0f})",
        f"{found.loads_per_epoch:.2f} loads a chunk an epoch, {found.peak_mb:,.1f} MB of memory at most, "
        f"{found.mb_per_s:,.0f} MB/s from here",
    ]


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'s' * (number != 1)}"


def _pack(typed: dict[str, Any], named: list[str]) -> int:
    from ..data.packing import pack
    from ..system.sizes import num_bytes

    if len(named) < 2:
        raise ConfigError("rpc-pipe data pack: name the text, and then the folder for the shards")
    names = {"tokenizer": "tokenizer", "field": "text_field"}
    options = {name: typed[option] for option, name in names.items() if option in typed}
    if "shard" in typed:
        options["shard_bytes"] = num_bytes(typed["shard"], "--shard")
    reporter = Reporter("json" in typed)
    with progress(reporter, "packing") as tell:

        def shown(behind: int, total: int, shards: int) -> None:
            tell(behind / max(1, total), _count(shards, "shard"))

        packed = pack(named[:-1], named[-1], progress=shown, **options)
    size = sum(entry["bytes"] for entry in packed.shards)
    if "json" in typed:
        print(json.dumps({"shards": len(packed.shards), "tokens": packed.tokens, "bytes": size, "dtype": packed.dtype}))
    made = f"{_count(len(packed.shards), 'shard')}, {packed.tokens:,} tokens ({packed.dtype}), {size / 1e6:,.3f} MB"
    reporter.text(f"{made} in {named[-1]}")
    return 0
