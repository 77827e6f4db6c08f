"""`pipe.weights`. All workers make these calls alike, and all succeed or none does."""

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from torch import Tensor

from ..dependency import ConfigError, PipeError, StorageError
from ..workers.actor import WorkerActor
from .facade import Checkpoints, Run, path_of
from .folder import newest
from .pretrained import Loaded, load, merged, own_state, save, save_adapters, save_whole

#: prefix of folders with weights that could not be written to their place
_KEPT = "rpc-pipe-weights-"
_STATE = "weights (save, state_dict)"


class Weights:
    """A pipeline's weights, by the names of the unsplit model."""

    def __init__(self, run: Run, checkpoints: Checkpoints) -> None:
        self._run, self._each, self._checkpoints = run, run.each, checkpoints

    def state_dict(self) -> dict[str, Tensor] | None:
        """Return the whole model's tensors on worker 0, on the CPU; None elsewhere.

        It has the versions of modules, too, which some ask for in `load_state_dict`.
        """
        parts = self._run.gather(_STATE, own_state)
        if parts is not None and not self._run.is_first:  # the first members have them
            return None
        return None if parts is None else merged(parts, self._run.partition.place_of)

    def save(self, path: str | Path) -> None:
        """Write the whole model as one safetensors file, from worker 0; complete or not at all.

        A script that is resumed has written it already where its calls are skipped.

        Raises:
            StorageError: it cannot be written, and is in another place, which `kept` names.
        """
        if self._run.results.behind:
            return

        def write(state: dict[str, Tensor], where: Callable[[], Path]) -> Path:
            found = where()
            found = found / "model.safetensors" if found.name.startswith(_KEPT) else found
            save_whole(state, found)
            return found

        def saved(actor: WorkerActor) -> StorageError | None:
            parts = actor.gather(_STATE, own_state(actor))
            try:
                if parts is not None and self._run.is_first:  # the first members have them
                    _kept_somewhere(path, partial(write, merged(parts, self._run.partition.place_of)))
            except StorageError as error:  # raised when all workers have made the call
                return error
            return None

        for error in filter(None, self._each(saved)):  # a worker may die while it writes: then the next one does
            raise error

    def load_pretrained(self, folder: str | Path, *, strict: bool = True) -> Loaded:
        """Read weights from a safetensors file, a folder of Hugging Face's `save_pretrained`, or a checkpoint.

        In a folder of checkpoints it is the newest.

        Each worker reads only its tensors, and converts them to the model's types. If the folder has a body and
        the model has a head, or the other way round, the name of the body is added or removed.

        Args:
            strict: refuse if one of the two lacks a tensor that the other has; otherwise these stay as they are.

        Returns:
            The names that only one of the two has.

        Raises:
            ConfigError: it does not fit, or is damaged; nothing has changed.
        """
        where = newest(path_of(folder)) or path_of(folder)
        if self._run.recovery is not None and self._run.recovery.repeats:  # a newcomer gets the weights of now
            return Loaded([], [])
        return self._each(lambda actor: load(actor, where, strict))[0]  # type: ignore[no-any-return]

    def save_pretrained(self, folder: str | Path) -> None:
        """Write the weights as Hugging Face's `from_pretrained` reads them, and the model's config if it has one.

        For a model with adapters of peft, only these are written, as `PeftModel.from_pretrained` reads them. Each
        worker writes its part, so all workers must see the folder. Existing weights are replaced: a crash leaves the
        old ones or the new ones whole.

        Raises:
            StorageError: it cannot be written, and is in another folder, which `kept` names.
        """
        if self._run.results.behind:
            return
        self._checkpoints.settle()
        partition = self._run.partition
        how = self._run.config, partition.other_names, self._run.stall_s

        def write(where: Callable[[], Path]) -> Path:
            if partition.adapters:
                return self._each(lambda actor: save_adapters(actor, where, partition.adapters))[0]  # type: ignore[no-any-return]
            return self._each(lambda actor: save(actor, where, *how))[0]  # type: ignore[no-any-return]

        _kept_somewhere(folder, write)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Return a context that replaces the weights by their moving average, to evaluate or save them.

        Raises:
            ConfigError: there is none.
        """
        averages = self._each(lambda actor: [s.updating.average for s in actor.shards.values() if not s.is_guest])
        found = [average for own in averages for average in own if average is not None]
        if len(found) < sum(map(len, averages)):
            raise ConfigError("averaged: there is no average of the weights; pass ema_decay=, such as 0.999")
        self._run.results.refuse_averaged("averaged")
        from ..workers.compute.average import swap  # few runs have one

        swap(found)
        self._run.results.averaged = True
        try:
            yield
        finally:
            swap(found)
            self._run.results.averaged = False


def _kept_somewhere(given: str | Path, write: Callable[[Callable[[], Path]], Path]) -> None:
    """Write weights to the user's place, or, because they may be hours of work, to another.

    Args:
        write: takes a function that makes the path, calls it on one worker, and returns the path.

    Raises:
        StorageError: they could not be written as given; `kept` is where they are.
    """
    try:
        write(lambda: path_of(given))
    except Exception as error:
        if isinstance(error, PipeError) and not isinstance(error, ConfigError):
            raise  # no worker would answer
        for root in (os.getcwd(), os.path.expanduser("~"), tempfile.gettempdir()):
            with suppress(Exception):  # the first error is raised
                kept = write(lambda root=root: Path(tempfile.mkdtemp(prefix=_KEPT, dir=root)))  # type: ignore[misc]
                raised = StorageError(f"{error}; the trained weights are kept in {kept}")
                raised.kept = str(kept)
                break
        else:
            raise
        raise raised from error
