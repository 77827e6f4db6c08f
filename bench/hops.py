"""Where the time of a hop goes: from the end of one device's work to the start of the next one's that waited for it.

    python bench/hops.py [--workers 8] [--ms 2] [--rpc]

Through shared memory, or with --rpc by RPC as between hosts. Only hops whose receiver had nothing else to do count.
Times are medians, us, of the clock that all processes of a host share. Taking them costs some 20 us a hop.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

if __package__ is None or __package__ == "":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from bench import devices, group
from bench.scenarios import emulated
from bench.systems import SYSTEMS, Job, Ours
from rpc_pipe.dependency import Entry
from rpc_pipe.workers.run import Stream
from rpc_pipe.workers.step import Step
from rpc_pipe.workers.transport import message, rpc
from rpc_pipe.workers.transport.carrier import Carrier
from rpc_pipe.workers.transport.messages import Messages, PeerQueue
from rpc_pipe.workers.transport.shared_memory import POSSIBLE, Channels
from rpc_pipe.workers.transport.wakeup import Wakeup

MODEL, OURS, WAKING = "the model's operators", "rpc-pipe", "waking, network, TensorPipe"
#: what happens on the way, in order, and what the time before it is spent on
_BEFORE = {
    "worked": ("", ""),
    "computed": (MODEL, "the rest of the action"),
    "published": (OURS, "packed, outbox"),
}
_AFTER = {
    "woke": (WAKING, "the receiver's compute thread"),
    "taken in": (OURS, "into the mailbox and out"),
    "started": (OURS, "chosen"),
    "works": (MODEL, "begun, up to the device"),
}
SHARED = {**_BEFORE, "written": (OURS, "copied to the receiver's memory, its thread notified"), **_AFTER}
RPC = {
    **_BEFORE,
    "gathered": (OURS, "decided to send now, by this thread or another"),
    "sent": (OURS, "serialised and handed to TensorPipe"),
    "received": (WAKING, "two network threads, the receiver's RPC thread"),
    "delivered": (OURS, "read"),
    **_AFTER,
}
#: a receiver that woke up so late was busy, ns
_BUSY_NS = 400_000


def _replace(place: Any, name: str, function: Callable[..., Any]) -> None:
    """Put `function` in the place of one of that name, of a class or a module."""
    setattr(place, name, function)


class Observed(Ours):
    """rpc-pipe that notes when what happens to each payload."""

    def __init__(self, job: Job, rank: int) -> None:
        self._events: list[tuple[str, str, int]] = []
        self._sending = threading.local()
        self._running = ""
        self._observe()
        super().__init__(job, rank)

    def _note(self, event: str, key: object) -> None:
        self._events.append((event, str(key), time.perf_counter_ns()))

    def _starts(self, stream: Stream, step: Step, entry: Entry) -> str:
        self._running = str((step.run, str(entry.action)))
        return ""

    def _observe(self) -> None:
        """Wrap the places where something happens."""
        self._observe_compute()
        self._observe_shared_memory()
        self._observe_messages()

    def _observe_compute(self) -> None:
        def before(cls: type, name: str, event: str, key: Callable[..., object]) -> None:
            original = getattr(cls, name)

            def noted(*args: Any, **kwargs: Any) -> Any:
                self._note(event, key(*args, **kwargs))
                return original(*args, **kwargs)

            _replace(cls, name, noted)

        before(Stream, "_finish", "computed", lambda stream, step, action, payload: (step.run, str(action)))
        before(Messages, "answer", "published", lambda _, peer, key, answer: key)
        before(Carrier, "arrive", "delivered", lambda _, peer, key, *__: key)
        before(Stream, "_take_in", "taken in", lambda stream, arrival: arrival.key)
        before(Stream, "_execute", "started", self._starts)
        work = devices.work

        def noted_work(seconds: float, *, queued: bool = False) -> None:
            if seconds:
                self._note("works", "")
                work(seconds, queued=queued)
                self._note("worked", self._running)

        _replace(devices, "work", noted_work)

    def _observe_shared_memory(self) -> None:
        write, wait = Channels.write, Wakeup.wait

        def noted_write(channels: Channels, peer: int, key: Any, answer: Any) -> Any:
            done = write(channels, peer, key, answer)
            if done:
                self._note("written", key)
            return done

        def noted_wait(wakeup: Wakeup, timeout_s: float) -> bool:
            notified = wait(wakeup, timeout_s)
            self._note("woke", "")
            return notified

        _replace(Channels, "write", noted_write)
        _replace(Wakeup, "wait", noted_wait)

    def _observe_messages(self) -> None:
        gathered, send, decode = PeerQueue.gathered, Messages._send, message.decode

        def noted_gathered(talk: PeerQueue) -> Any:
            found = gathered(talk)
            keys = [key for key, _ in found.answers] if found else []
            self._sending.keys = keys
            for key in keys:
                self._note("gathered", key)
            return found

        def noted_send(messages: Messages, peer: int) -> None:
            send(messages, peer)
            for key in self._sending.keys:
                self._note("sent", key)

        def noted_decode(*parts: Any) -> Any:
            now = time.perf_counter_ns()
            found = decode(*parts)
            self._events += [("received", str(key), now) for key, _ in found.answers]
            return found

        _replace(PeerQueue, "gathered", noted_gathered)
        _replace(Messages, "_send", noted_send)
        _replace(rpc, "decode", noted_decode)

    def close(self) -> None:
        (Path(os.environ["BENCH_HOPS"]) / f"{self.rank}.events").write_text(json.dumps(self._events))
        super().close()


def hops(folder: Path, workers: int, way: dict[str, tuple[str, str]]) -> dict[str, dict[str, int]]:
    """Return of each payload that went this way when what happened to it, ns, if its receiver waited for it."""
    found: dict[str, dict[str, int]] = defaultdict(dict)
    for rank in range(workers):
        last, woke = "", 0
        for event, key, ns in json.loads((folder / f"{rank}.events").read_text()):
            if event == "woke":
                woke = ns
            elif event in ("started", "works"):
                if last:
                    found[last].setdefault(event, ns)
                last = last if event == "started" else ""
            else:
                found[key].setdefault(event, ns)
                if event == "taken in":
                    last = key
                    found[key].setdefault("woke", woke)
    before = list(way)[list(way).index("woke") - 1]
    return {
        key: times
        for key, times in found.items()
        if set(times) >= set(way) and 0 < times["woke"] - times[before] < _BUSY_NS and times["works"] > times["started"]
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="where the time of a hop goes")
    parser.add_argument("--workers", type=int, default=8, help="(8)")
    parser.add_argument("--ms", type=float, default=2, help="t_F; t_B is twice that (2)")
    parser.add_argument("--rpc", action="store_true", help="by RPC, as between hosts")
    options = parser.parse_args()
    if options.rpc:
        os.environ["RPC_PIPE_SHARED_MEMORY"] = "off"
    way = RPC if options.rpc or not POSSIBLE else SHARED
    SYSTEMS["observed"] = Observed
    times = {"F": options.ms, "B": 2 * options.ms}
    contest = emulated(options.workers, 2 * options.workers, times, 12, [("observed", "1f1b")], scenario="hops")
    with tempfile.TemporaryDirectory() as name:
        os.environ["BENCH_HOPS"] = name
        group.run(contest.jobs, Path(name), range(options.workers))
        for failure in (each.failure for each in group.outcomes(contest.jobs[0], 0, Path(name)) if each.failure):
            sys.exit(f"hops: a worker failed: {failure}")
        found = hops(Path(name), options.workers, way)
    for kind, name in (("F", "forward"), ("B", "backward")):
        _show(name, [times for key, times in found.items() if kind in key], way)


def _show(name: str, found: list[dict[str, int]], way: dict[str, tuple[str, str]]) -> None:
    print(f"{name}: {len(found)} hops, median us")
    total: dict[str, float] = defaultdict(float)
    for a, b in pairwise(way):
        whose, what = way[b]
        median = statistics.median((times[b] - times[a]) / 1e3 for times in found)
        total[whose] += median
        print(f"{median:8.0f}  {whose}: {what}")
    print(f"{sum(total.values()):8.0f}  " + ", ".join(f"{whose} {us:.0f}" for whose, us in total.items()))


if __name__ == "__main__":
    main()
