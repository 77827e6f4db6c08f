"""Sources of a loader: chunks of rows, each fetched as a whole; any map-style dataset, or a reader of ranges."""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from importlib import import_module
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import default_collate

from ..dependency import ConfigError, DataError
from ..workers.compute.modules.randomness import preserved, python_state, seed_process
from ..workers.transport.payload import Tree, tensors_of
from .sample_order import Numbers, key

#: causes of a late batch
Cause = Literal["disk", "network", "decode"]


class Wanted(NamedTuple):
    """The parts of a batch that a worker uses."""

    inputs: bool = True
    targets: bool = True

    def of(self, sides: Iterable[Any], make: Callable[[Any], Any] = lambda side: side) -> tuple[Any, Any]:
        """Return `make` of each of (inputs, targets) that is wanted; None for the other."""
        inputs, targets = (make(side) if wanted else None for side, wanted in zip(sides, self, strict=True))
        return inputs, targets


#: everything
ALL = Wanted()


class Busy:
    """Counts the time of the loader's threads by cause. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spent: dict[Cause, float] = {"disk": 0.0, "network": 0.0, "decode": 0.0}
        #: by thread: the cause that it is busy with, and its start
        self._now: dict[int, tuple[Cause, float]] = {}

    @contextmanager
    def on(self, cause: Cause) -> Iterator[None]:
        """Charge the body to `cause`; time charged inside it counts for the inner cause alone."""
        outer = self._turn(cause)
        try:
            yield
        finally:
            self._turn(outer)

    def _turn(self, begins: Cause | None) -> Cause | None:
        """Let this thread be busy with another cause; return the one before."""
        thread = threading.get_ident()
        with self._lock:
            now = time.perf_counter()
            ends, since = self._now.pop(thread, (None, now))
            if ends is not None:
                self._spent[ends] += now - since
            if begins is not None:
                self._now[thread] = begins, now
        return ends

    def spent(self) -> dict[Cause, float]:
        """Return the seconds of each cause so far, with the time of work that still runs."""
        with self._lock:
            found, now = dict(self._spent), time.perf_counter()
            for cause, since in self._now.values():
                found[cause] += now - since
            return found

    def worst(self, before: dict[Cause, float]) -> Cause:
        """Return the cause that took most since `spent` returned `before`."""
        after = self.spent()
        return max(after, key=lambda cause: after[cause] - before[cause])


class Source:
    """Samples in chunks; the format decides the chunks."""

    #: as the user named it
    name: str
    #: samples of each chunk
    sizes: Numbers
    #: bytes of memory that each chunk takes when it is loaded
    num_bytes: Numbers
    #: bytes of one sample in a batch, inputs and targets together
    sample_bytes: int
    #: equal, almost surely, where the samples and their numbers are equal; in words, as errors show it
    identity: str
    #: the cause that reading counts as
    busy: Busy
    #: whether chunks come only one after the other, as from a stream
    in_order = False
    #: whether `load` omits the parts that are not wanted
    loads_parts = False
    #: whether `rows` gives a list with (inputs, target) of each sample, which may differ in length; None: it cannot
    keeps_rows: bool | None = None

    @property
    def draws(self) -> bool:
        """Whether samples draw random numbers from the process's global generators."""
        return False

    def load(self, chunk: int, wanted: Wanted = ALL) -> Any:
        """Load the wanted part of a chunk, or more where that is cheaper, for `rows`. Several threads may ask.

        Raises:
            DataError: a shard is missing, truncated or unreadable.
        """
        raise NotImplementedError

    def rows(self, held: Any, numbers: Numbers, wanted: Wanted, keyed: int | None = None) -> Tree:
        """Return the wanted part of these samples of a chunk: tensors with a row for each, for `batch`.

        Args:
            held: the chunk, as `load` gave it.
            keyed: key of the samples' random numbers, together with the sample; None: they draw none.
        """
        raise NotImplementedError

    def batch(self, rows: Tree, wanted: Wanted) -> tuple[Tree, Tree]:
        """Return rows of chunks, put together, as (inputs, targets); None for an unwanted part."""
        return wanted.of(rows)

    def shard_of(self, chunk: int) -> str:
        """Return the name of a chunk's place, for errors."""
        return self.name


def fields(row: Mapping[str, Any], said: str | Sequence[str]) -> Any:
    """Return the value of `row` under one name, or a dict for several names."""
    return row[said] if isinstance(said, str) else {name: row[name] for name in said}


