"""Validation of the arguments of `Pipeline`: each error has cause and fix in one sentence."""

from __future__ import annotations

import contextlib
import inspect
import logging
import re
import traceback
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from .dependency import ConfigError, Disagreement, PipeError, ScheduleError, Spec, WorkerFailure, refuse_below
from .dependency.pipeline_options import Options
from .model.shard_maker import refuse_sums
from .schedules import name_of
from .workers.compute.updating import Training

if TYPE_CHECKING:
    from .model.batches.ordering import Ordering
    from .model.sharding import Sharing

logger = logging.getLogger(__name__)
T = TypeVar("T")
_HERE = Path(__file__).parent
#: errors with a sentence that needs no traceback, unless code outside of rpc-pipe led to them
_REFUSALS = (ConfigError, Disagreement, ScheduleError, WorkerFailure)


def settle_training(training: object) -> Training:
    """Return the training of a pipeline; without an optimizer if None is given.

    Raises:
        ConfigError: it is something else.
    """
    if isinstance(training, Training | None):
        return training or Training()
    raise ConfigError(f"training {type(training).__name__}: must be a Training, such as Training(torch.optim.AdamW)")


def shown_plainly(method: Callable[..., T]) -> Callable[..., T]:
    """Return a method that raises refusals without frames of rpc-pipe: a dozen of them hid the sentence."""

    @wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            found = method(*args, **kwargs)
            return _shown_plainly(found) if inspect.isgenerator(found) else found
        except _REFUSALS as error:
            raise _plain(error) from error.__cause__
        except TypeError as error:
            if len([*traceback.walk_tb(error.__traceback__)]) > 1:
                raise
            raise ConfigError(str(error)) from None  # no such argument, or one is missing

    return call


def _shown_plainly(steps: Any) -> Iterator[Any]:
    try:
        yield from steps
    except _REFUSALS as error:
        raise _plain(error) from error.__cause__


def _plain(error: PipeError) -> PipeError:
    """Return a refusal, and the refusals that have led to it, without their frames where all are ours."""
    each: BaseException | None = error
    while isinstance(each, _REFUSALS):
        files = [Path(frame.f_code.co_filename) for frame, _ in traceback.walk_tb(each.__traceback__)]
        if all(_HERE in file.parents or file == Path(contextlib.__file__) for file in files):
            each.__traceback__ = None
        each = each.__cause__
    return error


def refuse_training(loss_fn: object, training: Training) -> None:
    """Refuse factories that cannot be called, objects in their place, and impossible numbers."""
    optimizer: object = training.optimizer
    lr_scheduler: object = training.lr_scheduler
    if training.check not in ("first", "always"):
        raise ConfigError(f"check {training.check!r}: must be 'always', or left out for 'first'")
    if isinstance(loss_fn, type) and issubclass(loss_fn, nn.Module):
        raise ConfigError(f"loss_fn is the class {loss_fn.__name__}: pass an instance, {loss_fn.__name__}()")
    refuse_sums(loss_fn, "loss_fn")
    if loss_fn is not None and not callable(loss_fn):
        raise ConfigError(f"loss_fn {loss_fn!r}: must be callable as loss_fn(output, target), such as cross_entropy")
    for made, what in (optimizer, "optimizer"), (lr_scheduler, "lr_scheduler"):
        if isinstance(made, Optimizer | LRScheduler):
            of = "parameters" if what == "optimizer" else "the optimizer"
            name = type(made).__name__
            raise ConfigError(f"{what} is a {name}: pass what makes one for {of} of a stage, as partial({name}, ...)")
        if made is not None and not callable(made):
            such = "AdamW, lr=1e-3" if what == "optimizer" else "StepLR, step_size=10"
            raise ConfigError(f"{what} {made!r}: must be callable, such as partial({such})")
    if lr_scheduler is not None and optimizer is None:
        raise ConfigError("lr_scheduler: needs an optimizer to schedule; pass optimizer=, too")
    refuse_below(1, accumulate=training.accumulate)
    if isinstance(training.untrained, str):
        raise ConfigError(f"untrained {training.untrained!r}: must be a list of names, as [{training.untrained!r}]")
    max_norm = training.max_grad_norm
    if max_norm is not None and not (isinstance(max_norm, (int, float)) and max_norm > 0):
        raise ConfigError(f"max_grad_norm {max_norm!r}: must be a number above 0, or None")
    if training.skip_update is not None and not callable(training.skip_update):
        raise ConfigError(f"skip_update {training.skip_update!r}: must be a function of the norm, as lambda n: n > 100")
    decay, scaler = training.ema_decay, training.grad_scaler
    if decay is not None and not (isinstance(decay, (int, float)) and 0 <= decay < 1):
        raise ConfigError(f"ema_decay {decay!r}: must be a number from 0 to below 1, such as 0.999")
    if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
        raise ConfigError(f"grad_scaler {scaler!r}: must be a torch.amp.GradScaler, which says how the scale begins")


