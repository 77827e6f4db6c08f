"""The boards of this process's workers: written during training, sent to other machines, removed at the end.

At the end of a run worker 0 collects the boards of all workers. If a launcher keeps them, they are read from the run's
folder; otherwise worker 0 requests them from the other workers, which stay until then. Readers of boards are imported
when they are needed: a training script loads the writers alone.
"""

from __future__ import annotations

import atexit
import faulthandler
import os
import signal
import socket
import sys
import time
import traceback
import zlib
from collections.abc import Iterable
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import ref

from ..dependency import Entry, Kind, Order, PeerLost, PipeError, Spec, U
from ..dependency.action import BUILT_IN
from ..schedules import name_of
from . import run_folders
from .board import COLLECT_S, OWN, BoardWriter, ProgramLister
from .run_folders import END, RUN_FAILED, RUN_STOPPED, Ending, tell_end

if TYPE_CHECKING:
    from ..workers.actor import WorkerActor
    from ..workers.transport.carrier import Carrier
    from .view import View

#: signal on which a worker writes the stacks of its threads to `stacks-<process>`
_STACKS = signal.SIGRTMIN + 7
#: seconds that other workers wait for worker 0 to leave
_STAY_S = 10.0
_PAUSE_S = 0.01

#: a training that can be watched, and that the launcher can stop: a `Pipeline`, which stands above this folder
Watchable = Any

#: boards of the latest pipeline, by process (of threads: by worker), kept until the process ends
_boards: dict[int, BoardWriter] = {}
#: that pipeline
_recorded: ref[Watchable] | None = None
#: the process that owns them; its forks do not touch them
_owner = 0
#: carrier to the workers in other processes
_carrier: Carrier | None = None


def _lister(training: Watchable, worker: int) -> ProgramLister:
    """Return a function that lists programs of `worker` as long as `training` lives."""
    made, order = ref(training), training.order

    def listing(count: int) -> dict[str, Any] | None:
        if (alive := made()) is None or not alive.actors or not alive.actors[0].shards:
            return None
        spec = replace(alive.spec, num_microbatches=count)
        return list_program(spec, worker, order, alive.program(worker, count))

    return listing


def _script() -> str:
    """Return the name of the script that this process runs."""
    name = Path(sys.argv[0]).name
    if name in ("own_train.py", "own_generate.py"):  # of `rpc-pipe run --model`, and of `generate`
        return Path(sys.argv[1]).name
    return "built-in GPT" if Path(sys.argv[0]).parts[-2:] == ("demo", "train.py") else name or "python"


def header_of(training: Watchable, actor: WorkerActor, epoch: int = 0) -> dict[str, Any]:
    """Return the constant properties of a worker, in an epoch of an elastic job."""
    worker, plane, shards, live = actor.worker, actor.carrier.plane, actor.shards, list(training.spec.workers)
    own = training.shards(worker) if shards else ()
    return {
        "worker": live.index(worker),
        "rank": plane.rank(worker),
        **plane._asdict(),
        "num_workers": len(live),
        **({"predicted_ms": training.predicted_ms} if training.predicted_ms and not epoch else {}),
        **({"epoch": epoch, "places": training.spec.num_workers} if epoch else {}),
        "script": _script(),
        "process": run_folders.identity(),
        "host": socket.gethostname(),
        "device": str(training.actors[0].backend.device),
        "schedule": name_of(training.spec),
        "microbatches": training.spec.num_microbatches,
        **asdict(training.spec.parallelism),
        "num_routes": training.spec.num_routes,
        "shards": [(*each, _form(shards[each[:2]])) for each in own],
        "parameters": [sum(part.numel() for _, part in shards[each[:2]].named_parameters()) for each in own],
        "cores": len(os.sched_getaffinity(0)),
        "started": time.time(),
        "clock_ns": time.perf_counter_ns(),
        "stacks_signal": _STACKS,
        **({"newcomer": True} if run_folders.NEWCOMER in os.environ else {}),
        "kinds": [kind.row for kind in Kind.all() if kind not in BUILT_IN],
    }


def _form(shard: Any) -> int:
    """Return a number that is equal for stages with parameters of equal shapes, which should take equally long."""
    return zlib.crc32(repr([tuple(parameter.shape) for _, parameter in shard.named_parameters()]).encode())


@cache
def _folder() -> Path | None:
    """Return the run's folder, the same for all pipelines of this process."""
    return run_folders.folder(os.environ)


def keep_boards(training: Watchable) -> bool:
    """Write boards of this process's workers into the run's folder; return False if the run keeps none.

    It is called when a pipeline begins to cut its model, so that a worker that hangs then is seen, and when it has.

    Raises:
        ConfigError, OSError: they cannot be written.
    """
    folder = _folder()
    if folder is None:
        return False
    if not training.actors[0].shards:
        run_folders.enter(folder)
        _offer_stacks(folder)
        if os.environ.get("LOCAL_RANK", "0") == "0":
            (folder / END).unlink(missing_ok=True)  # torchrun has started the workers again
    _keep(training, folder)
    return True


def roll_call_here() -> str:
    """Return the stall report on the workers of this host; "" if there is none."""
    from .view import describe_stall

    folder = _folder()
    try:
        return "" if folder is None else describe_stall(folder)
    except (OSError, ValueError):  # other workers have removed their boards
        return ""


def record(training: Watchable) -> None:
    """Make sure that `collect` gets the last steps of `training`, even if its boards are private."""
    if _recorded is None or _recorded() is not training:
        _keep(training, None)


