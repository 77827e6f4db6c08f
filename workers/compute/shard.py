"""The compute of one shard: forward, backward and update of its slice of the model."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import fields as fields_of
from dataclasses import is_dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ...dependency import ConfigError
from ..transport.payload import Payload, Tree, distinct_tensors, pack, shapes_in
from .modules import autocast, borders
from .modules.batch_norm import Statistics
from .modules.borders import ForwardArgs, Forwarded, InputGradients
from .modules.module_state import KeptAttribute, KeptTensor
from .modules.randomness import PythonDraws, Randomness, Seed
from .modules.torch_internals import run_backward
from .result import Loss, sum_and_weight
from .sequences.slices import Slice, note
from .stage_state import StageState, shown
from .updating import Training, Updating

if TYPE_CHECKING:
    from .before_update import BeforeUpdate
    from .modules.buffer_mirror import BufferMirror
    from .outside_updates import OutsideUpdates
    from .parts.members import Members
    from .parts.ownership import Ownership
    from .recomputation import FirstRun, Recomputation
    from .sequences.sequence import SliceStore
    from .split_backward import Saved, WeightBackward
    from .stash import Lodging, VersionStore

#: (output of the model, target) -> mean over the microbatch, or (sum, weight)
LossFn = Callable[[Any, Any], Any]

_UNTRAINED = Training()


class Shard:
    """A slice of the model on one worker, with its parameters and optimizer state.

    Args:
        stage: its position in the model.
        slice: the modules that it computes with.
        loss_fn: on the last stage: (output, target) -> mean over the microbatch, or (sum, weight).
        training: optimizer, learning-rate schedule, loss scale and moving average of the parameters.
        pieces: the ownership of parameters, if another stage or replica holds some of them too.
        members: the processes that share the slice; None: this one alone.
    """

    def __init__(
        self,
        stage: int,
        slice: Slice,
        randomness: Randomness,
        *,
        loss_fn: LossFn | None = None,
        training: Training = _UNTRAINED,
        pieces: Ownership | None = None,
        members: Members | None = None,
    ) -> None:
        self.stage = stage
        self.slice = slice
        self.loss_fn = loss_fn
        self.num_updates = 0
        self.randomness = randomness
        #: while all modules are in evaluation mode: their training modes before that
        self._modes: dict[nn.Module, bool] = {}
        self.draws = PythonDraws()
        self.statistics = Statistics(slice.own)
        self._forwarded: dict[int, Forwarded] = {}
        self._owed = InputGradients()
        #: microbatch -> the forward to recompute, and the state of the modules that it began with
        self._inputs: dict[int, tuple[Callable[[], tuple[Tree, Loss | None]], FirstRun]] = {}
        #: microbatch -> step, state, and the part of its backward that is left for the weights
        self._deferred: dict[int, tuple[int, list[KeptTensor | KeptAttribute], WeightBackward]] = {}
        #: if forwards are recomputed
        self.recomputation: Recomputation | None = None
        #: the last step with a forward that was run once more, to compare; None: there is none
        self._checked = -1 if training.check == "always" else None
        self.state = StageState(slice)
        # Names are taken now: a forward may replace modules.
        self.updating = Updating(slice, stage, training, randomness, pieces, members)
        #: if several replicas of the stage on this worker share their weights
        self.lodging: Lodging | None = None
        #: if replicas of the stage may die
        self.mirror: BufferMirror | None = None
        #: if several versions of the weights are in use
        self.versions: VersionStore | None = None
        #: if an optimizer does not move all copies of its weights
        self.outside_updates: OutsideUpdates | None = None
        #: if sequences are cut into slices
        self.slices: SliceStore | None = None

    @property
    def num_held(self) -> int:
        """How many microbatches, or their slices, have activations here."""
        return len(self._forwarded) + len(self._deferred)

    @property
    def is_guest(self) -> bool:
        """Whether another replica on this worker updates the weights."""
        return self.updating.is_read

    def lodge(self, host: Shard) -> None:
        """Share modules, weights and optimizer of `host`, another replica of the stage, which alone changes them."""
        from .stash import Lodging

        self.lodging = host.lodging = host.lodging or Lodging(host)
        own, its = self.updating, host.updating
        own.is_read, own.training, own.optimizer, own.owned = True, its.training, its.optimizer, its.owned
        own.scale, own.average, own.on_gradients = its.scale, its.average, its.on_gradients
        own.lr_scheduler = its.lr_scheduler
        self.go_on_at(host.num_updates, its.count)

    def turn(self, update: int | None = None) -> None:
        """Let the weights have this replica's gradients, where several replicas share them.

        Args:
            update: the number of the update that takes the gradients, where gradients of later updates may exist too.
        """
        if self.lodging is not None:
            self.lodging.turn(self)
        if self.versions is not None and update is not None:
            self.versions.turn(update)

    @property
    def optimizer(self) -> Optimizer | None:
        """The optimizer of the shard's parameters; None: they are not trained."""
        return self.updating.optimizer

    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Return each parameter once, under the name that it has in the unsplit model."""
        return self.slice.named_parameters()

    def parameters(self) -> list[nn.Parameter]:
        """Return each parameter once, even if several layers share it."""
        return [parameter for _, parameter in self.named_parameters()]

    def buffers(self) -> list[Tensor]:
        """Return the buffers of all modules of this shard; forwards may write them."""
        return [buffer for module in self.slice.own for buffer in module._buffers.values() if buffer is not None]

    def state_dict(self) -> dict[str, Tensor]:
        """Return parameters and buffers by their names in the unsplit model."""
        with nullcontext() if self.lodging is None else self.lodging.turned(self):
            return self.slice.state_dict()

    def evaluated_state_dict(self) -> dict[str, Tensor]:
        """Return the tensors that the shard evaluates with, as `state_dict` does: with versions, maybe other ones."""
        with nullcontext() if self.versions is None else self.versions.evaluated():
            return self.state_dict()

    @property
    def stateful(self) -> bool:
        """Whether a forward may write state that later forwards read, such as running means, so that order matters.

        Modules in evaluation mode count too, because a caller may put them into training mode between two steps.
        """
        return bool(self.state.weights or self.buffers())

    def train(self, mode: bool) -> None:
        """Set all modules to evaluation mode, or back to the modes that the user had given them."""
        if not self.is_guest:  # its host has the same modules
            if not mode and not self._modes:
                self._modes = {module: module.training for module in self.slice.modules}
            for module, own in self._modes.items():
                module.training = mode and own
            self._modes = {} if mode else self._modes
        if mode:
            self.state.look_at_modes()

    def go_on_at(self, step: int, updates: int) -> None:
        """Set the counters of steps and updates, which also key the optimizer's random numbers."""
        self.num_updates = step
        self.updating.count = updates

    def _noted(self, given: ForwardArgs) -> tuple[Tree, Loss | None]:
        """Run a forward that is recomputed later, is run twice to compare, or is of a slice."""
        with nullcontext() if self.slices is None else self.slices.checked(self, given):
            trains, step, microbatch = torch.is_grad_enabled(), given.step, given.microbatch
            checked = trains and self._checked not in (None, step)
            again = partial(self.forward, given, again=False)
            if not checked and not (trains and given.recompute):
                return again()
            with self.randomness.lock:  # another thread may use the same modules
                if self.recomputation is None:
                    from .recomputation import Recomputation  # few schedules recompute

                    self.recomputation = Recomputation(self.slice.modules)
                # With the graph, not without: the outputs show which of them owe a gradient.
                found, noted = self.recomputation.first(partial(self.forward, given, again=True))
            del self._forwarded[microbatch]
            self._inputs[microbatch] = again, noted
            self._checked = step if checked else self._checked
            if not given.recompute:
                self.recompute(step, microbatch)
            return found

    def recompute(self, step: int, microbatch: int) -> None:
        """Recompute the activations of a microbatch, with the same random numbers and no other side effect."""
        forward, noted = self._inputs.pop(microbatch)
        assert self.recomputation is not None
        with self.randomness.lock:
            self.recomputation.again(noted, forward)

    def forward(self, given: ForwardArgs, *, again: bool | None = None) -> tuple[Tree, Loss | None]:
        """Run the slice; return its output, or, if a share is given, the start of backward and the loss.

        Args:
            again: whether the same forward will run once more, from the same inputs; None: as the arguments say.
        """
        if again is None and (given.recompute or self._checked is not None or self.slices is not None):
            return self._noted(given)
        again, loss = bool(again), None
        backward, target = torch.is_grad_enabled(), given.target
        inputs, owing, entered = borders.stage_inputs(given.inputs, copied=again or self.stage == 0)
        if target is not None:
            target = borders.own_target(target)
        looks = backward and self.state.watches
        if looks:
            self.state.begin()
        saved = _saving() if backward and given.split else None
        lock, draws = self.randomness.lock, self.draws
        carrying = nullcontext() if self.slices is None else self.slices.carrying(given.microbatch)
        with lock, lock if saved is None else saved.hooks(), carrying:
            seed: Seed = partial(self.randomness.seed_forward, given.step, given.microbatch)
            draws_too = draws.found or draws.looks[backward] > 0
            tree = self.slice.forward(inputs, given.fields, draws.seeding(seed) if draws_too else seed)
            if given.share is not None:
                if draws_too:  # the loss function draws from torch's generator behind the last layer
                    draws.noting(partial(self.randomness.seed_loss, given.step, given.microbatch))(0, 0)
                tree, loss = self._weigh(given, self._loss(tree, target), given.share)
            if draws_too:
                draws.end()
        left = self.state.end(again) if looks else []
        borders.note_writes(entered)
        if backward:
            if not given.split:
                self._owed.watch(owing)
            if type(tree) is Tensor:
                roots = [tree] if tree.requires_grad else []
            else:
                roots = [tensor for tensor in distinct_tensors(tree) if tensor.requires_grad]
            self._forwarded[given.microbatch] = Forwarded(given.step, owing, roots, saved, left)
        return tree, loss

    def output(self, tree: Tree) -> Payload:
        """Return the payload of an output."""
        if self.loss_fn is not None and is_dataclass(tree) and not isinstance(tree, dict):
            tree = {each.name: getattr(tree, each.name) for each in fields_of(tree)}  # a plain tree can travel
        return borders.stage_output(tree, self._staying)

    def _loss(self, output: Tree, target: Tree) -> Any:
        assert self.loss_fn is not None
        try:
            return self.loss_fn(output, target)
        except Exception as error:
            note(error, f"in the loss or metric, given output {shapes_in(output)} and target {shapes_in(target)}")
            raise

    def _staying(self) -> Iterable[Tensor]:
        """Return the tensors that outlive a forward: parameters and buffers."""
        return [*self.parameters(), *self.buffers()]

    def _weigh(self, given: ForwardArgs, loss: Any, share: float) -> tuple[Tensor, Loss]:
        """Return the scalar that backward starts from, and the microbatch's loss.

        A mean is multiplied by its share of the rows before backward, as in plain gradient accumulation. A sum starts
        backward unscaled: the weight of the step is known only after the forwards of all its microbatches.
        """
        summed = isinstance(loss, tuple)
        total, weight = sum_and_weight(loss, share)
        root = total if summed else total * share
        if torch.is_grad_enabled() and not root.requires_grad:
            why = "loss: depends on no parameter that requires a gradient: it was detached, or all is frozen"
            raise ConfigError(f"{why}; to compute a loss without training, use `evaluate`")
        # A mean over no tokens of a slice is no number.
        noted = Loss(root.detach() if share or summed else torch.zeros_like(root), weight, summed)
        if given.scale is None:
            return self.updating.root(root, summed), noted
        if not summed:
            return total * given.scale, noted
        known = torch.where(weight == 0, 1, weight) if isinstance(weight, Tensor) else weight or 1
        return total * given.scale / known, noted  # such an update knows its rows, and no weight but this one

    def backward(self, microbatch: int, grads: Payload | None) -> Payload:
        """Run backward, accumulate the gradients of the weights, return the gradients of the stage's inputs.

        Args:
            grads: from the next stage: for each output that requires one, its gradient or None; None after the loss.
        """
        step, owing, roots, _, left = self._forwarded.pop(microbatch)
        roots, begun = borders.backward_starts(roots, grads)
        self._owed.expect(owing)
        if roots:
            with autocast.without(), shown(left), self.state.backward(bool(self._forwarded)):
                self.randomness.seed_backward(step, microbatch, self.slice.first)
                run_backward(roots, begun)
        if self.slices is not None:
            self.slices.end(microbatch)
        return pack(self._owed.taken(owing))

    def backward_inputs(self, microbatch: int, grads: Payload | None) -> Payload:
        """Return the gradients of the inputs; `backward_weights` makes the weights'. Arguments as of `backward`."""
        from .split_backward import backward_inputs

        step, owing, roots, saved, left = self._forwarded.pop(microbatch)
        roots, begun = borders.backward_starts(roots, grads)
        assert saved is not None
        with autocast.without(), shown(left), self.state.backward(bool(self._forwarded)):
            self.randomness.seed_backward(step, microbatch, self.slice.first)
            found, deferred = backward_inputs(roots, begun, owing, saved)
        self._deferred[microbatch] = step, left, deferred
        return pack(tuple(found))

    def backward_weights(self, microbatch: int) -> None:
        """Accumulate the gradients of the weights that `backward_inputs` has left out."""
        step, left, deferred = self._deferred.pop(microbatch)
        with autocast.without(), shown(left), self.state.backward(bool(self._forwarded)):
            self.randomness.seed_backward(step, microbatch, self.slice.first, weights=True)
            deferred.run()
        if self.slices is not None:
            self.slices.end(microbatch)

    def saved(self, microbatch: int) -> Saved:
        """Return the tensors that the forward of a microbatch saved for backward; only after a forward with `split`."""
        saved: Saved = self._forwarded[microbatch].saved
        return saved

    def abandon(self) -> None:
        """Drop everything done since the last update."""
        for held in (self._forwarded, self._inputs, self._deferred):
            held.clear()
        if self.recomputation is not None:
            self.recomputation.forget()
        self.turn()
        self.statistics.restore()
        self.updating.restore()
        for store in (self.versions, self.slices, self.mirror, self.lodging):
            if store is not None:
                store.forget()

    def update(self, *, finite: bool = True, skipped: bool = False) -> None:
        """Apply one optimizer step and drop the gradients.

        Args:
            finite: whether the gradients of all stages are finite; if not, the weights are left unchanged.
            skipped: whether they are left unchanged in any case.
        """
        if self.recomputation is not None:
            self.recomputation.check()
        self.state.note_first()
        if self.mirror is not None:
            self.mirror.commit()
        self.statistics.commit()
        self.updating.update(finite, skipped)
        self.num_updates += 1

    def update_early(self) -> BeforeUpdate:
        """Apply one optimizer step before the global norm is known; return the state to roll back to."""
        from .before_update import BeforeUpdate  # few steps update early

        before = BeforeUpdate(self.updating)
        self.update()
        return before

    def update_again(self, before: BeforeUpdate, max_norm: float | None, norm: Tensor, skipped: bool = False) -> None:
        """Roll back an early update; unless it is skipped, apply it with clipped gradients."""
        before.put_back()
        if max_norm is not None:
            self.updating.clip(max_norm, norm)
        self.updating.update(finite=True, skipped=skipped)

    def hold(self, weight: float) -> None:
        """Keep the gradients for a later update; `weight`: of a loss that is a sum, known only now."""
        if self.recomputation is not None:
            self.recomputation.check()
        self.state.note_first()
        self.statistics.hold()
        self.updating.hold(weight)
        self.num_updates += 1


def _saving() -> Saved:
    from .split_backward import Saved  # few schedules split

    return Saved()
