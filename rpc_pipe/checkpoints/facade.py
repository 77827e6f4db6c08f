"""`pipe.checkpoints`. All workers make these calls alike, and all succeed or none does."""

import logging
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol

from ..dependency import ConfigError, Spec, Stalled, refuse_below
from ..system import files
from ..workers.actor import WorkerActor
from . import folder as folders
from .collective import agreed, everywhere, failure, is_first_process, raise_first
from .json_values import encoded, set_random_state
from .reading import Prepared, Restored, put_all, understood
from .resumption import Resumption
from .shard_state import shares
from .writing import Snapshot, Writing

logger = logging.getLogger(__name__)


class Run(Protocol):
    """A run of one schedule on the workers of this process."""

    spec: Spec
    partition: Any
    #: lets an elastic job continue without workers that die; None: it ends with them
    recovery: Any
    #: the number of workers' deaths so far
    epoch: int
    #: the last results of the run, and which calls are skipped
    results: Resumption
    #: that all workers have agreed on, as JSON
    facts: dict[str, Any]
    seed: int
    #: how long a worker's files may take
    stall_s: float
    #: settings of the pipeline, in one line
    described: str
    #: of the model, if it has one that can write itself
    config: Any
    #: whether a checkpoint is written after a number of steps
    due: Callable[[int], bool]
    #: called before workers join or leave
    settle: Callable[[], object]

    @property
    def is_first(self) -> bool:
        """Whether this process keeps and writes the state that all members of its worker have."""

    def each(self, call: Callable[[WorkerActor], Any]) -> list[Any]:
        """Call a function for every worker of this process, at the same time."""

    def gather(self, name: str, value: Callable[[WorkerActor], Any]) -> list[Any] | None:
        """Return `value(actor)` of all workers, in order, on the first worker; None on any other."""


