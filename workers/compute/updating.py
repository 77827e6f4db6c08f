"""The update of a shard's weights when the gradients of a whole batch are complete."""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ...dependency import ConfigError
from ...dependency.errors import first_sentence
from .autograd_graph import refuse_unowned
from .modules import autocast
from .modules.randomness import Randomness
from .modules.torch_internals import local, norms_of
from .sequences.slices import Slice

if TYPE_CHECKING:
    from .average import Average
    from .parts.members import Members
    from .parts.ownership import Ownership

logger = logging.getLogger(__name__)

#: (name in the unsplit model, parameter) of a stage -> its optimizer; torch's take such pairs
OptimizerFactory = Callable[[list[tuple[str, nn.Parameter]]], Optimizer]
SchedulerFactory = Callable[[Optimizer], LRScheduler]


@dataclass(frozen=True)
class Training:
    """The training of a model, alike on every stage: `Pipeline(..., training=Training(optimizer=...))`.

    Args:
        optimizer: called on each stage with (name, parameter) pairs, named as in the unsplit model, such as
            `partial(torch.optim.AdamW, lr=3e-4)` or a function that makes groups by name. None: gradients are computed,
            and nothing is trained.
        lr_scheduler: optimizer -> learning-rate scheduler; stepped after every update.
        grad_scaler: for float16: the initial scale of the loss and how it changes, decided by all stages together; if a
            gradient overflows, neither weights nor learning rates change. See `Pipeline.loss_scale`.
        ema_decay: decay of a moving average of the weights, from 0 to below 1; see `Pipeline.weights.averaged`.
        accumulate: update the weights after this many steps, by the mean of the gradients of their losses.
        deferred_batch_norm: take running statistics from whole batches, of all replicas, not from each microbatch.
        max_grad_norm: clip the gradients of the whole model to this norm before an update, with the bits of
            `torch.nn.utils.clip_grad_norm_`; see `Pipeline.grad_norm`.
        log_grad_norm: measure that norm for `Pipeline.grad_norm` also without clipping.
        skip_update: that norm, before clipping -> whether the update is left out: then neither weights nor learning
            rates change. Every process calls it once for an update, with the same bits, and must get the same answer.
        post_validation: whether steps of `train` update before that norm is known, and repeat the update if gradients
            must be clipped, with the same bits; by default if the schedule gains by it. See docs/training.md.
        untrained: names of parameters that no optimizer is given, such as `*.bias`; it must have all others.
        check: `always` runs one microbatch of every step once more, on every stage, from the state that its forward
            began with, and compares the outputs: a layer that depends on something else is an error.
    """

    optimizer: OptimizerFactory | None = None
    lr_scheduler: SchedulerFactory | None = None
    grad_scaler: torch.amp.GradScaler | None = None
    ema_decay: float | None = None
    accumulate: int = 1
    deferred_batch_norm: bool = False
    max_grad_norm: float | None = None
    log_grad_norm: bool = False
    skip_update: Callable[[float], bool] | None = None
    post_validation: bool | None = None
    untrained: Sequence[str] = ()
    check: Literal["first", "always"] = "first"

    @property
    def measures_norm(self) -> bool:
        """Whether the norm of all gradients is measured."""
        return self.log_grad_norm or self.max_grad_norm is not None or self.skip_update is not None


#: required arguments of `step` that a pipeline cannot give
_UNKNOWN = ("closure", "metrics")


