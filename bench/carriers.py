"""A message and its answer between two processes of this host, over every carrier.

    python bench/carriers.py [--rounds 200] [--sizes 256 262144 1048576]

Times are medians, us. Each round trip is two payloads: one each way, pulled ahead of need, as in training.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

if __package__ is None or __package__ == "":
    sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from rpc_pipe.launching.interfaces import make_key
from rpc_pipe.launching.job import Job
from rpc_pipe.launching.meeting_place import join, place_of
from rpc_pipe.workers.transport.call import Call
from rpc_pipe.workers.transport.carrier import Carrier
from rpc_pipe.workers.transport.payload import pack

_WARM_UP, _PATIENCE_S = 20, 30.0


class Way(NamedTuple):
    """What carries a payload."""

    transport: str
    shared_memory: bool = False
    #: over TCP, whose peers prove who they are
    tcp: bool = False


WAYS = {
    "torch RPC": Way("rpc"),
    "torch RPC, shared memory": Way("rpc", True),
    "ZeroMQ, unix sockets": Way("zmq"),
    "ZeroMQ, shared memory": Way("zmq", True),
    "ZeroMQ, TCP with CURVE": Way("zmq", tcp=True),
}


def _be(worker: int, way: Way, folder: str, sizes: list[int], rounds: int, results: Any) -> None:
    """The life of one of the two."""
    torch.set_num_threads(1)
    init, key = f"file://{folder}/rendezvous", Path(folder, "key")
    port = 23000 + os.getppid() % 4000 if way.tcp else 0
    job = Job(worker, 2, init, "lo", 60, way.shared_memory, way.transport, port=port, key_file=key)
    carrier = join(place_of(job))
    for size in sizes:
        found = _round_trips(carrier, size, rounds)
        if worker == 0:
            results.put((size, found))
    carrier.close()
    os._exit(0)


def _round_trips(carrier: Carrier, size: int, rounds: int) -> float:
    me, peer = carrier.worker, 1 - carrier.worker
    run = carrier.begin(Call(me, f"size {size}"))
    carrier.pull(peer, run, [f"{peer}F{m}" for m in range(rounds)])
    tensor, times = torch.zeros(size, dtype=torch.uint8), []
    for m in range(rounds):
        begin = time.perf_counter()
        if me == 0:
            carrier.outbox.offer((run, f"0F{m}"), pack(tensor), [1])
        _await(lambda: bool(carrier.poll((run,))), carrier)
        if me == 1:
            carrier.outbox.offer((run, f"1F{m}"), pack(tensor), [0])
        times.append(time.perf_counter() - begin)
    carrier.end(run)
    carrier.wait_taken(None, _PATIENCE_S)
    return 1e6 * statistics.median(times[_WARM_UP:])


def _await(there: Callable[[], bool], carrier: Carrier) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while not there():
        if not carrier.wait(_PATIENCE_S) or time.monotonic() > deadline:
            raise TimeoutError("no answer")


def measure(way: Way, sizes: list[int], rounds: int) -> dict[int, float]:
    """Return the median of a round trip by size, us."""
    start = multiprocessing.get_context("spawn")
    results = start.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        make_key(Path(folder, "key"))
        both = [start.Process(target=_be, args=(w, way, folder, sizes, rounds, results)) for w in (0, 1)]
        for process in both:
            process.start()
        for process in both:
            process.join(2 * _PATIENCE_S)
            process.kill()
    return dict(results.get() for _ in sizes)


def main() -> None:
    parser = argparse.ArgumentParser(description="round trips over every carrier")
    parser.add_argument("--rounds", type=int, default=200, help="(200)")
    parser.add_argument("--sizes", type=int, nargs="+", default=[256, 2**18, 2**20], metavar="BYTES")
    options = parser.parse_args()
    print(f"{'':28}" + "".join(f"{size:>12} B" for size in options.sizes))
    for name, way in WAYS.items():
        found = measure(way, options.sizes, options.rounds)
        print(f"{name:28}" + "".join(f"{found[size]:>11.0f} us" for size in options.sizes), flush=True)


if __name__ == "__main__":
    main()
