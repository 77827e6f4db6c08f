"""A pipeline's checkpoints: all workers make one together, and go on from one together or not at all."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..dependency import ConfigError, Damaged, PipeError
from ..dependency.files import DAMAGED
from ..model.adapters import Adapter
from ..workers.actor import WorkerActor
from ..workers.compute.shard import Shard
from ..workers.compute.stash import StashingShard
from . import folder, ownership
from .adapters import save_adapters
from .json_values import encoded
from .pretrained import Loaded, Pretrained, begin_export
from .random_state import NAMES, random_state, set_random_state
from .reading import Checkpoint
from .resumption import Resumption
from .shard_state import model_tensors, put
from .together import agreed, failure, raise_first, together
from .writing import Snapshot, Writing, export

logger = logging.getLogger(__name__)


class Restored(NamedTuple):
    """What a pipeline went on from."""

    path: Path
    #: training steps done
    step: int
    #: what was given to `save_checkpoint` to be kept
    extra: Any


class _Prepared(NamedTuple):
    """What has been read of a checkpoint beside what each worker puts in its place."""

    checkpoint: Checkpoint
    results: Resumption
    #: as `random_state`
    random: dict[str, torch.Tensor]


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

        def claimed(actor: WorkerActor) -> list[Path]:
            starters = set(actor.exchange("starters", ownership.starter()))
            own = agreed(actor, "own checkpoints", lambda: _names(ownership.claim(where, starters)), of=0)
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
        self.refuse_averaged("save_checkpoint")
        if self.results.behind:
            return where / folder.name(self.results.steps_done(0))
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

        def snapshot(actor: WorkerActor) -> Snapshot:
            if not place.is_dir():
                raise ConfigError(f"checkpoint folder {where}: worker {actor.worker} sees another; it must be shared")
            first, routes = _first_route(actor), _own_routes(actor) if self._elastic else []
            also = random_state() if actor.worker == 0 else {}
            return Snapshot(actor.worker, self._num_workers, first, also, routes, _replicas(actor))

        about["step"] = self._each(lambda actor: actor.step)[0]
        how = about, self.config, keep, self._deadline_s
        self._writing = Writing(self._each(snapshot), place, *how)
        return self.settle() if wait else None

    def _begin(self, where: Path, step: int) -> str:
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
        self.refuse_averaged("load_checkpoint")
        self.settle()
        checkpoint, self.results, random = self._put(where)
        if anew:
            self.results.skip(checkpoint.step)
            self._resumed = checkpoint.path, bool(checkpoint.about.get("asked"))
        else:
            with _understood(checkpoint.path):
                set_random_state(random)
        return Restored(checkpoint.path, checkpoint.step, checkpoint.extra)

    def _put(self, where: str | Path) -> _Prepared:
        def put_all(actor: WorkerActor) -> _Prepared:
            prepared, steps = _prepared(actor, where, self._elastic, self._num_routes)
            with _understood(prepared.checkpoint.path):
                for step in steps:
                    step()
            return prepared

        return self._each(put_all)[0]  # type: ignore[no-any-return]

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
        self.settle()
        if self.adapters:
            self._each(lambda actor: save_adapters(actor, where, self.adapters))
            return

        def save(actor: WorkerActor) -> None:
            place = Path(agreed(actor, "export", lambda: str(begin_export(where)), of=0))

            def write() -> None:
                Snapshot(actor.worker, self._num_workers, _first_route(actor), None).write(place)
                if actor.worker == 0:
                    export(place, self._num_workers, self.config, self._deadline_s)

            together(actor, "exported", write)

        self._each(save)

    def load_pretrained(self, where: str | Path, strict: bool) -> Loaded:
        """Let all workers read their weights from a folder of safetensors.

        Raises:
            ConfigError: something does not fit; nothing has changed on any worker.
        """

        def load(actor: WorkerActor) -> Loaded:
            # A parameter may have another name too, that of the stage which has it first.
            own = {shard: {**dict(shard.named_parameters()), **model_tensors(shard)} for shard in actor.shards.values()}
            told = actor.exchange("names", sorted(name for tensors in own.values() for name in tensors))
            names = {name for each in told for name in each}

            def find() -> tuple[Pretrained, dict[Shard, tuple[dict[str, str], set[str]]]]:
                pretrained = Pretrained(where)
                change = pretrained.prefix(names)
                return pretrained, {shard: pretrained.find(tensors, change) for shard, tensors in own.items()}

            (pretrained, found), told = together(
                actor, "pretrained read", find, lambda read: _names_of(*read[1].values())
            )
            loaded = Loaded(
                sorted({name for lacking, _ in told for name in lacking}),
                sorted(pretrained.names - {name for _, used in told for name in used}),
            )
            if strict and (loaded.missing or loaded.unexpected):
                raise ConfigError(_unmet(where, loaded))
            for shard, (here, _) in found.items():
                pretrained.fill(own[shard], here)
            return loaded

        return self._each(load)[0]  # type: ignore[no-any-return]


def _names(paths: list[Path]) -> str:
    return " ".join(path.name for path in paths)


def _first_route(actor: WorkerActor) -> list[Shard]:
    """Return the shards of a worker that it has before all replicas."""
    return [shard for (_, route), shard in actor.shards.items() if route == 0]


def _replicas(actor: WorkerActor) -> list[tuple[int, Shard]]:
    return [(route, shard) for (_, route), shard in actor.shards.items() if route > 0]


def _own_routes(actor: WorkerActor) -> list[list[Shard]]:
    """Return a worker's shards by route, where each route has weights of its own."""
    routes = sorted({route for _, route in actor.shards})
    return [[shard for (_, route), shard in actor.shards.items() if route == each] for each in routes]


