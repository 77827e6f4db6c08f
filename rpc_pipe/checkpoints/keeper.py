"""A pipeline's checkpoints: all workers make one together, and go on from one together or not at all."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..dependency import ConfigError
from .resumption import Resumption
from .together import agreed, failure, raise_first

if TYPE_CHECKING:  # what a run without checkpoints does not load
    from ..model.adapters import Adapter
    from ..workers.actor import WorkerActor
    from .pretrained import Loaded
    from .restoring import Prepared, Restored
    from .writing import Snapshot, Writing

logger = logging.getLogger(__name__)


class Keeper:
    """Saves and restores the workers of one process, in turn with all others.

    Args:
        each: calls a function for every worker of this process, at the same time.
        about: what of the pipeline a reader of the checkpoint may want to know.
        deadline_s: how long a worker's files may take.
        elastic: whether routes have weights of their own, which are pulled to a reference.
    """

    def __init__(
        self,
        each: Callable[[Callable[[WorkerActor], Any]], list[Any]],
        num_workers: int,
        about: Mapping[str, Any],
        deadline_s: float,
        elastic: bool = False,
        num_routes: int = 1,
    ) -> None:
        self._each, self._num_workers, self.about, self._deadline_s = each, num_workers, dict(about), deadline_s
        self._elastic, self._num_routes = elastic, num_routes
        self._writing: Writing | None = None
        self.results = Resumption()
        #: after how many steps a checkpoint is written, where, and how many are kept
        self.every: tuple[int, Path, int | None] | None = None
        #: of the model, by name, if peft has adapted it
        self.adapters: Mapping[str, Adapter] = {}
        #: of the model, if it has one that can write itself
        self.config: Any = None
        #: of a script that starts from the top: the checkpoint that it goes on from, and whether it wrote that itself
        self._resumed: tuple[Path, bool] | None = None
        #: whether weights and their averages are exchanged now
        self.averaged = False
        #: the folder that was claimed, and by whom
        self._claimed: tuple[Path, set[str]] | None = None
        #: whether the last checkpoint of `every` could not be written, which is told once
        self._goes_without = False

    def claim(self, where: Path) -> list[Path]:
        """Take a folder for this job's checkpoints; return those that it has there, the newest first."""

        from . import ownership

        def claim(starters: set[str]) -> str:
            return " ".join(path.name for path in ownership.claim(where, starters))

        def claimed(actor: WorkerActor) -> list[Path]:
            starters = set(actor.exchange("starters", ownership.starter()))
            own = agreed(actor, "own checkpoints", lambda: claim(starters), of=0)
            self._claimed = where.absolute(), starters
            return [where / name for name in own.split()]

        return self._each(claimed)[0]  # type: ignore[no-any-return]

    def due(self, step: int) -> bool:
        """Tell whether a checkpoint is written after so many steps."""
        return self.every is not None and step % self.every[0] == 0

    def after(self, step: int, stop: bool) -> None:
        """Write a checkpoint if one is due after so many steps, or the run will stop."""
        if self.every is not None and (stop or self.due(step)):
            self._save(*self.every[1:], extra=None, wait=stop, asked=False)

    def save(self, where: Path, keep: int | None, extra: Any, wait: bool) -> Path | None:
        """Copy all numbers and write them beside training; with `wait`, return when the checkpoint is complete.

        Where calls are skipped it has been written already. If it is the one that the script goes on from, all is put
        as it was once more: what the script changes by hand just before is in it, and must not count twice.
        """
        self.refuse_averaged("checkpoints.save")
        if self.results.behind:
            from .folder import name

            return where / name(self.results.steps_done(0))
        resumed, self._resumed = self._resumed, None
        if resumed is not None and resumed[1]:
            return self._put(resumed[0]).checkpoint.path
        return self._save(where, keep, extra, wait, asked=True)

    def refuse_averaged(self, what: str) -> None:
        """Refuse to train, or to keep what training goes on from, where the weights are their average."""
        if self.averaged:
            raise ConfigError(
                f"{what}: the weights are their average here, to evaluate or save them by `save`: call it outside of "
                "`averaged`"
            )

    def _save(self, where: Path, keep: int | None, extra: Any, wait: bool, asked: bool) -> Path | None:
        from .json_values import encoded
        from .writing import Snapshot, Writing

        self.settle()
        about = {**self.about, "extra": encoded(extra, "extra"), "asked": asked, **self.results.about}
        try:
            begun = self._each(lambda actor: agreed(actor, "checkpoint", lambda: self._begin(where, actor.step), of=0))
        except ConfigError as error:  # on every worker alike
            if asked:
                raise
            self._go_without(error)
            return None
        place = Path(begun[0])

        def copied(actor: WorkerActor) -> Snapshot:
            if not place.is_dir():
                raise ConfigError(f"checkpoint folder {where}: worker {actor.worker} sees another; it must be shared")
            return Snapshot(actor, self._num_workers, elastic=self._elastic)

        about["step"] = self._each(lambda actor: actor.step)[0]
        how = about, self.config, keep, self._deadline_s
        self._writing = Writing(self._each(copied), place, *how)
        return self.settle() if wait else None

    def _begin(self, where: Path, step: int) -> str:
        from . import folder, ownership

        if self._claimed is not None and self._claimed[0] == where and not where.exists():
            logger.warning("checkpoint folder %s: has been removed with all that was in it; it is made again", where)
            ownership.claim(*self._claimed)
        ownership.hold(where)
        return str(folder.begin(where, step))

    def _go_without(self, error: ConfigError | None) -> None:
        """Tell, once, that checkpoints of `every` cannot be written: training does not depend on them."""
        if error is not None and not self._goes_without and 0 in self._each(lambda actor: actor.worker):
            logger.warning("%s; training goes on without it", error)
        self._goes_without = error is not None

    def settle(self) -> Path | None:
        """Wait until what is being written is complete; return its path where worker 0 is.

        Raises:
            ConfigError: on every worker, if it failed on one, and a script has asked for it or storage does not answer.
        """
        writing, self._writing = self._writing, None
        if writing is None:
            return None
        failed = failure(writing.finished())
        needed = writing.asked or writing.is_alive()
        told = self._each(lambda actor: actor.exchange("checkpoint written", [failed, needed]))[0]
        if any(text for (text, *_), _ in told):
            writing.discard()
        try:
            raise_first([failure for failure, _ in told])
        except ConfigError as error:
            if any(needed for _, needed in told):
                raise
            self._go_without(error)
            return None
        self._go_without(None)
        return writing.path

    def load(self, where: str | Path, *, anew: bool = False) -> Restored:
        """Let all workers go on from a checkpoint.

        Args:
            anew: whether the script makes all its calls again, and so draws all its random numbers again.

        Raises:
            ConfigError: it does not fit, or is damaged; on every worker, and nothing has changed on any.
        """
        from .random_state import set_random_state
        from .restoring import Restored, understood

        self.refuse_averaged("checkpoints.load")
        self.settle()
        checkpoint, self.results, random = self._put(where)
        if anew:
            self.results.skip(checkpoint.step)
            self._resumed = checkpoint.path, bool(checkpoint.about.get("asked"))
        else:
            with understood(checkpoint.path):
                set_random_state(random)
        return Restored(checkpoint.path, checkpoint.step, checkpoint.extra)

    def _put(self, where: str | Path) -> Prepared:
        from .restoring import put_all

        return self._each(lambda actor: put_all(actor, where, self._elastic, self._num_routes))[0]  # type: ignore[no-any-return]

    def skip_step(self, batch: str) -> float:
        """Skip a training step that the checkpoint covers, as `Resumption.skip_step`.

        With the last one the script is where the checkpoint was made. What it has changed by hand until then, such as
        a learning rate, is in the checkpoint already: it must not count twice.
        """
        loss = self.results.skip_step(batch)
        if not self.results.behind and self._resumed is not None:
            self._put(self._resumed[0])
        return loss

    def note_step(self, loss: float, batch: str, norm: float | None) -> None:
        """Remember the result of a training step; what was written before it is not written again."""
        self._resumed = None
        self.results.note_step(loss, batch, norm)

    def save_pretrained(self, where: Path) -> None:
        """Write the weights alone, or adapters alone, as `from_pretrained` takes them.

        Raises:
            ConfigError: on every worker, if it failed on one.
        """
        from .adapters import save_adapters
        from .pretrained import save

        self.settle()
        if self.adapters:
            self._each(lambda actor: save_adapters(actor, where, self.adapters))
        else:
            self._each(lambda actor: save(actor, where, self._num_workers, self.config, self._deadline_s))

    def load_pretrained(self, where: Path, strict: bool) -> Loaded:
        """Let all workers read their weights from a folder of safetensors, or none."""
        from .pretrained import load

        return self._each(lambda actor: load(actor, where, strict))[0]  # type: ignore[no-any-return]