def need(module: str, what: str) -> Any:
    """Return a module of the extra `data`.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        return import_module(module)
    except ImportError as error:
        top = module.partition(".")[0]
        raise ConfigError(f"{what} needs {top}: pip install '.[data]'") from error


T = TypeVar("T")

_CHUNKS = 4096

#: a name, or several names, which give a dict
Columns = str | Sequence[str]


def dataset(
    samples: Any,
    *,
    inputs: Columns | None = None,
    targets: Columns | None = None,
    chunk: int | None = None,
    identity: str | None = None,
) -> Source:
    """Return a map-style dataset (`len(samples)`, `samples[i]`) as a source; torch's, `datasets`', grain's alike.

    Args:
        inputs, targets: a key of samples that are dicts, or several keys, which give a dict; other samples are pairs.
        chunk: number of consecutive samples that are cheap to read together, such as the rows of a file; by default all
            samples are equally near, and the shuffle is over all.
        identity: distinguishes datasets of the same length; the class by default.

    Samples may draw from torch's, Python's and numpy's global generators, to crop or to flip. Each sample draws other
    numbers in every epoch, the same on every worker and in a run that is resumed.

    Raises:
        ConfigError: `samples` is no map-style dataset, is empty, or its samples are no pairs.
    """
    if not hasattr(samples, "__len__") or not hasattr(samples, "__getitem__"):
        raise ConfigError(f"dataset {type(samples).__name__}: must have a length and samples[i]; iterable ones do not")
    if len(samples) == 0:
        raise ConfigError(f"dataset {type(samples).__name__}: has no samples")
    if chunk is not None and chunk < 1:
        raise ConfigError(f"chunk {chunk}: must be at least 1 sample")
    return Mapped(samples, (inputs, targets), chunk, identity)


class Mapped(Source):
    """A dataset that holds itself."""

    keeps_rows = False

    def __init__(self, samples: Any, keys: tuple[Any, Any], chunk: int | None, identity: str | None) -> None:
        self.samples, self.busy, self._keys = samples, Busy(), keys
        self.name = type(samples).__name__
        count = len(samples)
        self.each = chunk or -(-count // _CHUNKS)
        self.sizes = evenly(count, self.each)
        (first,) = drawn(self.make, [0], 0)
        self.sample_bytes = sum(tensor.nbytes for tensor in tensors_of(default_collate([first]))) or 1
        # A dataset without chunks holds its samples itself, so it fits into any memory limit.
        self.num_bytes = self.sizes * self.sample_bytes if chunk else np.ones(len(self.sizes), np.int64)
        self.identity = f"{count} samples of {identity or self.name}"

    def make(self, number: int, wanted: Wanted = ALL) -> tuple[Any, Any]:
        """Return a sample as (inputs, target), as far as wanted."""
        sample = self.samples[number]
        if isinstance(sample, dict):
            try:
                parts = [fields(sample, said) for said in self._keys]
            except (KeyError, TypeError) as error:
                has = f"its samples have {', '.join(map(repr, sample))}; name inputs= and targets="
                raise ConfigError(f"dataset {self.name}: {has}") from error
        elif isinstance(sample, (tuple, list)) and len(sample) == 2:
            parts = list(sample)
        else:
            raise ConfigError(f"dataset {self.name}: a sample is a {type(sample).__name__}; must be (inputs, target)")
        return wanted.of(parts)

    @cached_property
    def draws(self) -> bool:
        with preserved():
            before, others = torch.get_rng_state(), python_state()
            self.make(0)
            return not torch.equal(before, torch.get_rng_state()) or python_state() != others

    def load(self, chunk: int, wanted: Wanted = ALL) -> int:
        return chunk * self.each

    def rows(self, held: int, numbers: Numbers, wanted: Wanted, keyed: int | None = None) -> Tree:
        make, places = partial(self.make, wanted=wanted), (held + numbers).tolist()
        pairs = drawn(make, places, keyed)
        if self.keeps_rows:
            return pairs
        return wanted.of(zip(*pairs, strict=True), lambda side: default_collate(list(side)))

    def batch(self, rows: Tree, wanted: Wanted) -> tuple[Tree, Tree]:
        return wanted.of(zip(*rows, strict=True), list) if self.keeps_rows else super().batch(rows, wanted)


def drawn(make: Callable[[int], T], numbers: Iterable[int], keyed: int | None) -> list[T]:
    """Return `make(number)` for each number, with random numbers keyed by `keyed` and the number.

    Args:
        keyed: None: samples draw no random numbers.
    """
    if keyed is None:
        return [make(number) for number in numbers]
    made = []
    with preserved():
        for number in numbers:
            seed_process(key(keyed, number) >> 1)  # generators take 63 bits
            made.append(make(number))
    return made


#: bytes of a chunk, about
CHUNK_BYTES = 16 * 10**6


class RangeReader:
    """Reads rows chunk by chunk; a subclass names its chunks and reads one.

    Attributes:
        name: as errors show it.
        identity: equal where the rows and their numbers are equal, almost surely; in words.
        sizes: rows of each chunk.
        num_bytes: bytes of memory that each chunk takes.
        in_order: whether chunks come only one after the other.
        cause: of the time that reading takes.
    """

    name: str
    identity: str
    sizes: Numbers
    num_bytes: Numbers
    in_order = False
    cause: Cause = "disk"

    def read(self, chunk: int, columns: Sequence[str]) -> Mapping[str, Any]:
        """Return columns of a chunk: arrays with a row for each, or lists of arrays that differ in length.

        Several threads may ask, unless chunks come in order.

        Raises:
            DataError: the chunk cannot be read.
        """
        raise NotImplementedError

    def place(self, chunk: int) -> str:
        """Return where a chunk lies, for errors."""
        return self.name


def names(*columns: Columns) -> list[str]:
    """Return the names of columns, each once."""
    return list(dict.fromkeys(name for said in columns for name in ([said] if isinstance(said, str) else said)))


def evenly(rows: int, each: int) -> Numbers:
    """Return the sizes of chunks of `each` rows; the last may have fewer."""
    sizes = np.full(-(-rows // each), each, np.int64)
    sizes[-1:] = rows - each * (len(sizes) - 1)
    return sizes


class Ranges(Source):
    """The rows of a reader as samples.

    Args:
        inputs, targets: a column, which is given as a tensor; or several, which are given as a dict.
    """

    loads_parts = True
    keeps_rows: bool | None = False

    def __init__(self, reader: RangeReader, inputs: Columns, targets: Columns) -> None:
        self._reader, self._sides, self.busy = reader, (inputs, targets), Busy()
        self.name, self.in_order = reader.name, reader.in_order
        self.sizes, self.num_bytes = reader.sizes, reader.num_bytes
        if not self.sizes.sum():
            raise ConfigError(f"{self.name}: there is no sample in it")
        self.sample_bytes = int(self.num_bytes.sum()) // int(self.sizes.sum()) + 1
        self.identity = f"{reader.identity}: {inputs}, {targets}"

    def shard_of(self, chunk: int) -> str:
        return self._reader.place(chunk)

    def load(self, chunk: int, wanted: Wanted = ALL) -> Mapping[str, Any]:
        with self.busy.on(self._reader.cause):
            held = self._reader.read(chunk, self._columns(wanted))
        for name, column in held.items():
            if len(column) != self.sizes[chunk]:
                raise DataError(f"{self.shard_of(chunk)}: {name} has {len(column)} rows of {self.sizes[chunk]}")
        return held

    def _columns(self, wanted: Wanted) -> list[str]:
        return names(*(said for said, is_wanted in zip(self._sides, wanted, strict=True) if is_wanted))

    def rows(self, held: Mapping[str, Any], numbers: Numbers, wanted: Wanted, keyed: int | None = None) -> Tree:
        chosen = {name: held[name] for name in self._columns(wanted)}
        if self.keeps_rows:
            rows = ({name: _wide(torch.as_tensor(chosen[name][n])) for name in chosen} for n in numbers.tolist())
            return [wanted.of(self._sides, partial(fields, row)) for row in rows]
        for name, column in chosen.items():
            if isinstance(column, list):
                raise ConfigError(f"{self.name}: rows of {name} differ in length; give Loader lengths=, or pad them")
        return {name: torch.from_numpy(column[numbers]) for name, column in chosen.items()}

    def batch(self, rows: Tree, wanted: Wanted) -> tuple[Tree, Tree]:
        if self.keeps_rows:
            return wanted.of(zip(*rows, strict=True), list)
        return wanted.of(self._sides, partial(fields, {name: _wide(tensor) for name, tensor in rows.items()}))


def _wide(tensor: Tensor) -> Tensor:
    """Return whole numbers as int64, as the format "torch" of `datasets` does: embeddings and losses take these."""
    return tensor if tensor.is_floating_point() or tensor.dtype is torch.bool else tensor.to(torch.int64)


def arrays(table: Any, columns: Sequence[str], place: str) -> dict[str, Any]:
    """Return columns of an Arrow table as `RangeReader.read` does.

    Raises:
        ConfigError, DataError: a column holds no numbers, or not in each row.
    """
    return {name: _array(table.column(name), f"{place}: column {name}") for name in columns}


def _array(column: Any, told: str) -> NDArray[Any] | list[NDArray[Any]]:
    arrow, compute = need("pyarrow", "a table"), need("pyarrow.compute", "a table")
    types = arrow.types
    is_list = any(test(column.type) for test in (types.is_list, types.is_large_list, types.is_fixed_size_list))
    values = compute.list_flatten(column) if is_list else column
    if missing := column.null_count or values.null_count:
        raise DataError(f"{told} has {missing} rows without a value")
    if not any(test(values.type) for test in (types.is_integer, types.is_floating, types.is_boolean)):
        raise ConfigError(f"{told} is {column.type}; must be numbers: map it, or take dataset(...), row by row")
    found: NDArray[Any] = np.array(values.to_numpy())  # a copy: a mapped file may be truncated later
    if not is_list:
        return found
    lengths = compute.list_value_length(column).to_numpy()
    if len(lengths) and (lengths == lengths[0]).all():
        return found.reshape(len(lengths), lengths[0])
    return np.split(found, np.cumsum(lengths)[:-1])
