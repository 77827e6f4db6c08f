"""Several processes that are one worker: its members, and tensors that they hold in parts.

Member i of every worker belongs to the i-th plane: a pipeline with a separate carrier and the same relation. Members of
a worker meet in the collectives of their layers, and once a step in the worker's first update.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ....dependency import Disagreement
from ....dependency.action import join_replica, join_slice, split_slice
from ..modules.digest import digest
from .divided import is_divided, local, place, whole_of
from .ownership import cut_into_buckets

_LOST = re.compile(r"gloo/transport.*(closed by peer|reset by peer|Broken pipe|Connection refused)")
#: MiB of gradients that members exchange at once
_BUCKET = 25


class Members:
    """This process among the members of its worker.

    Args:
        mesh: of the members, with one dimension.
        shares: number of parts into which members divide microbatches: one for each member (FSDP, experts), one in
            all (tensor parallelism), or one for neighbours that compute alike (both).
        per_microbatch: whether gradients are summed over members after each microbatch, not once a step.
        kept: whether layers that FSDP2 gathers stay whole for a whole step; None: a function of the user divides them.

    Attributes:
        alone: names of tensors that not all members have, such as weights of experts.
        summing: stages with gradients that members sum here, since no layer sums them.
    """

    def __init__(self, mesh: Any, shares: int, per_microbatch: bool, kept: bool | None = None) -> None:
        self.mesh, self.shares, self.per_microbatch, self.kept = mesh, shares, per_microbatch, kept
        self.count, self.group = mesh.size(), mesh.get_group()
        self.index, self.ranks = self.group.rank(), mesh.mesh.flatten().tolist()
        self.rows, self.alike = shares > 1, self.count // shares
        #: which part of the microbatches is this member's
        self.part = self.index // self.alike
        #: into how many slices each microbatch is cut
        self.slices = 1
        self.alone: set[str] = set()
        self.summing: set[int] = set()
        #: names of tensors with a part that this member is the first to hold
        self._counted: set[str] = set()
        #: by name: members with the same part, one for each part of the rows, to sum gradients over; so for each member
        self._adds: dict[str, list[int]] = {}
        self._of_all: Sequence[dict[str, list[int]]] = []

    def in_whole(self, index: int, part: int) -> int:
        """Return the index in the whole batch of a microbatch, or of its slice, of one part of the members."""
        microbatch, number = split_slice(index, self.slices)
        return join_slice(join_replica(microbatch, part, self.shares), number, self.slices)

    def numbered(self, microbatch: int) -> int:
        """Return the number of a microbatch over all planes; without training all planes run all microbatches."""
        return self.in_whole(microbatch, self.part) if self.rows and torch.is_grad_enabled() else microbatch

    @contextmanager
    def as_world(self) -> Iterator[None]:
        """Return a context that makes the members torch's default process group, which layers use to divide or meet."""
        world = torch.distributed.group
        before = world.WORLD
        if before is None or before.size() > 1:  # made by the script, of all processes
            yield
            return
        world.WORLD = self.group
        try:
            yield
        finally:
            world.WORLD = before

    def exchange(self, value: Any) -> list[Any]:
        """Return the value of every member, in order. It is a collective."""
        found: list[Any] = [None] * self.count
        torch.distributed.all_gather_object(found, value, group=self.group)
        return found

    def any(self, value: bool) -> bool:
        """Return whether a value is true on a member. It is a collective."""
        found = torch.tensor(value, dtype=torch.int32, device=self.mesh.device_type)
        torch.distributed.all_reduce(found, torch.distributed.ReduceOp.MAX, group=self.group)
        return bool(found)

    @staticmethod
    def has_lost_one(error: BaseException) -> bool:
        """Return whether a collective failed because another member is gone, which is the cause; gloo has no class."""
        return isinstance(error, RuntimeError) and _LOST.search(str(error)) is not None

    def compare(self, what: str, value: Any) -> None:
        """Compare a value that must be alike on all members.

        Raises:
            Disagreement: it is not; on every member.
        """
        found = self.exchange(value)
        if any(each != found[0] for each in found):
            raise Disagreement(f"members of a worker differ: {what}; members must build and train alike")

    def unlike(self, tensors: Mapping[str, Tensor]) -> int:
        """Return how many values members hold, beyond one, of the tensors that they hold whole. It is a collective."""
        return len(set(self.exchange(digest(local(t) for _, t in self._alike(tensors))))) - 1

    @torch.no_grad()
    def adopt(self, buffers: Mapping[str, Tensor]) -> None:
        """Take the first member's values of buffers that members hold alike; checkpoints have these. A collective."""
        if self.unlike(buffers):
            for _, buffer in sorted(self._alike(buffers)):
                torch.distributed.broadcast(buffer, group=self.group, group_src=0)

    def _alike(self, tensors: Mapping[str, Tensor]) -> list[tuple[str, Tensor]]:
        return [(name, t) for name, t in tensors.items() if name not in self.alone and not is_divided(t)]

    def look(self, stages: Mapping[int, Mapping[str, Tensor]]) -> None:
        """Find which members have the same part of a tensor; compare the initial values of tensors that all hold whole.

        Args:
            stages: the tensors of each stage, by name.
        """
        tensors = {name: tensor for named in stages.values() for name, tensor in named.items()}
        places = self.exchange({name: place(tensor) for name, tensor in tensors.items()})
        self.alone = {name for name in tensors if any(name not in each for each in places)}
        for name in tensors:
            at, mesh = places[self.index][name]
            same = [number for number, each in enumerate(places) if name in each and each[name][0] == at]
            if same[0] == self.index:
                self._counted.add(name)
            # Members of the tensor's mesh sum by a collective of its layer.
            outside = (n for n in reversed(same) if n // self.alike == self.part or self.ranks[n] not in mesh)
            firsts = {n // self.alike: n for n in outside}
            if len(firsts) > 1:
                self._adds[name] = sorted(firsts.values())
        here = [stage for stage, named in stages.items() if not self._adds.keys().isdisjoint(named)]
        self._of_all, summing = zip(*self.exchange((self._adds, here)), strict=True)
        self.summing.update(*summing)
        self.compare("initial weights that each holds whole", digest(local(t) for _, t in self._alike(tensors)))

    def counts(self, name: str) -> bool:
        """Return whether the norm of a gradient counts here: of several members with the same part, on the first."""
        return name in self._counted

    def sums(self, parameters: Mapping[str, nn.Parameter]) -> Iterable[tuple[str, nn.Parameter]]:
        """Return the parameters with gradients to sum over members here, since no layer does."""
        return [(name, parameter) for name, parameter in parameters.items() if name in self._adds]

    @torch.no_grad()
    def sum(self, grads: Mapping[str, Tensor | None]) -> dict[str, Tensor | None]:
        """Return the sums of gradients over members, added in the order of members; None where no member has one.

        Each bucket of gradients travels by one all-to-all.
        """
        own = {n: local(g).contiguous() for n, g in grads.items() if g is not None and self.index in self._adds[n]}
        given = self.exchange({name: (grad.shape, grad.dtype) for name, grad in own.items()})
        found: dict[str, Tensor | None] = dict.fromkeys(grads)
        sizes: dict[torch.dtype, dict[str, int]] = {}
        for name, (shape, dtype) in (pair for each in given for pair in each.items()):
            held = sizes.setdefault(dtype, {})
            held[name] = max(held.get(name, 0), shape.numel() * dtype.itemsize)
        for names in (names for held in sizes.values() for names in cut_into_buckets(held, held.__getitem__, _BUCKET)):
            for name, part in self._sent(names, own, given):
                total = found[name]
                found[name] = part.clone() if total is None else total.add_(part)
        return found

    def _sent(
        self, names: Sequence[str], own: Mapping[str, Tensor], given: Sequence[Mapping[str, tuple[Any, torch.dtype]]]
    ) -> Iterator[tuple[str, Tensor]]:
        """Send the gradients of a bucket to the members that add them; yield the arrived ones in the order of members.

        Args:
            given: by member, shapes and types of its gradients.
        """
        gives = [[own[n].view(-1).view(torch.uint8) for n in names if n in own and self.index in adds.get(n, ())]
                 for adds in self._of_all]  # fmt: skip
        takes = [[(n, *each[n]) for n in names if n in each and member in self._adds.get(n, ())]
                 for member, each in enumerate(given)]  # fmt: skip
        sizes = [[shape.numel() * dtype.itemsize for _, shape, dtype in each] for each in takes]
        empty = torch.empty(0, dtype=torch.uint8, device=self.mesh.device_type)
        received = empty.new_empty(sum(map(sum, sizes)))
        sent = torch.cat([empty, *(part for parts in gives for part in parts)])
        counts = [sum(part.numel() for part in parts) for parts in gives]
        torch.distributed.all_to_all_single(received, sent, [*map(sum, sizes)], counts, self.group)
        arrived = received.split([size for each in sizes for size in each])
        for part, (name, shape, dtype) in zip(arrived, (one for each in takes for one in each), strict=True):
            yield name, part.view(dtype).view(shape)

    def whole(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return whole tensors on the first member, with the tensors that it lacks itself; none elsewhere."""
        with torch.no_grad():
            each = ((name, whole_of(tensors[name])) for name in sorted(tensors))
            found = {name: tensor for name, tensor in each if self.index == 0 or self._is_alone(name)}
        others = self.exchange(found if self.index else {})
        return found | {name: t for other in others for name, t in other.items()} if self.index == 0 else {}

    @torch.no_grad()
    def taken(self, tensors: Mapping[str, Tensor], first: Collection[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors that this member writes, whole: members take turns, and only one tensor is whole at once.

        It is a collective: to be used up on all members.

        Args:
            first: names of the tensors with values that count on the first member.
        """
        # Sorted: a loaded optimizer has its state in the order of a set, another one in each process.
        for number, name in enumerate(sorted(name for name in tensors if not self._is_alone(name))):
            whole = whole_of(tensors[name])
            if self.index == (0 if name in first else number % self.count):
                yield name, whole
        yield from (pair for pair in tensors.items() if self._is_alone(pair[0]))

    def _is_alone(self, name: str) -> bool:
        """Return whether a tensor, or its state in an optimizer, is this member's alone."""
        if name.startswith(("average.", "gradient")):
            name = name.partition(".")[2]
        return any(name == each or name.startswith((f"state.{each}.", f"{each} ")) for each in self.alone)