class Checkpoints:
    """A pipeline's checkpoints: all that its training needs to resume. All workers must see their folder."""

    def __init__(self, run: Run) -> None:
        self._run, self._each = run, run.each
        run.settle = self.rest
        self._writing: Writing | None = None
        #: after how many steps a checkpoint is written, where, and how many are kept
        self._every: tuple[int, Path, int | None] | None = None
        #: of a script that starts from the top: the checkpoint that it resumes from, and whether it wrote that itself
        self._resumed: tuple[Path, bool] | None = None
        #: the claimed folder, and the claiming job
        self._claimed: tuple[Path, set[str], dict[str, Any]] | None = None
        #: whether the last checkpoint of `every` could not be written, which is reported once
        self._goes_without = False
        #: whether the last checkpoint is not complete because a worker has died
        self._lost = False

    def save(self, folder: str | Path, *, keep: int | None = None, extra: Any = None, wait: bool = True) -> Path | None:
        """Write `folder/step-NNNNNNNN`, each worker its part; return its path on worker 0.

        Where calls are skipped it has been written already. If the script resumes from it, all is restored once more:
        changes that the script makes by hand just before are in it, and must not count twice.

        Args:
            keep: number of the newest checkpoints to keep in `folder`.
            extra: plain values to be saved with it, small tensors among them, such as a StatefulDataLoader's state.
            wait: whether to return only when it is complete. Otherwise it is written during training, and the next
                checkpoint or `close` raises its error.

        Raises:
            StorageError: it cannot be written; checkpoints from before are as they were.
        """
        refuse_below(1, keep=1 if keep is None else keep)
        where = path_of(folder)
        self._run.results.refuse_averaged("checkpoints.save")
        if self._run.results.behind:
            return where / folders.name(self._run.results.steps_done(0))
        resumed, self._resumed = self._resumed, None
        if resumed is not None and resumed[1]:
            return self._put(resumed[0]).checkpoint.path
        return self._save(where, keep, extra, wait, asked=True)

    @property
    def job(self) -> dict[str, Any]:
        """The facts of this job in its checkpoints; all workers make the same call."""
        if "job" not in self._run.facts:
            self._run.facts["job"] = self._each(folders.job_of)[0]
        return self._run.facts["job"]  # type: ignore[no-any-return]

    def load(self, folder: str | Path, *, anew: bool = False) -> Restored:
        """Continue from a checkpoint, or from the newest complete one in `folder`.

        It may have been written by another number of workers, with another cut and schedule. The process's random
        generators are restored, too.

        Args:
            anew: whether the script makes all its calls again, and so draws all its random numbers again.

        Raises:
            Damaged: it is; nothing has changed.
            ConfigError: it is of another model or optimizer; nothing has changed.
        """
        where = path_of(folder)
        if self._run.recovery is not None and self._run.recovery.repeats:
            raise ConfigError("checkpoints.load: a newcomer has the state of a live worker; resume by --resume instead")
        self._run.results.refuse_averaged("checkpoints.load")
        self.settle()
        job = self.job  # with the learning rate of the script
        checkpoint, results, random = self._put(where)
        self._run.results.restore(results)
        num_routes = self._each(lambda actor: self._run.spec.num_routes * shares(actor))[0]
        apart = [] if num_routes == checkpoint.num_routes else checkpoint.apart()
        if apart and self._is_first:
            logger.warning(
                "checkpoint %s: buffers that differ between its %d replicas start from the first one (%s, %d in all): "
                "there are %d now", checkpoint.path, checkpoint.num_routes, apart[0], len(apart), num_routes,
            )  # fmt: skip
        if anew:
            self._run.results.skip(checkpoint.step)
            self._resumed = checkpoint.path, bool(checkpoint.about.get("asked"))
        else:
            with understood(checkpoint.path):
                set_random_state(random)
        if (differs := folders.differences(job, checkpoint.about.get("job") or {})) and self._is_first:
            logger.warning("checkpoint %s: %s", checkpoint.path, differs)
        return Restored(checkpoint.path, checkpoint.step, checkpoint.extra)

    def resume(self, folder: str | Path) -> Restored:
        """Like `load`, for a script that makes all its calls again, from the first one on.

        Batches of the steps that the checkpoint covers are read and skipped. Until then `pipe.replaying` is True:
        `step`, `train` and `evaluate` give nan, `predict` gives None, and nothing is saved.
        """
        return self.load(folder, anew=True)

    def go_on_with(self, folder: str | Path) -> list[Path]:
        """Go on with the series that this job has begun last in a folder; return its checkpoints, the newest first."""
        where, job = path_of(folder), self.job
        found = self._each(lambda actor: _agreed(actor, "series", where, lambda: folders.last_series(where, job)))[0]
        job["begun"] = next((told["begun"] for path in found if (told := folders.written_by(path))), job["begun"])
        return found  # type: ignore[no-any-return]

    def claim(self, folder: str | Path) -> list[Path]:
        """Take a folder for this job's checkpoints alone; return the job's checkpoints in it, newest first.

        There are some if the job has been started again, by `--max-restarts` of ours or of torchrun.

        Raises:
            ConfigError: another job writes there, or it cannot be written.
        """
        where, job = path_of(folder), self.job

        def claimed(actor: WorkerActor) -> list[Path]:
            starters = set(everywhere(actor, "starters", files.starter()))
            found = _agreed(actor, "own checkpoints", where, lambda: folders.claim(where, starters, job))
            self._claimed = where.absolute(), starters, job
            return found

        return self._each(claimed)[0]  # type: ignore[no-any-return]

    def every(self, steps: int, folder: str | Path, *, keep: int | None = None) -> None:
        """Write a checkpoint every `steps` steps from here on, beside training.

        Raises:
            ConfigError: a number that is not at least 1.
        """
        refuse_below(1, steps=steps, keep=1 if keep is None else keep)
        self._every = steps, path_of(folder).absolute(), keep  # a script may change to another folder
        self._run.due = self.due

    # --- called by the pipeline

    def rest(self) -> None:
        """Complete the checkpoint that is being written, and leave the folder, before other processes take part."""
        self.settle()
        folders.release()

    def due(self, step: int) -> bool:
        """Return whether a checkpoint is written after a number of steps."""
        return self._every is not None and step % self._every[0] == 0

    def after(self, step: int, stop: bool) -> None:
        """Write a checkpoint if one is due after a number of steps, or the run will stop.

        A checkpoint that the script has been resumed from is not written again.
        """
        self._resumed = None
        if self._every is not None and (stop or self.due(step)):
            self._save(*self._every[1:], extra=None, wait=stop, asked=False)

    def skip_step(self, batch: str, actors: Iterable[WorkerActor], rows: int = 0) -> tuple[float, bool]:
        """Skip a training step that the checkpoint covers; return its loss, and whether all workers stop here.

        A worker that is asked to stop skips all steps that are left. With the last one the script is where the
        checkpoint was made. Its changes by hand until then, such as a learning rate, are in the checkpoint already:
        they must not count twice.
        """
        results = self._run.results
        if stop := any(actor.stop_requested for actor in actors):
            results.skip(0)  # no more
        loss = results.loss if stop else results.skip_step(batch, rows)
        if not results.behind and self._resumed is not None:
            # A faster worker waits here for the slower ones: one of them may have been asked to stop.
            stop = any(self._each(lambda actor: everywhere(actor, "steps skipped", stop))[0])
            self._put(self._resumed[0])
            if self._run.recovery is not None:
                self._run.recovery.journal.write((results.steps_done(next(iter(actors)).step), loss, results.norm))
        return loss, stop or results.stopped

    def settle(self, *, again: bool = False) -> Path | None:
        """Wait until a checkpoint that is being written is complete; return its path where worker 0 is.

        Args:
            again: whether the checkpoint is written once more if a worker has died.

        Raises:
            ConfigError: on every worker, if it failed on one, and a script has asked for it or storage does not answer.
        """
        writing, self._writing = self._writing, None
        if writing is None:
            return None
        failed = failure(writing.finished())
        needed = writing.asked or writing.is_alive()

        def report(actor: WorkerActor) -> list[Any]:
            has_lost = self._run.epoch != writing.epoch  # again with each epoch
            return everywhere(actor, "checkpoint written", [failed, needed, writing.completes, has_lost, writing.named])

        told = self._each(report)[0]
        failures = [failure for failure, *_ in told]
        if not any(completes for _, _, completes, *_ in told):
            if told[0][-1]:
                writing.take_over()
            else:
                failures.append(failure(Stalled(f"checkpoint {writing.place}: the worker that completes it has died")))
        if any(text for text, *_ in failures):
            writing.discard()
        self._lost = any(lost for *_, lost, _ in told)
        try:
            raise_first(failures)
        except ConfigError as error:
            if any(needed for _, needed, *_ in told) and not self._lost:
                raise
            if not (again and self._lost):
                self._go_without(error)
            return None
        self._goes_without = self._lost = False
        return writing.path

    # --- inside

    @property
    def _is_first(self) -> bool:
        """Whether this process reports to the user."""
        return any(self._each(is_first_process))

    def _save(self, where: Path, keep: int | None, extra: Any, wait: bool, asked: bool) -> Path | None:
        self.settle()
        about = {"seed": self._run.seed, "pipeline": self._run.described, "extra": encoded(extra, "extra")}
        about |= {"asked": asked, "job": self.job, **self._run.results.about}
        try:
            begun = self._each(lambda actor: agreed(actor, "checkpoint", lambda: self._begin(where, actor.step)))
        except ConfigError as error:  # on every worker alike
            if asked:
                raise
            self._go_without(error)
            return None
        place = Path(begun[0])

        def copied(actor: WorkerActor) -> Snapshot:
            if not place.is_dir():
                raise ConfigError(f"checkpoint folder {where}: worker {actor.worker} sees another; it must be shared")
            return Snapshot(actor, separate=self._run.spec.averaging_pull > 0, epoch=self._run.epoch)

        about["step"] = self._each(lambda actor: actor.step)[0]
        snapshots = self._each(copied)
        self._writing = Writing(snapshots, place, about, self._run.config, keep, self._run.stall_s)
        path = self.settle(again=True) if wait else None
        return self._save(where, keep, extra, wait, asked) if wait and self._lost else path

    def _begin(self, where: Path, step: int) -> str:
        if self._claimed is not None and self._claimed[0] == where and not where.exists():
            logger.warning("checkpoint folder %s: has been removed with all that was in it; it is made again", where)
            folders.claim(*self._claimed)
        folders.hold(where)
        return str(folders.begin(where, step))

    def _go_without(self, error: ConfigError) -> None:
        """Report, once, that checkpoints of `every` cannot be written: training does not depend on them."""
        if not self._goes_without and self._is_first:
            logger.warning("%s; training goes on without it", error)
        self._goes_without = True

    def _put(self, where: Path) -> Prepared:
        separate, num_routes = self._run.spec.averaging_pull > 0, self._run.spec.num_routes
        return self._each(lambda actor: put_all(actor, where, separate, num_routes))[0]  # type: ignore[no-any-return]


def _agreed(actor: WorkerActor, name: str, where: Path, find: Callable[[], Iterable[Path]]) -> list[Path]:
    """Return on every worker the checkpoints in a folder that the first process finds."""
    names = agreed(actor, name, lambda: " ".join(path.name for path in find()))
    return [where / each for each in names.split()]


def path_of(given: str | Path) -> Path:
    """Return the user's argument as a path.

    Raises:
        ConfigError: it cannot be one.
    """
    if not isinstance(given, (str, os.PathLike)) or not str(given) or "\0" in str(given):
        raise ConfigError(f"{given!r}: must be the path of a file or folder")
    return Path(given)