class Updating:
    """The optimizer of a shard, with its schedule, scale and average.

    Args:
        slice: with the parameters to be updated.
        stage: its position in the model.
        pieces: the ownership of parameters, if another stage or replica holds some of them too.
        members: the processes that share the slice, each with parts of parameters; None: this one alone.
    """

    def __init__(
        self,
        slice: Slice,
        stage: int,
        training: Training,
        randomness: Randomness,
        pieces: Ownership | None = None,
        members: Members | None = None,
    ) -> None:
        self.training, self.pieces, self._members = training, pieces, members
        named = slice.named_parameters()
        self.parameters = dict(named)
        self._randomness, self._first = randomness, slice.first
        self._shared, self._ranks, self._stage = slice.shared, slice.ranks(), stage
        left_out = {name for name in self.parameters if any(fnmatchcase(name, each) for each in training.untrained)}
        trained = [(name, parameter) for name, parameter in named if parameter.requires_grad and name not in left_out]
        #: names of parameters with optimizer state here; None: all
        self.owned = pieces.owned if pieces is not None and pieces.zero else None
        own = [pair for pair in trained if self.owned is None or pair[0] in self.owned]
        self.optimizer = _made("optimizer", training.optimizer, own) if training.optimizer and own else None
        if self.optimizer is not None:
            _refuse_others(self.optimizer, self.parameters)
        held = self._updated()
        #: frozen, or forgotten by the optimizer's factory
        given = named if training.optimizer is not None else ()
        left = [(name, p) for name, p in given if id(p) not in held and name not in left_out]
        self._without = [(n, p) for n, p in left if not p.requires_grad or self.owned is None or n in self.owned]
        self.lr_scheduler = None
        if self.optimizer is not None and training.lr_scheduler is not None:
            _own_rates(self.optimizer)
            self.lr_scheduler = _made("lr_scheduler", training.lr_scheduler, self.optimizer)
        self.scale = LossScale(training.grad_scaler)
        self.average: Average | None = None
        if training.ema_decay is not None:
            from .average import Average

            self.average = Average(dict(trained), training.ema_decay)
        #: how often the optimizer has been asked
        self.count = 0
        #: of steps since then: gradients by parameter, as they were after the last of them, and the loss's weight
        self.held: dict[str, Tensor] = {}
        self.weight = 0.0
        #: whether the last update has changed weights
        self._counts = True
        #: functions of the user, called with whole gradients before they are clipped and applied
        self.on_gradients: list[Callable[[Mapping[str, nn.Parameter]], object]] = []
        #: whether another replica on this worker has the sums, and makes the updates
        self.is_read = False
        #: whether it is known that the loss depends on no other parameters; those that FSDP2 gathers are no layer's
        self._is_known = training.optimizer is None or members is not None

    def root(self, loss: Tensor, summed: bool) -> Tensor:
        """Return the start of backward: the loss's part in the update, scaled; sums are divided later."""
        if not self._is_known and loss.requires_grad:
            refuse_unowned(loss, self.parameters.values())
            self._is_known = True
        if self.training.accumulate > 1 and not summed:
            loss = loss / self.training.accumulate
        return loss * self.scale.scale if self.scale.enabled else loss

    def unscale(self) -> Tensor:
        """Divide the gradients by the scale; return whether all were finite, on the device."""
        return self.scale.unscale(self._grads(), self._randomness.device)

    def _grads(self) -> list[Tensor]:
        """Return the gradients that there are, the parts of this member alone."""
        return [local(parameter.grad) for parameter in self.parameters.values() if parameter.grad is not None]

    def gradient_norms(self) -> Mapping[int, Tensor]:
        """Return the norm of each gradient by the parameter's rank, as tensors on the device.

        The norm of a parameter that several stages hold is returned by the first of them alone.
        """
        named = self._counted()
        norms = norms_of([grad for _, grad in named])
        # Norms have the gradient's type, also if that is complex: `clip_grad_norm_` groups by it.
        return {self._ranks[name]: norm.to(grad.dtype) for (name, grad), norm in zip(named, norms, strict=True)}

    def _counted(self) -> list[tuple[str, Tensor]]:
        """Return the gradients that count in the norms of this stage, by name."""
        elsewhere = {name for name, stages in self._shared.items() if min(stages) < self._stage}
        counts = (lambda name: True) if self._members is None else self._members.counts
        named = ((name, p.grad) for name, p in self.parameters.items() if name not in elsewhere and counts(name))
        return [(name, local(grad)) for name, grad in named if grad is not None]

    def clip(self, max_norm: float, norm: Tensor) -> None:
        """Clip the gradients as `clip_grad_norm_` does; `norm`: of the gradients of the whole model."""
        if self._members is None:
            torch.nn.utils.clip_grads_with_norm_(self.parameters.values(), max_norm, norm)
            return
        coefficient = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        for grad in self._grads():
            grad.mul_(coefficient)

    def divide(self, divisor: float) -> None:
        """Divide the summed gradients by the step's weight."""
        if divisor != 1:
            for parameter in self.parameters.values():
                if parameter.grad is not None:
                    parameter.grad.div_(divisor)

    def tell_gradients(self) -> None:
        """Call the user's functions: the gradients are whole."""
        if self.on_gradients:
            with torch.no_grad(), autocast.without():
                for function in self.on_gradients:
                    function(self.parameters)

    def clip_by_own_norm(self, max_norm: float) -> None:
        """Clip the gradients of this stage by the stage's norm."""
        torch.nn.utils.clip_grad_norm_(self.parameters.values(), max_norm)

    def hold(self, weight: float) -> None:
        """Keep the gradients for a later update; `weight`: of the loss, where it is known only now."""
        self.held = {name: p.grad.clone() for name, p in self.parameters.items() if p.grad is not None}
        self.weight += weight

    def restore(self) -> None:
        """Set the gradients to the sums of complete steps."""
        for name, parameter in self.parameters.items():
            held = self.held.get(name)
            parameter.grad = None if held is None else held.clone()

    def update(self, finite: bool, skipped: bool = False) -> None:
        """Let the optimizer make one step, unless gradients have overflowed or it is skipped, and forget them."""
        self.held, self.weight = {}, 0.0
        if self.is_read:
            self.drop(self.parameters)
            self.count += self.optimizer is not None
            return
        self._counts = finite and not skipped
        if self.scale.enabled:  # also where nothing is trained: there the loss may be computed
            self.scale.update(finite)
        if self.optimizer is None:
            return
        if not self.count:
            self._tell_unused()
        if self._counts:
            with autocast.without():
                self._randomness.seed_update(self.count, self._first)
                self.optimizer.step()
            if self.lr_scheduler is not None:
                self.lr_scheduler.step()
            if self.average is not None and self.owned is None:
                self.average.update()
        self.count += 1
        self.optimizer.zero_grad(set_to_none=True)
        # Also of parameters outside the optimizer: the sum would be added to the next ones.
        self.drop(() if self.pieces is None else self.pieces.updated_elsewhere)

    def _tell_unused(self) -> None:
        """Name the parameters that the first update leaves as they are: the loss does not depend on them."""
        elsewhere, held = () if self.pieces is None else self.pieces.updated_elsewhere, self._updated()
        idle = [n for n, p in self.parameters.items() if p.requires_grad and p.grad is None and id(p) in held]
        # Stages of the same layers say the same, which the launcher then prints once.
        if kinds := list(dict.fromkeys(re.sub(r"\b\d+\b", "*", name) for name in idle if name not in elsewhere)):
            named = ", ".join([*kinds[:3], "..."] if len(kinds) > 3 else kinds)
            logger.warning("parameters %s: no gradient in the first update, which leaves them as they are", named)

    def drop(self, names: Iterable[str]) -> None:
        """Forget the gradients of some parameters."""
        for name in names:
            self.parameters[name].grad = None

    def adopted(self) -> None:
        """Average the weights, also the ones that other holders have updated."""
        if self.average is not None and self.average.tensors and self._counts:
            self.average.update()
        autocast.forget_casts()  # of weights as they were

    def _updated(self) -> set[int]:
        """Return the ids of the parameters that the optimizer has."""
        groups = () if self.optimizer is None else self.optimizer.param_groups
        return {id(parameter) for group in groups for parameter in group["params"]}

    def refuse_untrained(self) -> None:
        """Raise if no optimizer reads the gradients of a parameter; average the parameters of the optimizer.

        Raises:
            ConfigError: there is one.
        """
        asked = [each for each in self._without if each[1].requires_grad]
        if not asked:
            return
        held = self._updated()
        missing = []
        for name, parameter in asked:
            if id(parameter) not in held and (self.owned is None or name in self.owned):
                missing.append(name)
            elif self.average is not None:
                self.average.add(name, parameter)
        if missing:
            rest = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            why = f"parameter {missing[0]}{rest}: no optimizer has it, so it would not train"
            raise ConfigError(f"{why}; put it into a group, or leave it out by requires_grad_(False), or untrained=")


