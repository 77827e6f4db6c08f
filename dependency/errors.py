"""The errors, by their causes.

    PipeError
    ├── ScheduleError      the author of a schedule: the relation cannot be run; carries a drawing
    ├── ConfigError        the user: an option, its value, the rule, the nearest valid value
    │   ├── ModelError     a model or loss function that no pipeline trains so; the part, and the cure
    │   ├── BatchError     a batch that does not fit the model or the microbatches
    │   ├── DataError      a shard, by name: missing, truncated, changed, or its storage does not answer
    │   ├── StorageError   a disk: full, read-only, or it does not answer; earlier files are as they were
    │   └── Damaged        a checkpoint: not as it was written; an older one may do
    ├── Disagreement       the script: workers made different calls; the call of each
    ├── WorkerFailure      a worker raised: its number, the action (`2B3`, step), traceback as text
    ├── EpochEnds          a worker has died, and the workers that are left go on without it (--elastic)
    ├── StageLost          every worker that held a stage has died
    ├── PeerLost           a peer stopped answering: a consequence, the cause is at the peer
    ├── NotMet             workers did not all come to the meeting at the start: a consequence as well
    ├── NotFinite          the loss is nan or infinite, and the weights soon are
    └── Stalled            nothing finished before the deadline: the waiting worker, the awaited action

Every error pickles, because it may be raised in one process and reported by another. Its `subject` is the option, the
file or the part that is wrong.
"""

import re
from collections.abc import Callable
from types import TracebackType
from typing import Any


class PipeError(Exception):
    """Base of every error that rpc-pipe raises on purpose."""

    @property
    def subject(self) -> str:
        """The first word of the text: the option, file or part that the error is about."""
        return re.split(r"[\s:=,(]", str(self), maxsplit=1)[0]

    def __reduce__(self) -> tuple[Any, ...]:
        # The default calls cls(*args), which breaks as soon as a subclass takes other arguments.
        return _rebuild, (type(self), self.args, self.__dict__)


def _rebuild(cls: type[PipeError], args: tuple[object, ...], state: dict[str, object]) -> PipeError:
    error = cls.__new__(cls)
    error.args = args
    error.__dict__.update(state)
    return error


class ScheduleError(PipeError, ValueError):
    """The relation of a schedule breaks a rule; `drawing` shows where."""

    def __init__(self, message: str, drawing: str = "") -> None:
        super().__init__(f"{message}\n{drawing}" if drawing else message)
        self.drawing = drawing


class ConfigError(PipeError, ValueError):
    """An option has a value that cannot work; the text names a value that would."""


def refuse_below(least: int, **numbers: object) -> None:
    """Refuse numbers, by name, that are not whole or too small.

    Raises:
        ConfigError: there is one.
    """
    for name, value in numbers.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ConfigError(f"{name} {value!r}: must be a whole number, at least {least}")


class ModelError(ConfigError):
    """The model, or its loss function, cannot be trained so by a pipeline; the text names the part and the cure."""


class BatchError(ConfigError):
    """A batch, or a call with it, does not fit the model or the microbatches."""


class DataError(ConfigError):
    """Data cannot be read as they should be; the text names the shard."""


class StorageError(ConfigError):
    """A file or folder cannot be written, or storage does not answer; the text names it and the cause."""

    #: where weights are that could not be written as asked
    kept = ""


class Damaged(ConfigError):
    """A checkpoint is not as it was written; the text names the file."""


class Disagreement(PipeError, RuntimeError):
    """Workers were given different batches, made different calls, or began with different replicas."""


class Malformed(PipeError, ValueError):
    """No worker of this version sends such a message; the text gives the cause."""


def shortened(text: str, most: int) -> str:
    """Return a text, without its middle if it has more than `most` characters: it goes to every other worker."""
    left_out = len(text) - most
    if left_out <= 0:
        return text
    return f"{text[: most // 2]} [... {left_out} characters ...] {text[len(text) - most // 2 :]}"


def leading_to_user(error: BaseException, is_ours: Callable[[str], bool]) -> TracebackType | None:
    """Return the frames of an error from the user's first one on; all if none is the user's."""
    frames = error.__traceback__
    while frames and is_ours(frames.tb_frame.f_code.co_filename):
        frames = frames.tb_next
    return frames or error.__traceback__


def first_sentence(error: BaseException) -> str:
    """Return the first sentence of a foreign error, to be cited in one of this project."""
    return re.split(r"(?<=[.!?]) (?=[A-Z])", " ".join(str(error).split()), maxsplit=1)[0].removesuffix(".")


#: most characters of a failure's message
_MOST_SUMMARY, MOST_TRACEBACK = 2000, 20_000


class WorkerFailure(PipeError, RuntimeError):
    """The first cause: an exception inside a worker's work.

    Args:
        worker: the worker that failed.
        action: the running one, such as `2B3`, or an empty string between actions.
        step: the running one, counted from 1.
        summary: type and message of the exception in one line.
        remote_traceback: the formatted traceback; text, because exceptions may not unpickle elsewhere. Empty for a
            refusal of rpc-pipe, which the summary explains.
        place: the stage, the microbatch, and the arguments, in one line.
    """

    def __init__(
        self, worker: int, action: str, step: int, summary: str, remote_traceback: str, place: str = ""
    ) -> None:
        self.worker, self.action, self.step, self.place = worker, action, step, place
        summary, remote_traceback = shortened(summary, _MOST_SUMMARY), shortened(remote_traceback, MOST_TRACEBACK)
        self.summary, self.remote_traceback = summary, remote_traceback
        where = f"running {action}, " if action else ""
        lines = [f"worker {worker} failed ({where}step {step}): {summary}", place]
        if remote_traceback:
            lines += ["traceback of where it failed:", remote_traceback.rstrip()]
        super().__init__("\n".join(filter(None, lines)))

    def __str__(self) -> str:
        text = str(self.args[0])
        if self.__cause__ is None:
            return text
        return text.partition("\ntraceback of where it failed:\n")[0]  # Python prints the cause's traceback above this


class PeerLost(PipeError, ConnectionError):
    """A peer stopped answering. Look for the cause at that peer; this is a consequence.

    Args:
        cause: the reason that the peer gave, if it could.
    """

    def __init__(self, worker: int, peer: int, detail: str, cause: WorkerFailure | None = None) -> None:
        self.worker, self.peer, self.cause = worker, peer, cause
        super().__init__(f"worker {worker} lost worker {peer}: {detail}")


class EpochEnds(PipeError, ConnectionError):
    """The launcher begins another epoch: a worker has died or joined, and the live workers meet again."""


class StageLost(PipeError, ConnectionError):
    """Every worker that held a stage has died, so its weights are only in a checkpoint."""


def ends_epoch(error: BaseException) -> bool:
    """Return whether an error only reports a dead worker, and no worker has failed."""
    return isinstance(error, EpochEnds) or (isinstance(error, PeerLost) and error.cause is None)


class NotMet(PipeError, ConnectionError):
    """Not all workers came to the meeting at the start. The cause is at the missing ones; a restart may help."""


class NotFinite(PipeError, ArithmeticError):
    """A step's loss is no number that can be trained on."""


class Stalled(PipeError, TimeoutError):
    """Nothing arrived before the deadline; the text names the awaited payload and its worker."""
