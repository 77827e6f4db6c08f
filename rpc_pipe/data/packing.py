"""Shards made of text: tokens in a row, by the `tokenizers` library, in files of equal size with an index.

A shard appears when it is complete, and a note beside it holds the start of the next one; so packing may be killed
at any moment and goes on there. The index is written last: a folder with one is complete.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import accumulate, islice, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..dependency import ConfigError, DataError
from ..system.files import read_json, refused, replacing
from .shards import INDEX, Roots, ShardFile, find_shards, fingerprint
from .source import Source, need
from .storage import Storage, checksum
from .tables import opened
from .token_files import tokens as token_source

ENDINGS = (".jsonl", ".txt", ".md", ".py", ".json", ".parquet")
#: bytes of a piece in which text files are read, about
_PIECE = 2**20
#: seconds that the place of models may take to say that it knows a name
_HUB_S = 10.0
_NOTE = ".packing.json"
#: texts that are made into tokens together
_TOGETHER = 64
#: names that tokenizers have for the token at the end of a text
_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")

#: called with the bytes packed so far, all bytes, and the number of shards
Progress = Callable[[int, int, int], None]


@dataclass
class Packed:
    """How far packing has come."""

    identity: str
    dtype: str
    tokenizer: str
    tokens: int = 0
    shards: list[dict[str, Any]] = field(default_factory=list)
    #: where the next shard begins: file, place in it, and how many of the tokens of the text there are behind
    file: int = 0
    at: int = 0
    skip: int = 0


def pack(
    source: Roots,
    out: str | os.PathLike[str],
    *,
    tokenizer: str | os.PathLike[str] = "bytes",
    text_field: str = "text",
    shard_bytes: int = 64 * 10**6,
    storage: Storage | None = None,
    progress: Progress | None = None,
) -> Packed:
    """Write the tokens of `source` as shards into the folder `out`; go on if it was begun before.

    Args:
        source: `.jsonl`, `.parquet` or text files, folders or patterns, here or as URLs.
        text_field: key or column of the text.

    Raises:
        ConfigError, DataError: there is no text, or the folder holds something else.
    """
    storage = storage or Storage()
    files, _ = find_shards(source, ENDINGS, storage.options)
    makes = Tokenizer(tokenizer)
    folder = Path(out)
    identity = fingerprint(files, tokenizer_digest(makes.name), text_field, shard_bytes)
    packed = _begun(folder, Packed(identity, makes.dtype.name, makes.name))
    if (folder / INDEX).exists():
        return packed
    per_shard = max(2, shard_bytes // makes.dtype.itemsize)
    before = [sum(f.num_bytes for f in files[:number]) for number in range(len(files) + 1)]
    for partial in folder.glob(".*.partial"):  # of a process that was killed
        partial.unlink(missing_ok=True)
    writer = _ShardWriter(folder, packed, makes.dtype, per_shard)
    texts = _documents(files, storage, text_field, packed.file, packed.at)
    while together := list(islice(texts, _TOGETHER)):
        for document, tokens in zip(together, makes([each.text for each in together]), strict=True):
            if makes.end is not None and document.ends:
                tokens = np.append(tokens, np.asarray(makes.end, makes.dtype))
            writer.add(document, tokens)
        if progress is not None:
            progress(before[together[-1].file] + together[-1].behind, before[-1], len(packed.shards))
    writer.finish()
    if not packed.tokens:
        raise ConfigError(f"data {', '.join(f.name for f in files[:3])}: there is no text in it")
    _write_file(folder / INDEX, json.dumps(asdict(packed), indent=1).encode())
    (folder / _NOTE).unlink(missing_ok=True)
    return packed


def text(
    source: Roots,
    context: int,
    *,
    tokenizer: str | os.PathLike[str] = "bytes",
    text_field: str = "text",
    storage: Storage | None = None,
) -> Source:
    """Return text, packed to samples of `context` tokens; texts follow each other without padding.

    The first call makes the tokens, on one worker while other workers wait. For much text use `rpc-pipe data pack`,
    which shows a progress bar.

    Args:
        source: `.jsonl`, `.parquet` or text files, folders or patterns, here or as URLs.
        tokenizer: `bytes`; a `tokenizer.json` or a folder with one; or a model's name.
        text_field: key or column of the text.

    Raises:
        ConfigError, DataError: there is no text or no such tokenizer.
    """
    storage = storage or Storage()
    files, _ = find_shards(source, ENDINGS, storage.options)
    # A file that was written to counts as another file: packing it again costs little.
    name = fingerprint(files, tokenizer_digest(os.fspath(tokenizer)), text_field, [file.modified_ns for file in files])
    folder = storage.folder.parent / "packed" / name
    with storage.alone(name):
        pack(source, folder, tokenizer=tokenizer, text_field=text_field, storage=storage)
    made = token_source(Path(folder), context, storage=storage)
    made.shards, made.stored_bytes = [file.name for file in files], sum(file.num_bytes for file in files)
    return made


def tokenizer_digest(tokenizer: str) -> str:
    """Return the identity of a tokenizer: a digest of its file, or its name."""
    path = _file_of(tokenizer)
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else tokenizer


def _file_of(tokenizer: str) -> Path:
    return Path(tokenizer) / "tokenizer.json" if Path(tokenizer).is_dir() else Path(tokenizer)


def _begun(folder: Path, new: Packed) -> Packed:
    """Return how far the folder has come, if it is of the same text."""
    note = next((folder / name for name in (INDEX, _NOTE) if (folder / name).exists()), None)
    with refused(ConfigError, f"{folder}: cannot be written", "; name another folder"):
        folder.mkdir(parents=True, exist_ok=True)
        others = sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))
    if note is None and others:
        raise ConfigError(f"{folder}: is not empty ({others[0]}); name another folder")
    try:
        found = new if note is None else Packed(**read_json(note, f"{note}"))
        counts = found.tokens, found.file, found.at, found.skip
        sum((*counts, *(entry["bytes"] + entry["tokens"] for entry in found.shards)))
    except (LookupError, TypeError) as error:
        raise ConfigError(f"{folder}: its {note} is not one of rpc-pipe; name another folder") from error
    if found.identity != new.identity:
        raise ConfigError(f"{folder}: holds another text, or by another tokenizer, size or field; name another one")
    return found


class _ShardWriter:
    """Cuts tokens into shards."""

    def __init__(self, folder: Path, packed: Packed, dtype: np.dtype[Any], per_shard: int) -> None:
        self._folder, self._packed, self._dtype, self._per_shard = folder, packed, dtype, per_shard
        self._parts: list[NDArray[Any]] = []
        self._count = 0
        self._skip = packed.skip

    def add(self, document: Document, tokens: NDArray[Any]) -> None:
        behind, self._skip = self._skip, 0
        tokens = tokens[behind:]
        while self._count + len(tokens) >= self._per_shard:
            taken = self._per_shard - self._count
            self._parts.append(tokens[:taken])
            tokens, behind = tokens[taken:], behind + taken
            self._write(document.file, document.at, behind)
        self._parts.append(tokens)
        self._count += len(tokens)

    def finish(self) -> None:
        if self._count:
            self._write(-1, 0, 0)

    def _write(self, file: int, at: int, skip: int) -> None:
        packed = self._packed
        tokens = np.concatenate(self._parts).astype(self._dtype.newbyteorder("<"))
        name = f"shard-{len(packed.shards):05d}.npy"
        held = io.BytesIO()
        np.save(held, tokens)
        path = self._folder / name
        _write_file(path, held.getbuffer())
        packed.shards.append({
            "name": name, "bytes": path.stat().st_size, "crc32": f"{checksum(path):08x}", "tokens": len(tokens)
        })  # fmt: skip
        packed.tokens += len(tokens)
        self._parts, self._count = [], 0
        if file >= 0:
            packed.file, packed.at, packed.skip = file, at, skip
            _write_file(self._folder / _NOTE, json.dumps(asdict(packed)).encode())


def _write_file(path: Path, content: bytes | memoryview) -> None:
    with refused(DataError, f"{path}: cannot be written"), replacing(path) as partial:
        partial.write_bytes(content)


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
    path = _file_of(name)
    if path.is_file():
        try:
            return tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare ones
            raise ConfigError(f"tokenizer {name}: {path} cannot be read: {error}") from error
    if Path(name).exists() or name.endswith(".json"):
        raise ConfigError(f"tokenizer {name}: must be bytes, a tokenizer.json, a folder with one, or a model's name")
    transformers = need("transformers", f"tokenizer {name}")
    load = transformers.AutoTokenizer.from_pretrained
    try:
        with suppress(OSError, ValueError):  # it is not on this machine
            return load(name, local_files_only=True).backend_tokenizer
        # Asked once: transformers asks for each of its files again and again, for most of a minute.
        need("huggingface_hub", f"tokenizer {name}").HfApi().model_info(name, timeout=_HUB_S)
        return load(name).backend_tokenizer
    except Exception as error:  # of the network by its own classes
        first = str(error).strip().split("\n")[0]
        raise ConfigError(f"tokenizer {name}: is no file or folder, and no model's: {first}") from error


class Document(NamedTuple):
    """A text, or a piece of one."""

    #: which file, and where in it: a byte, or a row of a table
    file: int
    at: int
    text: bytes
    #: whether the text ends here
    ends: bool
    #: bytes of the file that are behind, for progress
    behind: int


def _documents(files: Sequence[ShardFile], storage: Storage, field: str, file: int, at: int) -> Iterator[Document]:
    """Yield the texts of the files from a place on.

    Args:
        field: key of a JSON object, or column of a table, with the text.
    """
    for number in range(file, len(files)):
        shard = files[number]
        path = storage.local(shard)
        start = at if number == file else 0
        with refused(DataError, f"shard {shard.name}: {path} cannot be read"):
            if shard.name.lower().endswith(".jsonl"):
                yield from _lines(path, shard, field, number, start)
            elif shard.name.lower().endswith(".parquet"):
                yield from _rows(path, shard, field, number, start)
            else:
                yield from _pieces(path, number, start)


def _lines(path: Path, shard: ShardFile, field: str, number: int, at: int) -> Iterator[Document]:
    with path.open("rb") as file:
        file.seek(at)
        for line in file:
            begin, at = at, at + len(line)
            if line.isspace():
                continue
            try:
                encoded = json.loads(line.decode("utf-8-sig"))[field].encode()
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise DataError(f"shard {shard.name}: byte {begin} begins no JSON with a text {field!r}") from error
            yield Document(number, begin, encoded, True, at)


def _pieces(path: Path, number: int, at: int) -> Iterator[Document]:
    """Cut a long text behind lines."""
    with path.open("rb") as file:
        file.seek(at)
        while piece := file.read(_PIECE):
            piece += file.readline()
            yield Document(number, at, piece, not file.peek(1), at + len(piece))
            at += len(piece)


def _rows(path: Path, shard: ShardFile, field: str, number: int, at: int) -> Iterator[Document]:
    with opened(path, shard) as table:
        if field not in table.schema.names:
            raise ConfigError(f"shard {shard.name}: has no column {field!r}; it has {', '.join(table.schema.names)}")
        ends = [*accumulate((rows for rows, _ in table.groups([field])), initial=0)]
        for group, (begin, end) in enumerate(pairwise(ends)):
            texts = table.read(group, [field])[field].to_pylist() if end > at else []
            for row, text in enumerate(texts, begin):
                if text is not None and not isinstance(text, str):
                    raise ConfigError(f"shard {shard.name}: column {field!r} has a {type(text).__name__}; must be text")
                if row >= at and text is not None:
                    yield Document(number, row, text.encode(), True, shard.num_bytes * (row + 1) // max(1, ends[-1]))
