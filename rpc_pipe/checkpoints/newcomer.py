"""State that moves in an elastic job without a file: to newcomers, and from shards to shards of another cut.

Tensors have the names of the unsplit model and their whole shapes, so each shard of the other cut asks by name.

The results of the job's calls lie in a journal. A newcomer makes the calls of its script once more beside training,
and gets their results from there. Where there are no more, it takes part: it has the state of a worker after that step.
"""

from __future__ import annotations

import json
import math
import os
import struct
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from ..workers.actor import WorkerActor
from ..workers.compute.modules.buffer_mirror import mirror_of
from ..workers.compute.shard import Shard
from .resumption import Resumption
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


_RECORD = struct.Struct("<qdd")
_PAUSE_S = 0.005


class CallResult(NamedTuple):
    """The result of a call: of a training step its loss and norm."""

    #: negative: minus the number of bytes of an evaluation, which follow
    step: int
    value: float
    beside: float


class Journal:
    """The results of a job's training steps and evaluations, in a file of this host.

    All workers make the same calls, and write the same entries at the same places. So a death leaves no gap.
    """

    def __init__(self, folder: Path) -> None:
        self._file = os.open(folder / "journal", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._at = 0

    def write(self, step: int, value: float, beside: float | None) -> None:
        """Write the next entry."""
        entry = _RECORD.pack(step, value, math.nan if beside is None else beside)
        os.pwrite(self._file, entry, self._at)
        self._at += _RECORD.size

    def write_evaluation(self, found: Mapping[str, tuple[float, float]]) -> None:
        """Write the values of an evaluation as the next entry."""
        text = json.dumps(found).encode()
        self._at += os.pwrite(self._file, _RECORD.pack(-len(text), 0.0, 0.0) + text, self._at)

    def evaluation(self, size: int) -> dict[str, tuple[float, float]] | None:
        """Return the values in the next entry, of `size` bytes, and move behind it; None: it is not complete yet."""
        text = os.pread(self._file, size, self._at + _RECORD.size)
        if len(text) < size:
            return None
        self._at += _RECORD.size + size
        return {name: (value, weight) for name, (value, weight) in json.loads(text).items()}

    def read(self) -> CallResult | None:
        """Return the next entry; None: there is none yet."""
        found = os.pread(self._file, _RECORD.size, self._at)
        return CallResult(*_RECORD.unpack(found)) if len(found) == _RECORD.size else None

    def advance(self) -> None:
        """Go behind the next entry."""
        self._at += _RECORD.size


class Repetition(Resumption):
    """The calls of a newcomer's script until it takes part.

    Args:
        take_part: called when there is no entry; lets the process take part, if the time has come, and returns whether.
        look: called while an entry is awaited.
    """

    def __init__(self, journal: Journal, take_part: Callable[[], bool], look: Callable[[], None]) -> None:
        super().__init__()
        self._journal, self._take_part, self._look = journal, take_part, look
        self._replays = True

    @property
    def behind(self) -> bool:
        return self._replays

    def skip_step(self, batch: str, rows: int = 0) -> float:
        self._asked += 1
        entry = self._next()
        while entry.step <= 0:  # the script has left out an evaluation
            self.evaluated()
            entry = self._next()
        if entry.step > self._asked:  # an earlier step than the checkpoint that the job resumed from
            return math.nan
        self._journal.advance()
        norm = None if math.isnan(entry.beside) else entry.beside
        self.note_step(entry.value, batch, norm, rows)
        while self._journal.read() is None:
            if self._take_part():
                self._replays = False
                break
            self._wait()
        return entry.value

    def evaluated(self) -> dict[str, tuple[float, float]]:
        entry = self._next()
        if entry.step > 0:
            return super().evaluated()
        while (found := self._journal.evaluation(-entry.step)) is None:
            self._wait()
        return found

    def _next(self) -> CallResult:
        while (entry := self._journal.read()) is None:
            self._wait()
        return entry

    def _wait(self) -> None:
        self._look()
        time.sleep(_PAUSE_S)
