"""The inputs of a planner: the costs of a model by block, also as JSON, and the machines. Loads without torch."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import reduce
from itertools import accumulate, pairwise
from typing import Any

from ..dependency import B, ConfigError, F, G, I, Kind, Order, R, U, W
from ..system.files import DAMAGED
from .footprint import Size
from .plan import from_json_value, json_field, to_json_value
from .simulator import Link
from .slice_costs import SliceCosts

#: a link that takes no time
_NO_WAY = Link()
#: slices with costs that grow with their length alone
_PLAIN = SliceCosts()
#: tokens, or places of a row, that `LengthTerms` count by
THOUSAND = 1000
#: kinds with times in a profile
TIMED = (F, B, I, W, R, U, G)


@dataclass(frozen=True)
class LayerCost:
    """The costs of one block: for one microbatch; U for one step; G to add the gradients of another replica."""

    #: milliseconds by kind
    times: Mapping[Kind, float] = field(metadata=json_field("ms"))
    size: Size = field(metadata=json_field("bytes"))
    name: str = ""
    #: bytes of parameters that members of a worker would divide, by `fsdp` and by `tp`; how often `tp` would add up
    #: `outputs` in a forward, and gradients of `inputs` in a backward
    divided: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Tie:
    """A parameter that two blocks share. On two stages it has two copies; every step sums their gradients."""

    first: int
    last: int
    #: bytes that are stored once, not twice, if one stage has both blocks
    weights: float = 0
    gradients: float = 0
    optimizer: float = 0
    #: whether both must be in one stage
    together: bool = False


@dataclass(frozen=True)
class LengthTerms:
    """Milliseconds of a block by kind: fixed + token * tokens + attention * tokens * length, in thousands."""

    fixed: Mapping[Kind, float] = field(default_factory=dict)
    token: Mapping[Kind, float] = field(default_factory=dict)
    attention: Mapping[Kind, float] = field(default_factory=dict)

    def ms(self, kind: Kind, rows: float, length: float) -> float:
        """Return the time of a microbatch of `rows` rows of a length."""
        fixed, token, attention = (terms.get(kind, 0.0) for terms in (self.fixed, self.token, self.attention))
        return fixed + rows * length / THOUSAND * (token + attention * length / THOUSAND)


@dataclass(frozen=True)
class Profile:
    """The measured costs of a model's blocks, for microbatches of one or several numbers of rows.

    Times in milliseconds, memory in bytes.
    """

    #: rows of a microbatch -> costs by block; ascending
    measured: Mapping[int, Sequence[LayerCost]] = field(metadata=json_field("rows"))
    #: time of each action of a stage besides its blocks: the model's code around blocks, and the runtime
    per_stage: Mapping[Kind, float] = field(default_factory=dict, metadata=json_field("per_stage_ms"))
    ties: tuple[Tie, ...] = ()
    model: str = ""
    #: hash of the measured model's blocks and shapes
    signature: str = ""
    device: str = "cpu"
    #: rows of the model's example batch; 0: unknown
    batch_rows: int = 0
    #: number of workers that measured it at the same time; 0: one process alone
    workers: int = 0
    #: their speeds and links, as in a file for --topology; empty: not measured
    topology: Mapping[str, Any] = field(default_factory=dict)
    #: width of the middle half of a block's times, relative to their median; 0: unknown
    scatter: float = 0
    #: time of a step besides its actions
    per_step: float = field(default=0, metadata=json_field("per_step_ms"))
    #: compute time that a worker loses to each MiB that it sends or receives; 0 for a GPU
    per_mib: float = field(default=0, metadata=json_field("per_mib_ms"))
    #: terms of each block's times by the length of rows; empty: not measured
    by_length: tuple[LengthTerms, ...] = ()
    #: length of the rows of the model's example batch; 0: unknown
    length: int = 0

    @property
    def num_blocks(self) -> int:
        return len(next(iter(self.measured.values())))

    def at_length(self, rows: float, length: float) -> list[LayerCost]:
        """Return the costs by block with rows of another length: times by its terms, bytes in proportion."""
        found = []
        for cost, terms in zip(self.at(rows), self.by_length, strict=True):
            usual = {kind: terms.ms(kind, rows, self.length) for kind in cost.times}
            times = {kind: cost.times[kind] * terms.ms(kind, rows, length) / ms for kind, ms in usual.items() if ms}
            other = blend(cost, cost, length / self.length - 1, proportional=True)
            found.append(replace(other, times={**cost.times, **times}))
        return found

    def at(self, rows: float) -> list[LayerCost]:
        """Return the costs by block for microbatches of `rows` rows, interpolated linearly between the nearest two."""
        known = sorted(self.measured)
        if rows in self.measured:
            return list(self.measured[int(rows)])
        if len(known) == 1:
            return [blend(b, b, rows / known[0] - 1, proportional=True) for b in self.measured[known[0]]]
        at = min(max(bisect_left(known, rows), 1), len(known) - 1)
        low, high = known[at - 1], known[at]
        pairs = zip(self.measured[low], self.measured[high], strict=True)
        return [blend(a, b, (rows - low) / (high - low)) for a, b in pairs]


#: bytes that do not depend on the rows of a microbatch
RESIDENT = ("weights", "gradients", "optimizer")
#: kinds of bytes that a stage sums over its blocks
SUMMED = (*RESIDENT, "activations", "after_inputs", "elsewhere", "unsummed")


def blend(a: LayerCost, b: LayerCost, share: float, proportional: bool = False) -> LayerCost:
    """Return the costs a + share * (b - a); proportional: a * (1 + share)."""

    def between(x: float, y: float) -> float:
        return max(0.0, x + share * (x if proportional else y - x))

    times = {kind: took if kind in (U, G) else between(took, b.times.get(kind, took)) for kind, took in a.times.items()}
    pairs = {f.name: (getattr(a.size, f.name), getattr(b.size, f.name)) for f in fields(Size)}
    sizes = {name: pair[0] if name in RESIDENT else between(*pair) for name, pair in pairs.items()}
    return replace(a, times=times, size=Size(**sizes))


def mean_blocks(variants: Sequence[Sequence[LayerCost]]) -> list[LayerCost]:
    """Return the mean costs of blocks that have several."""
    mean = list(variants[0])
    for number, blocks in enumerate(variants[1:], start=2):
        mean = [blend(known, other, 1 / number) for known, other in zip(mean, blocks, strict=True)]
    return mean


@dataclass(frozen=True)
class Machines:
    """The workers and the links between them. Times in milliseconds, bandwidths in bytes a millisecond."""

    num_workers: int
    #: by worker, the ratio of its times to the profile's; empty: all 1
    slowness: tuple[float, ...] = ()
    #: bytes that each worker may use; empty or None: no limit
    memory: tuple[float | None, ...] = ()
    #: the link between any two workers
    link: Link = _NO_WAY
    #: links that differ from that, by (source, target)
    links: Mapping[tuple[int, int], Link] = field(default_factory=dict)
    #: bytes a millisecond that a worker sends to all other workers together; a missing worker has no limit
    uplinks: Mapping[int, float] = field(default_factory=dict)
    #: bytes a millisecond that a worker copies between device and host memory
    copy: float = float("inf")
    #: the workers' order of actions; None: the schedule's preference
    order: Order | None = None

    def __post_init__(self) -> None:
        for name, values in (("slowness", self.slowness), ("memory", self.memory)):
            if values and len(values) != self.num_workers:
                raise ConfigError(f"{name}: has {len(values)} values, but there are {self.num_workers} workers")

    def slow(self, worker: int) -> float:
        """Return the ratio of the times of `worker` to the profile's."""
        return self.slowness[worker] if self.slowness else 1

    def limit(self, worker: int) -> float | None:
        """Return the bytes that `worker` may use; None: no limit."""
        return self.memory[worker] if self.memory else None

    def between(self, source: int, target: int) -> Link:
        """Return the link from one worker to another."""
        return self.links.get((source, target), self.link)

    def grouped(self, members: int) -> Machines:
        """Return workers of `members` processes in a row; each is as slow and small as its worst process."""
        if members == 1:
            return self
        count = self.num_workers // members
        near = range(0, count * members, members)  # fewer left over than a worker has stay idle
        slowness = tuple(max(self.slowness[at : at + members]) for at in near if self.slowness)
        limits = [self.memory[at : at + members] for at in near if self.memory]
        memory = tuple(min((x for x in limit if x is not None), default=None) for limit in limits)
        links = {(a // members, b // members): self.links[a, b] for a in near for b in near if (a, b) in self.links}
        uplinks = {at // members: rate for at, rate in self.uplinks.items() if at in near}
        return Machines(count, slowness, memory, self.link, links, uplinks, self.copy, "fixed")

    @property
    def links_are_plain(self) -> bool:
        """Whether all links have one latency and no limit of bandwidth."""
        return not self.links and not self.uplinks and self.link.bandwidth == float("inf")


class Chain:
    """The blocks in order, with the costs of any range of them in constant time by prefix sums.

    Blocks that must be in one stage count as one; block numbers in arguments count the merged chain.

    Args:
        per_stage: time of each action of a stage besides its blocks, by kind.
        per_step: time of a step besides its actions.
        per_mib: compute time lost to each MiB that is sent or received.
        model: the name of the model.
        slicing: costs of slices of its sequences.
        variants: the blocks by length of rows, with `blocks` as their mean; empty: all rows have one length.
    """

    def __init__(
        self,
        blocks: Sequence[LayerCost],
        per_stage: Mapping[Kind, float] | None = None,
        ties: Sequence[Tie] = (),
        per_step: float = 0,
        per_mib: float = 0,
        model: str = "",
        slicing: SliceCosts = _PLAIN,
        variants: Mapping[float, Sequence[LayerCost]] = {},
    ) -> None:
        self.slicing, self._variants = slicing, variants
        self._like = per_stage, ties, per_step, per_mib, model, slicing
        self._among: dict[tuple[float, ...], Chain] = {}
        inside = {i for tie in ties if tie.together for i in range(tie.first + 1, tie.last + 1)}
        #: the model's numbers of blocks that may begin a stage, and the end
        self._places = [i for i in range(len(blocks) + 1) if i not in inside]
        self.num_blocks = len(self._places) - 1
        self.per_step, self.model = per_step, model
        self.per_byte = per_mib / 2**20
        self.ties = tuple(tie for tie in ties if tie.weights or tie.gradients or tie.optimizer)
        self.per_stage = {kind: (per_stage or {}).get(kind, 0) for kind in TIMED}
        self._times = {kind: self._sums(block.times.get(kind, 0) for block in blocks) for kind in TIMED}
        #: of the first stage, which computes no gradient of its inputs: all its backward is W
        self._first_times = {**self._times, I: [0.0] * len(self._places), W: self._times[B]}
        parts = ([block.size for block in blocks[a:b]] for a, b in pairwise(self._places))
        self._sizes: list[Size] = [reduce(Size.__add__, part) for part in parts]
        self._bytes: dict[str, list[float]] = {
            name: [0.0, *accumulate(getattr(size, name) for size in self._sizes)] for name in SUMMED
        }
        #: prefix sums of the bytes that a block and the one before it would both keep, which one stage keeps once
        self._joint = [0.0, *accumulate(a.joint(b) for a, b in pairwise(self._sizes))]

    def among(self, lengths: Sequence[float]) -> Chain:
        """Return the chain of a mean microbatch of these; itself if all rows have one length."""
        if not (key := tuple(sorted(lengths)) if self._variants else ()):
            return self
        if key not in self._among:
            blocks = [self._variants[length] for length in key]
            self._among[key] = Chain(mean_blocks(blocks), *self._like, self._variants if len(key) > 1 else {})
        return self._among[key]

    def _sums(self, values: Iterable[float]) -> list[float]:
        sums: list[float] = [0, *accumulate(values)]
        return [sums[i] for i in self._places]

    def time(self, kind: Kind, start: int, stop: int, share: float = 1) -> float:
        """Return the time of an action on a stage of blocks `start` to `stop` - 1, for a share of their time.

        The stage that begins with block 0 is the first; of a split backward it does everything in W.
        """
        times = (self._times if start else self._first_times)[kind]
        return (times[stop] - times[start]) * share + self.per_stage[kind]

    def size(self, start: int, stop: int) -> Size:
        """Return the bytes of a stage of blocks `start` to `stop` - 1."""
        summed = {name: sums[stop] - sums[start] for name, sums in self._bytes.items()}
        begin, end = self._places[start], self._places[stop]
        ties = [tie for tie in self.ties if begin <= tie.first and tie.last < end]
        for tie in ties:
            for name in RESIDENT:
                summed[name] -= getattr(tie, name)
        summed["activations"] -= self._joint[stop - 1] - self._joint[start]
        if not start:  # the whole backward is W, until which everything is kept
            summed["after_inputs"] = summed["activations"] + self.outputs(stop)
        first, last = self._sizes[start], self._sizes[stop - 1]
        ends = {"inputs": first.inputs, "kept_inputs": first.kept_inputs}
        ends |= {"outputs": last.outputs, "kept_outputs": last.kept_outputs}
        working = max(size.working for size in self._sizes[start:stop])
        return Size(**summed, **ends, working=working, tied=sum(tie.gradients for tie in ties))

    def separated_ties(self, ends: Sequence[int]) -> Iterator[tuple[int, int, Tie]]:
        """Yield (earlier stage, later stage, tie) of the ties between two stages."""
        starts = [self._places[end] for end in ends[:-1]] if self.ties else []
        for tie in self.ties:
            first, last = bisect_right(starts, tie.first) - 1, bisect_right(starts, tie.last) - 1
            if first != last:
                yield first, last, tie

    def outputs(self, stop: int) -> float:
        """Return the bytes of the payload that block `stop` gets from the stage before."""
        return self._sizes[stop - 1].outputs

    def inputs(self, start: int) -> float:
        """Return the bytes of the gradient that goes back from block `start`."""
        return self._sizes[start].inputs

    def ends(self, counts: Sequence[int]) -> tuple[int, ...]:
        """Return the boundaries of stages with these counts of the model's blocks."""
        place = {at: number for number, at in enumerate(self._places)}
        return tuple(place[at] for at in accumulate(counts, initial=0))

    def counts(self, ends: Sequence[int]) -> tuple[int, ...]:
        """Return the counts of the model's blocks of stages with these boundaries, 0 first."""
        return tuple(self._places[b] - self._places[a] for a, b in pairwise(ends))


def as_json(profile: Profile) -> dict[str, Any]:
    """Return a profile as JSON values; times in milliseconds, sizes in bytes; the blocks come last."""
    content: dict[str, Any] = to_json_value(profile)
    rows = content.pop("rows")
    ordered = {count: rows[count] for count in sorted(rows, key=int)}
    return {**content, "num_blocks": profile.num_blocks, "rows": ordered}


def from_json(content: Any, where: str) -> Profile:
    """Return the profile that `as_json` has written and a user may have edited.

    Raises:
        ConfigError: it is no profile, or its blocks do not fit together; the text names the place.
    """
    try:
        profile: Profile = from_json_value(Profile, content)
    except DAMAGED as error:
        raise ConfigError(f"{where}: is no profile ({type(error).__name__}: {error})") from None
    measured = profile.measured
    if not measured or len({len(blocks) for blocks in measured.values()}) != 1 or not profile.num_blocks:
        raise ConfigError(f"{where}: every number of rows must list the same blocks, at least one")
    for rows, blocks in measured.items():
        for block in blocks:
            if lacking := [kind for kind in (F, B, I, W, R) if kind not in block.times]:
                raise ConfigError(f"{where}: rows {rows}, block {block.name!r}: has no time of {lacking[0]}")
    return profile
