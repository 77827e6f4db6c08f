"""`pipe.checkpoints` and `pipe.weights`. All workers make these calls alike."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..dependency import ConfigError, refuse_below
from .keeper import Keeper

if TYPE_CHECKING:
    from ..workers.actor import WorkerActor
    from .pretrained import Loaded
    from .restoring import Restored


class Checkpoints:
    """A pipeline's checkpoints: all that its training needs to go on. All workers must see their folder."""

    def __init__(self, keeper: Keeper) -> None:
        self._keeper = keeper

    def save(self, folder: str | Path, *, keep: int | None = None, extra: Any = None, wait: bool = True) -> Path | None:
        """Write `folder/step-NNNNNNNN`, each worker its own part; return its path on worker 0.

        Args:
            keep: keep only so many of the newest checkpoints in `folder`.
            extra: plain values to be saved with it.
            wait: whether to return only when it is complete. Otherwise it is written while training goes on, and an
                error is raised by the next checkpoint or `close`.

        Raises:
            StorageError: it cannot be written; checkpoints from before are as they were.
        """
        refuse_below(1, keep=1 if keep is None else keep)
        return self._keeper.save(_path(folder), keep, extra, wait)

    def load(self, folder: str | Path) -> Restored:
        """Continue from a checkpoint, or from the newest complete one in `folder`.

        It may have been written by another number of workers, with another cut and schedule. The process's own random
        generators are restored, too.

        Raises:
            Damaged: it is; nothing has changed.
            ConfigError: it is of another model or optimizer; nothing has changed.
        """
        return self._keeper.load(_path(folder))

    def resume(self, folder: str | Path) -> Restored:
        """Like `load`, for a script that makes all its calls again, from the first one on.

        Batches of the steps that the checkpoint covers are read and skipped. Until they have all come, `step` and
        `train` return the last loss before the checkpoint and `evaluate` the last result of the same metric.
        """
        return self._keeper.load(_path(folder), anew=True)

    def claim(self, folder: str | Path) -> list[Path]:
        """Take a folder for this job's checkpoints alone; return those that the job itself has written, newest first.

        There are some if the job has been started again, by `--max-restarts` of ours or of torchrun.

        Raises:
            ConfigError: another job writes there, or it cannot be written.
        """
        return self._keeper.claim(_path(folder))

    def every(self, steps: int, folder: str | Path, *, keep: int | None = None) -> None:
        """Write a checkpoint after every so many steps from here on, beside training.

        Raises:
            ConfigError: a number that is not at least 1.
        """
        refuse_below(1, steps=steps, keep=1 if keep is None else keep)
        self._keeper.every = steps, _path(folder).absolute(), keep  # a script may go to another one


class Weights:
    """A pipeline's weights, by the names of the unsplit model.

    Args:
        actors: the workers of this process.
        partition: of the model; sorts the names.
        gather: (name, value) -> values of all workers on worker 0, as `Pipeline.gather`.
    """

    def __init__(
        self,
        keeper: Keeper,
        actors: Callable[[], list[WorkerActor]],
        partition: Any,
        gather: Callable[[str, Callable[[WorkerActor], Any]], Any],
    ) -> None:
        self._keeper, self._actors, self._partition, self._gather = keeper, actors, partition, gather

    def state_dict(self) -> dict[str, Tensor] | None:
        """Return the whole model's tensors on worker 0, on the CPU; None elsewhere.

        It has the versions of modules, too, which some ask for in `load_state_dict`.
        """
        from .whole import merged, own_state

        parts = self._gather("weights (save, state_dict)", own_state)
        return None if parts is None else merged(parts, self._partition.place_of)

    def save(self, path: str | Path) -> None:
        """Write the whole model as one safetensors file, from worker 0; complete or not at all.

        A script that is resumed has written it already where its calls are skipped.

        Raises:
            StorageError: it cannot be written.
        """
        from .whole import save_whole

        if self._keeper.results.behind:
            return
        state = self.state_dict()
        if state is not None:
            save_whole(state, _path(path))

    def load_pretrained(self, folder: str | Path, *, strict: bool = True) -> Loaded:
        """Read weights from a folder of safetensors as `save_pretrained` of Hugging Face writes it, or a checkpoint.

        Each worker reads only its own tensors, and converts them to the model's types. If the folder has a body and
        the model has a head, or the other way round, the name of the body is added or left out.

        Args:
            strict: refuse if one of the two lacks a tensor that the other has; otherwise these stay as they are.

        Returns:
            The names that only one of the two has.

        Raises:
            ConfigError: it does not fit, or is damaged; nothing has changed.
        """
        return self._keeper.load_pretrained(_path(folder), strict)

    def save_pretrained(self, folder: str | Path) -> None:
        """Write the weights as Hugging Face's `from_pretrained` reads them, and the model's config if it has one.

        Of a model with adapters of peft these alone are written, as `PeftModel.from_pretrained` reads them. Each worker
        writes its own part, so all workers must see the folder.

        Raises:
            ConfigError: it cannot be written, or has a file that would be read in its place.
        """
        if not self._keeper.results.behind:
            self._keeper.save_pretrained(_path(folder))

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Return a context in which the weights are their moving average, to evaluate or save them.

        Raises:
            ConfigError: there is none.
        """
        averages = [shard.updating.average for actor in self._actors() for shard in actor.shards.values()]
        found = [average for average in averages if average is not None]
        if len(found) < len(averages):
            raise ConfigError("averaged: there is no average of the weights; pass ema_decay=, such as 0.999")
        self._keeper.refuse_averaged("averaged")
        from ..workers.compute.average import swap  # few runs have one

        swap(found)
        self._keeper.averaged = True
        try:
            yield
        finally:
            swap(found)
            self._keeper.averaged = False


def _path(given: str | Path) -> Path:
    if not isinstance(given, (str, os.PathLike)) or not str(given) or "\0" in str(given):
        raise ConfigError(f"{given!r}: must be the path of a file or folder")
    return Path(given)
