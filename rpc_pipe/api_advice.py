"""What a caller is shown of an error: advice for names of other frameworks, and refusals without our own frames."""

from __future__ import annotations

import contextlib
import difflib
import inspect
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from .dependency import ConfigError, Disagreement, PipeError, ScheduleError, WorkerFailure

_HERE = Path(__file__).parent
T = TypeVar("T")

_BATCH = "pass one batch, (inputs, targets), or the dict or tuple that the model is called with"
#: method -> how it is called
_CALLS = {
    "Pipeline": "the model and the loss function come first, everything else by name, as optimizer=",
    "step": _BATCH,
    "train": "pass the batches, and loop: for loss in pipe.train(batches)",
    "evaluate": _BATCH,
    "predict": "pass the inputs as one value, a tensor, tuple or dict",
}
#: argument in another framework -> what to write
_ARGUMENTS = {
    **dict.fromkeys(("n_microbatches", "chunks", "micro_batches"), "use num_microbatches="),
    **dict.fromkeys(
        ("world_size", "n_workers", "num_stages", "n_stages", "nprocs"), "use num_workers=, or rpc-pipe run --workers"
    ),
    **dict.fromkeys(
        ("split_spec", "balance", "partitions", "partition_method"),
        "use split=, the number of layers or blocks for each stage",
    ),
    **dict.fromkeys(("loss", "criterion", "loss_function"), "use loss_fn="),
    **dict.fromkeys(("lr", "optim", "optimizers"), "use optimizer=partial(torch.optim.AdamW, lr=1e-3)"),
    **dict.fromkeys(("window", "chunks_per_worker", "waves"), "use schedule_options={'window': 2}"),
    **dict.fromkeys(("clip", "max_norm", "gradient_clipping"), "use max_grad_norm="),
    **dict.fromkeys(
        ("gradient_accumulation_steps", "grad_accum"),
        "use num_microbatches= for the parts of a batch, as in DeepSpeed, or accumulate= for batches between updates",
    ),
    "dtype": "use torch.autocast around step, or a model of that dtype",
    **dict.fromkeys(("checkpoint", "activation_checkpoint_interval"), "use schedule_options={'recompute': 'all'}"),
    **dict.fromkeys(("target", "targets", "labels"), _BATCH),
    "losses": "the loss is what step returns",
}
#: attribute in another framework -> what to write
_ATTRIBUTES = {
    "train_batch": "call pipe.step(batch), or loop: for loss in pipe.train(batches)",
    "eval_batch": "call pipe.evaluate(batch)",
    "forward": "call pipe.predict(inputs), or pipe.step(batch) to train",
    **dict.fromkeys(
        ("schedule", "backward", "zero_grad"), "call pipe.step(batch), which runs forward, backward and update"
    ),
    "eval": "call pipe.evaluate(batch) and pipe.predict(inputs), which set the mode themselves",
    **dict.fromkeys(
        ("instantiate_optimizer", "instantiate_lr_scheduler"), "pass Pipeline optimizer= and lr_scheduler="
    ),
    **dict.fromkeys(("optimizer", "lr_scheduler", "scheduler"), "each stage has its own, in pipe.actors[i].shards"),
    **dict.fromkeys(
        ("parameters", "named_parameters", "model", "module"), "use the module you gave, or pipe.state_dict()"
    ),
    **dict.fromkeys(("to", "cuda", "cpu"), "use device= of Pipeline, or rpc-pipe run --device"),
    **dict.fromkeys(("load_state_dict", "load"), "call pipe.load_pretrained(folder) or pipe.load_checkpoint(folder)"),
    **dict.fromkeys(("rank", "local_rank"), "use pipe.worker"),
    "world_size": "use pipe.num_workers",
    "global_steps": "use pipe.steps_done",
    **dict.fromkeys(("is_first_stage", "is_last_stage"), "use pipe.worker and pipe.num_workers"),
}


class ApiAdvice:
    """A base class whose errors about unknown arguments and attributes say what to write instead."""

    def __init_subclass__(cls) -> None:
        for name in ("__init__", *_CALLS):
            if name in vars(cls):
                setattr(cls, name, _advised(vars(cls)[name]))

    if not TYPE_CHECKING:  # with it type checkers would accept every attribute

        def __getattr__(self, name: str) -> Any:
            if hasattr(type(self), name):  # the error comes from inside a property
                return object.__getattribute__(self, name)
            known = [known for known in dir(type(self)) if known[0] != "_"]
            raise AttributeError(
                f"{type(self).__name__} has no attribute {name!r}{_advice(name, _ATTRIBUTES, known)}",
                name=name,
                obj=self,
            )


def _advised(method: Callable[..., T]) -> Callable[..., T]:
    """Return `method` with an advising TypeError for arguments that it does not take, and with plain refusals."""
    signature = inspect.signature(method)

    @wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            found = method(*args, **kwargs)
            return _plainly(found) if inspect.isgenerator(found) else found
        except _REFUSALS as error:
            raise _plain(error) from error.__cause__
        except TypeError:
            refuse(args, kwargs)  # only after an error, since binding takes longer than a call
            raise

    def refuse(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            unknown = next((keyword for keyword in kwargs if keyword not in signature.parameters), None)
            name = "Pipeline" if method.__name__ == "__init__" else method.__name__
            if unknown is None:
                raise TypeError(f"{name}: {error}{_advice(name, _CALLS, [])}") from None
            advice = _advice(unknown, _ARGUMENTS, list(signature.parameters))
            raise TypeError(f"{name} has no argument {unknown!r}{advice}") from None

    return call


def _plainly(steps: Any) -> Iterator[Any]:
    try:
        yield from steps
    except _REFUSALS as error:
        raise _plain(error) from error.__cause__


#: errors whose sentence says all, unless code of others led to them
_REFUSALS = (ConfigError, Disagreement, ScheduleError, WorkerFailure)


def _plain(error: PipeError) -> PipeError:
    """Return a refusal without its frames where all are ours: a dozen of them hid the sentence."""
    each: BaseException | None = error
    while isinstance(each, _REFUSALS):
        files = [Path(frame.f_code.co_filename) for frame, _ in traceback.walk_tb(each.__traceback__)]
        if all(_HERE in file.parents or file == Path(contextlib.__file__) for file in files):
            each.__traceback__ = None
        each = each.__cause__
    return error


def _advice(name: str, table: Mapping[str, str], known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.7)
    advice = table.get(name, f"did you mean {near[0]}?" if near else "")
    return f": {advice}" if advice else ""