class LossScale:
    """Loss scaling for float16: one decision for all stages, with the bits of `torch.amp.GradScaler`.

    Gradients in float16 lose small numbers, so backward starts from the loss times a scale, and gradients are divided
    by it before they are used. If any gradient on any stage has overflowed, no stage updates, and the scale shrinks.

    Args:
        scaler: the initial scale, factors and interval; None: nothing is scaled.
    """

    def __init__(self, scaler: torch.amp.GradScaler | None) -> None:
        self.enabled = scaler is not None and scaler.is_enabled()
        self.scale = float(scaler.get_scale()) if scaler is not None and self.enabled else 1.0
        #: updates since the scale has changed
        self.streak = 0
        if scaler is not None:
            self._growth, self._backoff = scaler.get_growth_factor(), scaler.get_backoff_factor()
            self._interval = scaler.get_growth_interval()

    def unscale(self, grads: Sequence[Tensor], device: torch.device) -> Tensor:
        """Divide gradients by the scale; return, without waiting for the device, whether all were finite."""
        if not grads:
            return torch.ones((), dtype=torch.bool, device=device)
        largest = torch.stack([norm.float() for norm in norms_of(grads, float("inf"))])
        inverse = torch.tensor(self.scale, dtype=torch.float64).reciprocal().float().item()
        for grad in grads:
            grad.mul_(inverse)
        return largest.isfinite().all()

    def update(self, finite: bool) -> None:
        """Take note of whether an update was possible."""
        if not finite:
            self.scale, self.streak = _float32(self.scale * self._backoff), 0
        elif self.streak + 1 == self._interval:
            grown = _float32(self.scale * self._growth)
            self.scale, self.streak = (grown if grown < float("inf") else self.scale), 0
        else:
            self.streak += 1


