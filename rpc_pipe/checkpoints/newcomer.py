"""State that moves in an elastic job without a file: to newcomers, and from shards to shards of another cut.

Tensors have the names of the unsplit model and their whole shapes, so each shard of the other cut asks by name.

The results of the job's calls lie in a journal. A newcomer makes the calls of its script once more beside training,
and gets their results from there. Where there are no more, it takes part: it has the state of a worker after that step.
"""

import json
import math
import os
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from ..workers.actor import WorkerActor
from ..workers.compute.modules.buffer_mirror import mirror_of
from ..workers.compute.shard import Shard
from .shard_state import Stages, described, model_tensors, optimizer_tensors, put

_MODEL, _REST, _MIRROR = "model/", "rest/", "mirror/"


def move(
    actor: WorkerActor,
    stages_here: Collection[int],
    taken: Mapping[tuple[int, int], Shard],
    num_routes: int,
    same_cut: bool = False,
) -> int:
    """Let shards have the state of shards of another cut, and return the bytes that this worker has sent.

    All workers call this alike.

    Args:
        stages_here: the stages of the other cut that this worker alone gives the state of.
        taken: the shards that take, by (stage, route) of their cut, of `num_routes`.
        same_cut: whether it is the cut of before: replicas have the buffers of all then.

    Raises:
        ConfigError: the parameters of an optimizer's group had other options.
    """
    own = [(stage, shard) for (stage, _), shard in actor.shards.items() if stage in stages_here and not shard.is_guest]
    held = {stage: _tensors(shard) for stage, shard in own}
    told = {stage: [actor.worker, [*held[stage]], *_told(shard)] for stage, shard in own}
    # By stage, from all: the worker that gives it, the names of its tensors, and the rest of its state.
    every = sorted(each for one in actor.exchange("stages", json.dumps([*told.items()])) for each in json.loads(one))
    names = [name for _, (_, has, *_) in every for name in has]
    arrived: dict[str, Tensor] = {}
    stages = Stages(
        {str(stage): each for stage, (_, _, each, *_) in every},
        [name.removeprefix(_REST) for name in dict.fromkeys(names) if name.startswith(_REST)],
        # Two shards here may have one parameter, and an optimizer writes its state in place.
        lambda wanted, _: {name: arrived[_REST + name].clone() for name in wanted},
    )
    wanted = [_MODEL + name for shard in taken.values() for name in model_tensors(shard)]
    for (stage, route), shard in taken.items():
        wanted += [_REST + name for name in stages.wanted(shard, route, num_routes)]
        wanted += [name for name in names if same_cut and name.startswith(f"{_MIRROR}{stage}/")]
    sent, all_wanted = 0, [set(json.loads(each)) for each in actor.exchange("wanted", json.dumps(wanted))]
    for stage, (giver, has, *_) in every:
        for worker, left in zip(sorted(actor.carrier.workers), all_wanted, strict=True):
            part = [name for name in has if name in left]
            left.difference_update(part)  # of a parameter that several stages have, the first one gives
            gives = {name: held[stage][name] for name in part} if actor.worker == giver else {}
            sent += sum(tensor.nbytes for tensor in gives.values()) * (worker != giver)
            if part and (found := actor.hand(f"stage {stage} to {worker}", gives, [giver], [worker])):
                arrived |= {name: tensor.clone() for name, tensor in found[0].items()}
    for (stage, route), shard in taken.items():
        shard.updating.refuse_untrained()  # an average has all that has been trained so far
        put(shard, {name: arrived[_MODEL + name] for name in model_tensors(shard)})
        if same_cut:
            mirror_of(shard).put(arrived, f"{_MIRROR}{stage}/")
        else:
            mirror_of(shard).share(num_routes)
        stages.prepare(shard, route, num_routes)()
        *_, steps, shard.updating.scale.scale, shard.updating.scale.streak = every[0][1]
        shard.go_on_at(steps, stages.updates)
    return sent


def _tensors(shard: Shard) -> dict[str, Tensor]:
    model = {_MODEL + name: each for name, each in model_tensors(shard).items()}
    rest = {_REST + name: each for name, each in optimizer_tensors(shard).items()}
    held = mirror_of(shard).held.items()
    return model | rest | {f"{_MIRROR}{shard.stage}/{r}/{key}": each for r, has in held for key, each in has.items()}


def _told(shard: Shard) -> list[Any]:
    """Return the state of a shard beside the numbers in its tensors."""
    scale = shard.updating.scale
    return [described(shard, None), shard.num_updates, scale.scale, scale.streak]


#: most bytes of an entry
_MOST_BYTES = 2**18
_PAUSE_S = 0.005


class Journal:
    """The results of a job's training steps and evaluations, in a file of this host.

    All workers make the same calls, and write the same entries at the same places. So a death leaves no gap.
    """

    def __init__(self, folder: Path) -> None:
        self._file = os.open(folder / "journal", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        #: where the next entry begins, and its size when it has been read
        self._at = self._size = 0

    def write(self, entry: tuple[int, float, float | None] | Mapping[str, tuple[float, float]]) -> None:
        """Write the next entry: step, loss and norm; or the values of an evaluation, with their weights, by name."""
        self._at += os.pwrite(self._file, json.dumps(entry).encode() + b"\n", self._at)

    def read(self) -> Any:
        """Return the next entry; None: it is not there yet, or not all of it."""
        text, end, _ = os.pread(self._file, _MOST_BYTES, self._at).partition(b"\n")
        self._size = len(text) + 1
        return json.loads(text) if end else None

    def advance(self) -> None:
        """Go behind the entry that has been read."""
        self._at += self._size


class Repetition:
    """The results of a job's calls, as a newcomer's script asks for them until it takes part.

    Args:
        take_part: called when there is no entry; lets the process take part, if the time has come, and returns whether.
        look: called while an entry is awaited.

    Attributes:
        goes_on: whether the process does not take part yet.
    """

    def __init__(self, journal: Journal, take_part: Callable[[], bool], look: Callable[[], None]) -> None:
        self._journal, self._take_part, self._look = journal, take_part, look
        self.goes_on = True

    def step(self, number: int) -> tuple[float, float | None]:
        """Return loss and norm of a training step; nan for one before the checkpoint that the job resumed from."""
        while isinstance(entry := self._next(), dict):  # the script has left out an evaluation
            self._journal.advance()
        step, loss, norm = entry
        if step > number:
            return math.nan, None
        self._journal.advance()
        return float(loss), norm

    def wait(self) -> None:
        """Wait until there is a further entry, or the process takes part."""
        while self.goes_on and self._journal.read() is None:
            self.goes_on = not self._take_part()
            if self.goes_on:
                self._pause()

    def evaluated(self) -> dict[str, tuple[float, float]] | None:
        """Return the values of an evaluation, with their weights, by name; None: the job has not made it here."""
        entry = self._next()
        if not isinstance(entry, dict):
            return None
        self._journal.advance()
        return {name: (value, weight) for name, (value, weight) in entry.items()}

    def _next(self) -> Any:
        while (entry := self._journal.read()) is None:
            self._pause()
        return entry

    def _pause(self) -> None:
        self._look()
        time.sleep(_PAUSE_S)
