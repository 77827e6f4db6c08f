"""Ownership of parameters that several hold: replicas of a stage, or stages that are tied.

Whole parameters are owned, so that any optimizer can update a part of a stage alone.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ....dependency import NO_REDUCTIONS, ConfigError, Reductions, Spec
from ...transport.payload import Payload, pack, unpack
from ..modules.batch_norm import Statistics
from .divided import like, local

if TYPE_CHECKING:
    from ..modules.buffer_mirror import BufferMirror


def tied_parts(shared: Mapping[str, Sequence[int]], num_routes: int) -> dict[tuple[tuple[int, ...], int], list[str]]:
    """Return the names of parameters that several stages hold, by (these stages, owning route).

    The first of the stages owns them. It has its gradients last, so the other stages wait no longer than it does.
    """
    found: dict[tuple[tuple[int, ...], int], list[str]] = {}
    counts: dict[tuple[int, ...], int] = {}
    for name in sorted(shared):
        stages = tuple(sorted(shared[name]))
        number = counts[stages] = counts.get(stages, -1) + 1
        found.setdefault((stages, number % num_routes), []).append(name)
    return found


class Ownership:
    """The parameters of one replica of a stage in pieces with an owner each; all holders divide alike.

    Args:
        named: the stage's parameters.
        shared: of the whole model, parameter that several stages hold -> these stages.
        statistics: of the stage's batch normalisations, which are summed over replicas too, with the last piece of the
            first: it is exchanged behind the backward, which may run forwards again (checkpoints).

    Attributes:
        owned: names of the parameters that this replica owns.
        updated_elsewhere: names of the parameters with optimizer state on another replica or stage.
        num_buckets: number of buckets in the part of each replica.
    """

    def __init__(
        self,
        spec: Spec,
        stage: int,
        route: int,
        named: Sequence[tuple[str, nn.Parameter]],
        shared: Mapping[str, Sequence[int]],
        statistics: Statistics,
    ) -> None:
        routes = spec.num_routes
        parameters, tied = dict(named), tied_parts(shared, routes)
        self.zero, self._parameters = bool(spec.parallelism.zero), parameters
        owners: dict[str, tuple[int, int]] = {}
        parts: list[list[str]] = [[] for _ in range(routes)]
        sizes = [0] * routes
        #: number of a piece -> names of its parameters
        self._names: dict[int, list[str]] = {}
        for number, ((stages, owner), names) in enumerate(tied.items()):
            if stage in stages:
                self._names[number] = names
                owners |= dict.fromkeys(names, (stages[0], owner))
                sizes[owner] += sum(map(self._size, names)) * (stage == stages[0])
        own = [name for name in parameters if name not in owners] if routes > 1 else []
        for name in sorted(own, key=self._size, reverse=True):
            smallest = min(spec.alike(route), key=sizes.__getitem__)
            sizes[smallest] += self._size(name)
            parts[smallest].append(name)
            owners[name] = stage, smallest
        # Backward has the gradients of the last layers first.
        orders = ([n for n in reversed(own) if n in set(part)] for part in parts)
        split = [cut_into_buckets(order, self._size, spec.parallelism.bucket) for order in orders]
        self.num_buckets = max(1, *map(len, split))
        for owner, buckets in enumerate(split) if routes > 1 else ():
            for number in range(self.num_buckets):
                names = buckets[number] if number < len(buckets) else []
                self._names[len(tied) + number * routes + owner] = names
        self._statistics = statistics
        last = len(tied) + (self.num_buckets - 1) * routes
        #: the piece that they travel with; -1: there are none
        self._last = last if routes > 1 and statistics.named(summed=True) else -1
        #: the buffers of all replicas, if replicas may die; and the pieces that they travel with, one to each peer
        self.mirror: BufferMirror | None = None
        self._final = range(last, last + routes)
        self.owned = {name for name in parameters if owners.get(name, (stage, route)) == (stage, route)}
        first = {name: (min(shared.get(name, (stage,))), 0) for name in owners}
        elsewhere = {name for name, holder in first.items() if holder != (stage, route)}
        self.updated_elsewhere = parameters.keys() - self.owned if self.zero else elsewhere

    def _size(self, name: str) -> int:
        parameter = self._parameters[name]
        return parameter.nbytes * parameter.requires_grad

    @contextmanager
    def announced(self, numbers: Iterable[int], reached: Callable[[int], None]) -> Iterator[None]:
        """Call `reached(number)` within a backward for each piece, when the last of its gradients has been added.

        Raises:
            ConfigError: a gradient is added to a piece that was announced.
        """
        late = self._final if self.mirror is not None and self.mirror.changing else (self._last,)
        within = [number for number in numbers if number not in late]
        missing = {n: {name for name in self._names[n] if self._parameters[name].requires_grad} for n in within}

        def added(name: str, number: int, _: Tensor) -> None:
            if name not in missing[number]:
                why = f"{name}: its gradient is added several times in a backward, as by a reentrant checkpoint"
                raise ConfigError(f"{why}; with replicas, pass use_reentrant=False")
            missing[number].remove(name)
            if not missing[number]:
                reached(number)

        pairs = [(name, number) for number, names in missing.items() for name in names]
        held = ((self._parameters[name], partial(added, name, number)) for name, number in pairs)
        handles = [parameter.register_post_accumulate_grad_hook(hook) for parameter, hook in held]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def give(self, number: int) -> Payload:
        """Return this replica's gradients of a piece by name (None: no gradient); with ZeRO it has them no more."""
        payload = pack(self._given(number))
        for name in self._names[number] if self.zero else ():
            self._parameters[name].grad = None
        return payload

    def hand_on(self) -> Payload:
        """Return all gradients of this replica, which has them no more: another worker adds the rest."""
        payload = pack({name: None if p.grad is None else local(p.grad) for name, p in self._parameters.items()})
        for parameter in self._parameters.values():
            parameter.grad = None
        return payload

    def _given(self, number: int) -> dict[str, Any]:
        """Return the summands of a piece; statistics as copies, because they may be taken over before they are read.

        With the name "" the buffers that are not summed.
        """
        summed = self._statistics.named(summed=True) if number == self._last else {}
        found: dict[str, Any] = {name: tensor.clone() for name, tensor in summed.items()}
        if self.mirror is not None and number in self._final:
            found[""] = self.mirror.give()
        grads = {name: self._parameters[name].grad for name in self._names[number]}
        return found | {name: None if grad is None else local(grad) for name, grad in grads.items()}

    def sum(self, number: int, parts: Sequence[Payload], own: int) -> Payload | None:
        """Add up the gradients of a piece: the `parts` of other holders, with the local ones at place `own`.

        With ZeRO they are set; else returned, for all holders to `take`.
        """
        given = [unpack(part) for part in parts]
        given.insert(own, self._given(number))
        if self.mirror is not None and number in self._final:
            self.mirror.take([each.pop("") for each in given])
        sums: dict[str, Tensor | None] = dict.fromkeys(given[own])
        for name in sums:
            for grad in (each[name] for each in given if each[name] is not None):
                total = sums[name]
                sums[name] = grad.clone() if total is None else _added(total, grad)  # peers read the parts
        if not self.zero:
            return pack(sums)
        self._set(sums)
        return None

    def take(self, sums: Payload) -> None:
        """Replace gradients by sums, which peers read too."""
        self._set({name: None if total is None else total.clone() for name, total in unpack(sums).items()})

    def _set(self, sums: Mapping[str, Tensor | None]) -> None:
        statistics = self._statistics.named(summed=True)
        for name, total in sums.items():
            if name in self._parameters:
                self._parameters[name].grad = None if total is None else like(self._parameters[name], total)
            elif total is not None:
                statistics[name].copy_(total)

    def updated(self, number: int) -> Payload:
        """Return a copy of the parameters of a piece that may have changed; they may be written when the step is over.

        Frozen ones must not be written, even with the same numbers: where steps overlap, backwards still need them.
        """
        own = ((name, self._parameters[name]) for name in self._names[number])
        updated: dict[str, Tensor] = {name: p for name, p in own if p.requires_grad}
        updated |= self._statistics.named(summed=False) if number == self._last else {}
        return pack({name: local(tensor).detach().clone() for name, tensor in updated.items()})

    @torch.no_grad()
    def adopt(self, updated: Payload) -> None:
        """Set parameters and statistics to the values of their owner."""
        held = self._parameters | self._statistics.named(summed=False)
        for name, value in unpack(updated).items():
            local(held[name]).copy_(value)


def divided(spec: Spec, shared: Mapping[str, Sequence[int]], buckets: Mapping[int, int]) -> Reductions:
    """Return how parameters are divided, for the relation; `buckets`: of the stages that this process knows."""
    counts = tuple(buckets.get(stage, 1) for stage in range(spec.num_stages))
    return NO_REDUCTIONS._replace(tied=tuple(tied_parts(shared, spec.num_routes)), buckets=counts)


def cut_into_buckets(names: Iterable[str], size: Callable[[str], int], mebibytes: float) -> list[list[str]]:
    """Cut into buckets, in order; a parameter that is larger than a bucket gets a bucket alone."""
    found: list[list[str]] = []
    filled = 0.0
    for name in names:
        if not found or filled + size(name) > mebibytes * 2**20:
            found.append([])
            filled = 0
        found[-1].append(name)
        filled += size(name)
    return found


def _added(total: Tensor, grad: Tensor) -> Tensor:
    """Return a sum, in the memory of `total` where that can be; of sparse and dense it is dense, as by autograd."""
    if total.layout is not torch.strided and grad.layout is torch.strided:
        return grad + total
    return total.add_(grad)