def refuse_shared(spec: Spec, shared: Mapping[str, Sequence[int]]) -> None:
    """Refuse weights of several stages in asynchronous schedules, where these update at different times."""
    if shared and not spec.synchronous:
        from .dependency.crossings import refuse_together

        stages = ", ".join(map(str, next(iter(shared.values()))))
        refuse_together({"asynchronous": f"schedule={name_of(spec)}", "shared weights": f"weights of stages {stages}"})


def compile_options(said: Any, sharing: Sharing, *, on_host: bool) -> Mapping[str, Any] | None:
    """Return the options of `torch.compile` for each layer or block; None: nothing is compiled.

    Raises:
        ConfigError: the options ask for graphs of a device.
    """
    options: Mapping[str, Any] | None = {} if said is True else said or None
    if options and not on_host and _asks_for_graphs(options):
        fix = "pass mode='max-autotune-no-cudagraphs', or no mode (docs/gpu.md)"
        raise ConfigError(f"compile={said!r}: CUDA graphs overwrite what other microbatches in flight need; {fix}")
    if options is not None and sharing.is_parted:
        options = {"dynamic": False, **options}  # torch finds no source of symbolic sizes of parts of a tensor
    return options


def _asks_for_graphs(options: Mapping[str, Any]) -> bool:
    by_option = (options.get("options") or {}).get("triton.cudagraphs")
    by_mode = options.get("mode") in ("reduce-overhead", "max-autotune")
    return bool(by_option or by_mode) or options.get("backend") == "cudagraphs"


def make_ordering(options: Options, asked: str, *, is_called: bool) -> Ordering | None:
    """Return the ordering of the microbatches of training steps; None: they run in the given order, of any size.

    Args:
        asked: the order of the script, which a plan or the command line may change.

    Raises:
        ConfigError: the cost is neither a function nor a profile, or of no use.
    """
    said, cost = options.microbatch_order, options.microbatch_cost
    if cost is not None and said == asked == "given":
        raise ConfigError("microbatch_cost: is of no use as microbatches come; add microbatch_order='balanced'")
    if cost is not None and not callable(cost):
        from .planning.unequal import read_cost

        cost = read_cost(cost)
    if said == "given":
        return None
    from .model.batches.ordering import Ordering  # which few jobs need
    from .planning.unequal import balanced

    return Ordering(balanced, cost, is_called)


def begin_training(what: str, forgot_optimizer: bool) -> bool:
    """Refuse to train without a graph; warn of a forgotten optimizer. Return False: the warning comes once."""
    if not torch.is_grad_enabled():
        mode = "inference_mode" if torch.is_inference_mode_enabled() else "no_grad"
        raise ConfigError(f"{what}: trains, but is called under torch.{mode}: call it outside, or call `evaluate`")
    if forgot_optimizer:
        fix = "pass training=Training(optimizer=torch.optim.AdamW), or Training() if gradients are all you want"
        logger.warning("%s trains nothing, as there is no optimizer: %s", what, fix)
    return False


def describe(spec: Spec, ranges: Sequence[range], seed: int, options: Options) -> str:
    """Return, in one short line, the settings that must be equal on all workers."""
    said = f"{spec!r}, split {'+'.join(str(len(r)) for r in ranges)}, seed {seed}{options.alike()}"
    text = re.sub(" at 0x[0-9a-f]+", "", said)
    return text if len(text) < 200 else f"{text[:180]}... {zlib.crc32(text.encode()):x}"