def _keep(training: Watchable, folder: Path | None) -> None:
    global _carrier, _owner, _recorded
    written = max((own.written for own in _boards.values()), default=0)
    for own in _boards.values():
        own.detach()
    _boards.clear()
    rank_of = training.actors[0].carrier.plane.rank
    for actor in training.actors:
        path = None if folder is None else folder / f"{OWN}{rank_of(actor.worker)}"
        own = BoardWriter(path, header_of(training, actor), _lister(training, actor.worker), rank_of, written)
        _boards[rank_of(actor.worker)] = own
    _owner, _recorded = os.getpid(), ref(training)
    if not training.actors[0].shards:
        return
    training.listen(lambda worker: _boards[rank_of(worker)])
    for actor in training.actors:
        if not actor.carrier.post.within_process:  # to workers in other processes
            _carrier = actor.carrier
            _carrier.serve_board = _boards[rank_of(actor.worker)].since
            if folder is not None:
                _keep_mirror(folder)


def renew(epoch: int) -> None:
    """Begin the boards of this process anew for an epoch of an elastic job, without the steps of before."""
    training: Watchable = None if _recorded is None else _recorded()
    for actor in () if training is None else training.actors:
        board, row = _boards[actor.carrier.plane.rank(actor.worker)], list(training.spec.workers).index
        board.renew(header_of(training, actor, epoch), row)


def collect() -> View:
    """Return the last steps of all workers. Called by worker 0 at the end of a run."""
    from .remote import collected

    write_out()
    folder = _folder() if run_folders.FOLDER in os.environ else None
    return collected({rank: own.since for rank, own in _boards.items()}, folder, _carrier)


def write_out() -> None:
    """Let the boards have all steps that have ended; the last one is else written when its worker waits next."""
    for own in _boards.values():
        own.write_out()


def end_calls() -> None:
    """Announce that this process makes no more calls, before it waits for other workers."""
    write_out()
    if _carrier is not None:
        _carrier.end_calls()


def stay() -> None:
    """Wait for a limited time until worker 0 has left, which collects the boards that end with this process.

    It collects nothing of a failed run; a worker that has left in the middle of a step shortens the wait.
    """
    if _carrier is None or run_folders.FOLDER in os.environ:
        return
    outbox = _carrier.outbox
    deadline = time.monotonic() + (COLLECT_S if outbox.asked_in_vain else _STAY_S)
    while outbox.failure is None and not outbox.has_left(0) and time.monotonic() < deadline:
        time.sleep(_PAUSE_S)


def follow_carrier(carrier: Carrier) -> None:
    """Serve the boards of this process by another carrier, so that the one before is closed."""
    global _carrier
    if _carrier is not None:
        carrier.serve_board, _carrier = _carrier.serve_board, carrier


@cache
def _keep_mirror(folder: Path) -> None:
    """Start mirrors in the first worker of a machine. torchrun numbers ranks machine by machine."""
    size, local = (os.environ.get(name, "") for name in ("LOCAL_WORLD_SIZE", "LOCAL_RANK"))
    if _carrier is not None and local == "0" and size.isdecimal():
        from .remote import Mirror

        first, rank_of = _carrier.plane.rank(_carrier.worker), _carrier.plane.rank
        if remote := [each for each in _carrier.workers if rank_of(each) not in range(first, first + int(size))]:
            Mirror(_carrier, folder, remote).start()


@cache
def _offer_stacks(folder: Path) -> None:
    """Write the stacks of all threads on a signal, from C, so that it works while the interpreter is stuck."""
    faulthandler.register(_STACKS, (folder / f"stacks-{os.getpid()}").open("w"))


def tell_failure(text: str, *, consequence: bool = False, what: str = RUN_FAILED) -> None:
    """Write the cause of a worker's end for watchers, if no launcher does."""
    folder = _folder() if _boards and run_folders.FOLDER not in os.environ else None
    if folder is not None:
        tell_end(folder, Ending(what, text, consequence))


@atexit.register
def leave() -> None:
    """Mark the workers as left, and leave the run's folder, unless a launcher removes it after reading it."""
    if _owner != os.getpid():
        return
    if isinstance(error := getattr(sys, "last_value", None), KeyboardInterrupt):
        tell_failure("by Ctrl-C", what=RUN_STOPPED)
    elif error is not None:
        text = str(error) if isinstance(error, PipeError) else traceback.format_exception_only(error)[-1].strip()
        tell_failure(text, consequence=isinstance(error, PeerLost))
    for board in _boards.values():
        board.close()
    folders = {board.path.parent for board in _boards.values() if board.path is not None}
    for folder in folders if run_folders.FOLDER not in os.environ else ():
        run_folders.leave(folder)


def list_program(spec: Spec, worker: int, order: Order, program: Iterable[Entry]) -> dict[str, Any]:
    """Return the actions of `worker` in a step, in order, with their needs, as values for JSON."""
    entries = [entry for entry in program if spec.orders(entry.action)]
    routes, stream = [spec.route(m) for m in range(spec.num_microbatches)], dict[str, Any]()
    if any(entry.action.kind is U for entry in entries):  # steps overlap
        from ..dependency.earlier_steps import period

        stream = {
            "period": period(spec),
            "update_every": spec.update_every,
            "slots": [spec.slot(entry.action) for entry in entries],
            "earlier": [[[back, str(need)] for back, need in each.earlier if spec.orders(need)] for each in entries],
        }
    return {
        **stream,
        **asdict(spec.parallelism),
        **({"handovers": [list(map(str, each)) for each in spec.handovers]} if spec.handovers else {}),
        "schedule": name_of(spec),
        "worker": worker,
        "microbatches": spec.num_microbatches,
        "order": order,
        "shards": spec.hosted(worker),
        "routes": routes if any(routes) else [],
        "program": [
            [str(entry.action), *map(str, entry.own), *(str(need.action) for need in entry.pulled)]
            for entry in entries
        ],
    }  # fmt: skip
