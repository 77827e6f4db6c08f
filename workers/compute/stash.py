"""A shard with several versions of the weights in use: each microbatch keeps to its declared one.

The parameters hold the newest version, which the optimizer updates in place; an update gives them other memory first
if a microbatch still needs the version that they held. A forward or backward by an older version is shown the memory of
that. So a copy is made only where it must be, and is free when the last backward that needs it is over.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ...dependency import ConfigError, Spec, microbatches_on, update_of
from ..transport.payload import Payload
from .gradients import GradientSets
from .module_state import KeptTensor
from .shard import ForwardArgs, Shard
from .stage_state import shown


class StashingShard(Shard):
    """A shard in a stream with forwards that overtake updates. Microbatches and updates count through the stream."""

    has_versions = True

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
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

    def begin(self, spec: Spec, route: int, first: StashingShard) -> None:
        """Begin a stream of `spec`: version 0 is the present parameters.

        Args:
            first: the shard of the stage on the first route; all routes share its reference if there is one.
        """
        self._trained = self._found()
        if spec.averaging_pull and first.reference is None:
            first.reference = [parameter.detach().clone() for parameter in first._found()]
        self.reference = first.reference
        self.newest, self._spec = 0, spec
        self._microbatches = microbatches_on(spec, route)
        self._uncounted = next(self._microbatches, None)
        self._forget()
        if any(p._backward_hooks or p._post_accumulate_grad_hooks for p in self._trained):
            raise ConfigError(
                f"stage {self.stage}: hooks of parameters' gradients do not run where several versions of the weights "
                "are in use; remove them, or use a synchronous schedule"
            )

    def _found(self) -> list[nn.Parameter]:
        # In the order of the beginning, alike on all routes: a forward may exchange modules.
        return [parameter for parameter in self.updating.parameters.values() if parameter.requires_grad]

    def refer_to(self, weights: Mapping[str, Tensor]) -> None:
        """Go on with these, by name, as the weights that all routes are pulled to."""
        self._trained = self._found()
        names = {parameter: name for name, parameter in self.named_parameters()}
        self.reference = [weights[names[parameter]].to(parameter.device, copy=True) for parameter in self._trained]

    @property
    def num_copies(self) -> int:
        """How many versions of the weights are held now."""
        return len(self._versions) + 1

    def forward(self, given: ForwardArgs) -> Payload | None:
        """Run the layers by the declared version, or to evaluate by the newest; else as `Shard.forward`."""
        with self._using(given.microbatch) if torch.is_grad_enabled() else self._evaluating():
            output = super().forward(given)
        if self.state.weights and torch.is_grad_enabled():
            raise ConfigError(
                f"stage {self.stage}: a layer writes a parameter in its forward, of shape "
                f"{tuple(self.state.weights[0].shape)}, where several versions of it are in use; make it a buffer, "
                "or use a synchronous schedule"
            )
        return output

    def _weigh(self, given: ForwardArgs, loss: Any, share: float) -> Tensor:
        """Record the loss as a part of its step; let backward start from its part of its update."""
        root, scale = super()._weigh(given, loss, share), share if given.scale is None else given.scale
        if not self.losses.summed:
            return root if scale == share else loss.reshape(()) * scale
        if self._spec.takes_steps:
            return root  # divided by the weight of the step
        weight = loss[1]
        return root * scale / (torch.where(weight == 0, 1, weight) if isinstance(weight, Tensor) else weight or 1)

    def recompute(self, step: int, microbatch: int) -> None:
        with self._using(microbatch):
            super().recompute(step, microbatch)

    def backward(self, microbatch: int, grads: Payload | None) -> Payload:
        with self._accumulating(microbatch):
            return super().backward(microbatch, grads)

    def backward_inputs(self, microbatch: int, grads: Payload | None) -> Payload:
        with self._using(microbatch):
            return super().backward_inputs(microbatch, grads)

    def backward_weights(self, microbatch: int) -> None:
        with self._accumulating(microbatch):
            super().backward_weights(microbatch)

    def turn_to(self, update: int) -> None:
        self._gradients.turn(update, self._trained)

    def update(self, *, finite: bool = True) -> None:
        self._count_uses(self.newest)
        if self._left.get(self.newest):
            self._versions[self.newest] = list(map(KeptTensor.now, self._trained))
            for parameter in self._trained:
                parameter.data = parameter.data.clone()
        else:
            self._left.pop(self.newest, None)
        self.newest += 1
        super().update(finite=finite)

    @torch.no_grad()
    def exchange(self, averaging_pull: float) -> None:
        """Pull the weights to the reference, and the reference to them."""
        assert self.reference is not None
        for parameter, reference in zip(self._trained, self.reference, strict=True):
            pull = (parameter - reference) * averaging_pull
            parameter.sub_(pull)
            reference.add_(pull)

    def evaluated_state_dict(self) -> dict[str, Tensor]:
        """Return the tensors that the shard evaluates with: for weights the reference, if there is one."""
        with self._evaluating():
            return self.state_dict()

    def _evaluating(self) -> AbstractContextManager[object]:
        """Return a context with the evaluated weights in the parameters."""
        pairs = zip(self._trained, self.reference or (), strict=False)
        return shown([KeptTensor(parameter, weight, parameter._version, None) for parameter, weight in pairs])

    def go_on_at(self, step: int, updates: int) -> None:
        super().go_on_at(step, updates)
        self.reference = None  # from a checkpoint all routes go on alike

    def abandon(self) -> None:
        super().abandon()
        self._forget()

    def _forget(self) -> None:
        self._versions.clear()
        self._left.clear()
        self._gradients.clear(0)

    def _using(self, microbatch: int) -> AbstractContextManager[object]:
        """Return a context with the version that a microbatch uses in the parameters.

        Raises:
            ConfigError: it is not there, so the declared weights would not be trained.
        """
        version = self._spec.version(self.stage, microbatch)
        if version != self.newest and version not in self._versions:
            raise ConfigError(
                f"stage {self.stage}: version {version} of the weights is declared, but held are "
                f"{sorted(self._versions.keys() | {self.newest})}: the schedule's edges do not keep its versions"
            )
        return shown(self._versions.get(version, ()))

    @contextmanager
    def _accumulating(self, microbatch: int) -> Iterator[None]:
        """Return a context for a backward that adds to the gradients of its update."""
        self.turn_to(update_of(self._spec, self.stage, microbatch).index)
        with self._using(microbatch):
            yield
        version = self._spec.version(self.stage, microbatch)
        self._count_uses(version)
        self._left[version] -= 1
        if not self._left[version] and version != self.newest:
            del self._left[version], self._versions[version]

    def _count_uses(self, version: int) -> None:
        """Count the microbatches that use versions up to this one."""
        while self._uncounted is not None:
            used = self._spec.version(self.stage, self._uncounted)
            if used > version:
                break
            self._left[used] = self._left.get(used, 0) + 1
            self._uncounted = next(self._microbatches, None)
