"""Several sets for the modules of one stage: versions of weights, or gradients and buffers of several replicas.

Each microbatch keeps to its declared version. The parameters hold the newest version, which the optimizer updates in
place; an update gives them other memory first if a microbatch still needs the version that they held. A forward or
backward by an older version is shown the memory of that. So a copy is made only where it must be, and is free when the
last backward that needs it is over.

Where a worker has several replicas of a stage, one replica updates the weights, and the rest are its guests. Each
replica has separate gradients and buffers, as it sees different rows. The modules have one replica's set at a time, and
the host's set between two actions. So a guest costs the memory of its gradients and buffers, and no second copy of
weights or optimizer state.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ...dependency import Action, ConfigError, Spec, microbatches_on, update_of
from .modules.module_state import KeptTensor, Place
from .sequences.slices import Slice
from .stage_state import StageState, shown
from .updating import Updating


class GradientSets:
    """Sets of gradients by key. One set is in place, as `grad` of the parameters; all other sets are kept apart.

    Each set costs the memory of its gradients. Weights and optimizer state exist once.

    Attributes:
        present: key of the set in place.
    """

    def __init__(self, present: Any) -> None:
        self.present = present
        self._apart: dict[Any, list[Tensor | None]] = {}

    def turn(self, key: Any, parameters: Sequence[nn.Parameter]) -> Any:
        """Put the set of a key in place; return the key of the set before."""
        before = self.present
        if key != before:
            if any(parameter.grad is not None for parameter in parameters):
                self._apart[before] = [parameter.grad for parameter in parameters]
            grads = self._apart.pop(key, [None] * len(parameters))
            for parameter, grad in zip(parameters, grads, strict=True):
                parameter.grad = grad
            self.present = key
        return before

    def clear(self, present: Any) -> None:
        """Forget all sets that are kept apart; the set in place belongs to `present` from now on."""
        self._apart.clear()
        self.present = present


class VersionStore:
    """The versions of a shard in a stream with forwards that overtake updates, counted through the stream."""

    def __init__(self, stage: int, slice: Slice, updating: Updating, state: StageState) -> None:
        self._stage, self._slice, self._updating, self._state = stage, slice, updating, state
        #: how many updates the parameters have seen since the stream began
        self.newest = 0
        self._spec: Spec
        #: microbatches of the stream that have not been counted as users of a version, and the next of them
        self._microbatches: Iterator[int] = iter(())
        self._uncounted: int | None = None
        #: older versions that microbatches use
        self._versions: dict[int, list[KeptTensor]] = {}
        #: version -> number of microbatches that use it and have not ended their backward
        self._left: dict[int, int] = {}
        #: the gradients of each update that is under way
        self._gradients = GradientSets(0)
        #: weights that all routes have in common and are pulled to; None: there are none
        self.reference: list[Tensor] | None = None
        self._trained: list[nn.Parameter] = []

    def begin(self, spec: Spec, route: int, first: VersionStore) -> None:
        """Begin a stream of `spec`: version 0 is the present parameters.

        Args:
            first: the versions of the stage on the first route; all routes share its reference if there is one.
        """
        trained = self._found()
        if self.reference is not None and list(map(id, trained)) != list(map(id, self._trained)):
            why = f"pull: parameters of stage {self._stage} were frozen or thawed, unlike the reference's"
            raise ConfigError(f"{why}; do it before the first step, or take another schedule")
        self._trained = trained
        if spec.averaging_pull and first.reference is None:
            first.reference = [parameter.detach().clone() for parameter in first._found()]
        self.reference = first.reference
        self.newest, self._spec = 0, spec
        self._microbatches = microbatches_on(spec, route)
        self._uncounted = next(self._microbatches, None)
        self.forget()
        if any(p._backward_hooks or p._post_accumulate_grad_hooks for p in self._trained):
            why = f"stage {self._stage}: hooks of gradients do not run where weights have several versions"
            raise ConfigError(f"{why}; remove them, or use a synchronous schedule")

    def _found(self) -> list[nn.Parameter]:
        # In the order of the beginning, alike on all routes: a forward may exchange modules.
        return [parameter for parameter in self._updating.parameters.values() if parameter.requires_grad]

    def refer_to(self, weights: Mapping[str, Tensor]) -> None:
        """Go on with these, by name, as the weights that all routes are pulled to."""
        self._trained = self._found()
        names = {parameter: name for name, parameter in self._slice.named_parameters()}
        self.reference = [weights[names[parameter]].to(parameter.device, copy=True) for parameter in self._trained]

    @contextmanager
    def around(self, action: Action, ctx: Any) -> Iterator[None]:
        """Return a context with the weights that a microbatch, or an evaluation, uses; or with an update's gradients.

        Args:
            action: of the microbatch, or the update; counted within its step.
        """
        if not action.kind.per_microbatch:
            self.turn(ctx.step.offsets.update + action.index)
            yield
            return
        if not torch.is_grad_enabled():
            with self.evaluated():
                yield
            return
        with self.accumulating(ctx.microbatch) if action.kind.accumulates else self.used(ctx.microbatch):
            yield
        if written := self._state.weights:
            why = f"a layer writes a parameter of shape {tuple(written[0].shape)}, which has several versions"
            raise ConfigError(f"stage {self._stage}: {why}; make it a buffer, or use a synchronous schedule")

    def turn(self, update: int) -> None:
        """Let the parameters have the gradients that an update takes."""
        self._gradients.turn(update, self._trained)

    def leave(self) -> None:
        """Go on to the next version, which an update makes in place; keep the present one if it is still used."""
        self._count_uses(self.newest)
        if self._left.get(self.newest):
            self._versions[self.newest] = list(map(KeptTensor.now, self._trained))
            for parameter in self._trained:
                parameter.data = parameter.data.clone()
        else:
            self._left.pop(self.newest, None)
        self.newest += 1

    @torch.no_grad()
    def exchange(self, averaging_pull: float) -> None:
        """Pull the weights to the reference, and the reference to them."""
        assert self.reference is not None
        for parameter, reference in zip(self._trained, self.reference, strict=True):
            pull = (parameter - reference) * averaging_pull
            parameter.sub_(pull)
            reference.add_(pull)

    def evaluated(self) -> AbstractContextManager[object]:
        """Return a context with the evaluated weights in the parameters: the reference, if there is one."""
        pairs = zip(self._trained, self.reference or (), strict=False)
        return shown([KeptTensor(parameter, weight, parameter._version, None) for parameter, weight in pairs])

    def forget(self) -> None:
        """Drop older versions, and gradients of later updates."""
        self._versions.clear()
        self._left.clear()
        self._gradients.clear(0)

    def used(self, microbatch: int) -> AbstractContextManager[object]:
        """Return a context with the version that a microbatch uses in the parameters.

        Raises:
            ConfigError: it is not there, so the declared weights would not be trained.
        """
        version = self._spec.version(self._stage, microbatch)
        if version != self.newest and version not in self._versions:
            held = sorted(self._versions.keys() | {self.newest})
            raise ConfigError(f"stage {self._stage}: version {version} of the weights is declared, but held are {held}")
        return shown(self._versions.get(version, ()))

    @contextmanager
    def accumulating(self, microbatch: int) -> Iterator[None]:
        """Return a context for a backward that adds to the gradients of its update."""
        self.turn(update_of(self._spec, self._stage, microbatch).index)
        with self.used(microbatch):
            yield
        version = self._spec.version(self._stage, microbatch)
        self._count_uses(version)
        self._left[version] -= 1
        if not self._left[version] and version != self.newest:
            del self._left[version], self._versions[version]

    def _count_uses(self, version: int) -> None:
        """Count the microbatches that use versions up to this one."""
        while self._uncounted is not None:
            used = self._spec.version(self._stage, self._uncounted)
            if used > version:
                break
            self._left[used] = self._left.get(used, 0) + 1
            self._uncounted = next(self._microbatches, None)


class Lodging:
    """The replicas of a stage that share weights, each a `Shard`.

    Args:
        host: the replica that has the optimizer.
    """

    def __init__(self, host: Any) -> None:
        self.host = host
        self._gradients = GradientSets(host)
        #: places of the buffers that differ between replicas; the buffers of the replicas that are not in place
        self._places: Sequence[Place] = ()
        self._buffers: dict[Any, Sequence[Tensor | None]] = {}

    def part(self, places: Sequence[Place], buffers: dict[Any, Sequence[Tensor | None]]) -> None:
        """Let the guests have separate buffers at some places."""
        self._places, self._buffers = places, buffers

    def turn(self, shard: Any) -> Any:
        """Put a replica's gradients and buffers into the modules; return the replica that had them in place before."""
        before = self._gradients.turn(shard, shard.parameters())
        if before is not shard and self._places:
            self._buffers[before] = [module._buffers[name] for module, name in self._places]
            for (module, name), buffer in zip(self._places, self._buffers.pop(shard), strict=True):
                module._buffers[name] = buffer
        return before

    @contextmanager
    def turned(self, shard: Any) -> Iterator[None]:
        """Return a context with a replica's gradients and buffers in the modules."""
        before = self.turn(shard)
        try:
            yield
        finally:
            self.turn(before)

    def forget(self) -> None:
        """Put the host's set into the modules."""
        self.turn(self.host)