def _names_of(*found: tuple[dict[str, str], set[str]]) -> list[list[str]]:
    """Return the names that shards lack, and those in the folder that they use, of what `Pretrained.find` gave."""
    lacking, used = (
        {name for _, lacks in found for name in lacks},
        {other for here, _ in found for other in here.values()},
    )
    return [sorted(lacking), sorted(used)]


def _unmet(where: str | Path, loaded: Loaded) -> str:
    def few(names: list[str]) -> str:
        return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")

    lacks = f"has no tensor for {few(loaded.missing)}" if loaded.missing else ""
    more = f"has {few(loaded.unexpected)}, which this model does not have" if loaded.unexpected else ""
    return f"{where}: {'; '.join(filter(None, (lacks, more)))}; strict=False leaves out what does not meet"


def _prepared(
    actor: WorkerActor, where: str | Path, elastic: bool, num_routes: int
) -> tuple[_Prepared, list[Callable[[], None]]]:
    """Read all that `actor` needs, see with the others that everything fits, and return what puts it in place."""
    steps: list[Callable[[], None]] = []
    names: set[str] = set()
    references: list[tuple[Shard, dict[str, torch.Tensor]]] = []

    @_understood(where)
    def prepare() -> _Prepared:
        checkpoint = Checkpoint(where)
        results = Resumption(checkpoint.about)
        # Another number of routes goes on from their reference, with the state of the first one's optimizer.
        apart = elastic and checkpoint.num_routes == len(_own_routes(actor))
        for (_, route), shard in actor.shards.items():
            own = model_tensors(shard)
            names.update(own)
            weights, stages, rest = checkpoint.model(own), checkpoint.stages, checkpoint.rest
            if apart:
                references.append((shard, weights))
                weights, stages = checkpoint.of_route(route, own), checkpoint.routes[route]
                rest = partial(checkpoint.of_route, route)
            steps.append(_putting(shard, weights))
            steps.append(stages.prepare(shard, rest(stages.wanted(shard, route, num_routes))))
        updates = checkpoint.stages.updates
        steps.append(lambda: actor.go_on_at(checkpoint.step, updates))
        steps.extend(partial(_refer, *each) for each in references)
        return _Prepared(checkpoint, results, checkpoint.rest(NAMES))

    prepared, told = together(
        actor, "checkpoint read", prepare, lambda read: [read.checkpoint.path.name, sorted(names)]
    )
    if len({path for path, _ in told}) > 1:
        raise ConfigError(f"checkpoint {where}: workers see different ones, {', '.join(path for path, _ in told)}")
    checkpoint = prepared.checkpoint
    left = checkpoint.names - {name for _, own in told for name in own}
    if left:
        raise ConfigError(f"checkpoint {checkpoint.path}: has {min(left)}, which this model does not have")
    return prepared, steps


@contextmanager
def _understood(checkpoint: str | Path) -> Iterator[None]:
    """Turn what is raised where a manifest says something else than it should into a sentence.

    Raises:
        Damaged: instead of that.
    """
    try:
        yield
    except PipeError:
        raise
    except DAMAGED as error:
        what = f"{type(error).__name__}: {error}"
        raise Damaged(f"checkpoint {checkpoint}: is damaged, or of another version: {what}") from error


def _putting(shard: Shard, tensors: Mapping[str, torch.Tensor]) -> Callable[[], None]:
    return lambda: put(shard, tensors)


def _refer(shard: Shard, weights: Mapping[str, torch.Tensor]) -> None:
    assert isinstance(shard, StashingShard)
    shard.refer_to(weights)