def _float32(number: float) -> float:
    return torch.tensor(number, dtype=torch.float32).item()


def _made(name: str, factory: Callable[[Any], Any], given: object) -> Any:
    """Return the optimizer of the caller's factory.

    Raises:
        ConfigError: it makes something else than is wanted, or its arguments are wrong; the text names the factory.
    """
    try:
        made = factory(given)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{name} could not be made: {type(error).__name__}: {first_sentence(error)}") from error
    if not callable(getattr(made, "step", None)):
        raise ConfigError(f"{name} made a {type(made).__name__}, which has no step: it must return what it makes")
    parameters = inspect.signature(made.step).parameters.values()
    if needed := [each.name for each in parameters if each.name in _UNKNOWN and each.default is each.empty]:
        why = f"{name} {type(made).__name__}: its step needs {needed[0]}, which a pipeline has not"
        raise ConfigError(f"{why}; use another, such as AdamW, or step it by hand by `pipe.optimizers`")
    return made


def _refuse_others(optimizer: Optimizer, parameters: Mapping[str, nn.Parameter]) -> None:
    """Refuse parameters of other stages, or of a loss function: each stage would update them, and none scales, clips or
    divides their gradients.

    Raises:
        ConfigError: there is one.
    """
    own = set(map(id, parameters.values()))
    for parameter in (each for group in optimizer.param_groups for each in group["params"]):
        if id(parameter) not in own:
            why = f"optimizer {type(optimizer).__name__}: has another parameter of shape {tuple(parameter.shape)}"
            raise ConfigError(f"{why}; make it of the (name, parameter) pairs that it is called with")


def _own_rates(optimizer: Optimizer) -> None:
    """Let no other stage have the tensors among the options, such as a rate: schedulers write them in place."""
    copies: dict[int, Tensor] = {}
    for group in optimizer.param_groups:
        tensors = [(key, value) for key, value in group.items() if isinstance(value, Tensor)]
        group.update((key, copies.setdefault(id(value), value.clone())) for key, value in tensors)
