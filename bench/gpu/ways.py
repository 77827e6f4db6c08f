"""Ways of a payload between two processes, each by itself, beside the bare copies:  ways.py DEVICE MIB,MIB..

The consumer asks, the producer answers where a new payload lies, and the consumer copies it to memory of its own. A way
that fails tells its traceback and the next one is tried; a way that CUDA alone has is said to be "not on this device".
"""

from __future__ import annotations

import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from functools import partial
from multiprocessing import shared_memory
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor
from torch.distributed import rpc

from bench.gpu.runner import NOT_HERE

PLANTED = os.environ.get("GPU_PLANTED", "")
_TIMES = 12


def _sync(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize()


def _fill(tensor: Tensor, number: int) -> Tensor:
    return tensor.fill_(number % 100 + 0.5)


class Producer:
    """The other process: each method answers one request of the consumer."""

    def __init__(self, device: torch.device, largest: int) -> None:
        self.device = device
        self.source = torch.empty(largest, device=device)
        self.kept: list[Any] = []

    def share_block(self) -> Any:
        """Return the handles of a block of memory and of an event."""
        self.block, self.event = torch.empty_like(self.source), torch.cuda.Event(interprocess=True)
        self.event.record()
        _sync(self.device)
        return self.block.untyped_storage()._share_cuda_(), self.event.ipc_handle()

    def into_block(self, n: int, number: int) -> None:
        """Copy a new payload into the block, and let the event say when it is there."""
        self.block[:n].copy_(_fill(self.source[:n], number))
        self.event.record()

    def register(self, name: str, size: int) -> None:
        """Map shared memory, and register it with the device."""
        self.kept.append(shared_memory.SharedMemory(name))
        self.host = _mapped(self.kept[-1], size, self.device)

    def into_host(self, n: int, number: int) -> None:
        """Copy a new payload to shared memory, and wait until it is there."""
        self.host[:n].copy_(_fill(self.source[:n], number), non_blocking=True)
        _sync(self.device)


def _use(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.set_device_index(device)


def _mapped(memory: Any, size: int, device: torch.device) -> Tensor:
    tensor = torch.frombuffer(memory.buf, dtype=torch.float32, count=size)
    if device.type == "cuda":
        failed = torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0)
        if int(failed):
            raise OSError(f"cudaHostRegister: {failed}")
    return tensor


_given: Producer | None = None


def _give(n: int, number: int) -> Tensor:
    assert _given is not None
    return _fill(torch.empty(n, device=_given.device), number)


def _give_host(n: int, number: int) -> Tensor:
    return _give(n, number).cpu()


def _join(rank: int, path: str, device: torch.device) -> None:
    options = rpc.TensorPipeRpcBackendOptions(
        init_method=f"file://{path}", num_worker_threads=4, rpc_timeout=60, _transports=["uv"]
    )
    if device.type == "cuda":
        index = device.index or 0
        options.set_device_map(f"w{1 - rank}", {index: index})
    rpc.init_rpc(f"w{rank}", rank=rank, world_size=2, rpc_backend_options=options)


def _producer(pipe: Connection, device: torch.device, largest: int, path: str) -> None:
    global _given
    _use(device)
    _given = producer = Producer(device, largest)
    while (asked := pipe.recv()) is not None:
        name, args = asked
        try:
            call = partial(_join, 1, path, device) if name == "join" else getattr(producer, name)
            pipe.send((True, call(*args)))
        except Exception:
            pipe.send((False, traceback.format_exc()))


class Consumer:
    """This process: has every way tried and timed."""

    def __init__(self, device: torch.device, sizes: list[int]) -> None:
        self.device, self.sizes, self.path = device, sizes, tempfile.mktemp()
        self.out = torch.empty(max(sizes), device=device)
        self.pipe, there = multiprocessing.Pipe()
        context = multiprocessing.get_context("spawn")
        args = (there, device, max(sizes), self.path)
        self.process = context.Process(target=_producer, args=args, daemon=True)
        self.process.start()
        self.found: dict[str, Any] = {}

    def ask(self, name: str, *args: Any) -> Any:
        """Return the producer's answer."""
        self.pipe.send((name, args))
        good, answer = self.pipe.recv()
        if not good:
            raise RuntimeError(answer)
        return answer

    def bare(self) -> None:
        """Measure copies inside this process."""
        a = torch.ones(max(self.sizes), device=self.device)
        host = torch.ones(max(self.sizes), pin_memory=self.device.type != "cpu")
        self.measure("copy on the device", lambda n, _: self.out[:n].copy_(a[:n]), check=False)
        if self.device.type != "cpu":
            self.measure("pinned copy down", lambda n, _: host[:n].copy_(a[:n], non_blocking=True), check=False)
            self.measure("pinned copy up", lambda n, _: self.out[:n].copy_(host[:n], non_blocking=True), check=False)

    def handles(self) -> None:
        """Copy from a block of the producer that was opened once by its handle; an event says when it is there."""
        if self._lacks("CUDA IPC, pool", on_host=False):
            return
        handle, event = self.ask("share_block")
        storage = torch.UntypedStorage._new_shared_cuda(*handle)
        block = torch.empty(0, device=self.device).set_(storage, 0, (max(self.sizes),), (1,))
        there = torch.cuda.Event.from_ipc_handle(self.device, event)

        def take(n: int, number: int) -> None:
            self.ask("into_block", n, number)
            torch.cuda.current_stream().wait_event(there)
            self.out[:n].copy_(block[:n])

        self.measure("CUDA IPC, pool", take)

    def registered(self) -> None:
        """Copy through shared memory that both have registered."""
        if self._lacks("registered shared memory"):
            return
        largest = max(self.sizes)
        memory = shared_memory.SharedMemory(create=True, size=4 * largest)
        try:
            host = _mapped(memory, largest, self.device)
            self.ask("register", memory.name, largest)

            def take(n: int, number: int) -> None:
                self.ask("into_host", n, number)
                self.out[:n].copy_(host[:n], non_blocking=True)

            self.measure("registered shared memory", take)
        finally:
            memory.unlink()

    def device_map(self) -> None:
        """Fetch by calls of RPC: by the map of devices, 16 at once, and through the host."""
        self.pipe.send(("join", ()))
        _join(0, self.path, self.device)
        good, why = self.pipe.recv()
        if not good:
            raise RuntimeError(why)

        def take(n: int, number: int) -> None:
            self.out[:n] = rpc.rpc_sync("w1", _give, (n, number))

        def take_many(n: int, number: int) -> None:
            futures = [rpc.rpc_async("w1", _give, (n, number)) for _ in range(16)]
            self.out[:n] = [future.wait() for future in futures][-1]

        def take_host(n: int, number: int) -> None:
            self.out[:n] = rpc.rpc_sync("w1", _give_host, (n, number)).to(self.device)

        if not self._lacks("RPC, device map"):
            self.measure("RPC, device map", take)
            self.measure("RPC, device map, 16 at once", take_many, share=16)
        self.measure("RPC through the host", take_host)

    def _lacks(self, name: str, *, on_host: bool = True) -> bool:
        """Note that a way is not on this device, if CUDA alone has it; `on_host`: the host rehearses it."""
        lacks = self.device.type != "cuda" and not (on_host and self.device.type == "cpu")
        if lacks:
            self.found[name] = NOT_HERE
        return lacks

    def measure(self, name: str, take: Callable[[int, int], Any], *, check: bool = True, share: int = 1) -> None:
        """Note the ms of each size."""
        for n in self.sizes:
            times = []
            for number in range(_TIMES):
                _sync(self.device)
                begin = time.perf_counter()
                take(n, number)
                _sync(self.device)
                times.append(1e3 * (time.perf_counter() - begin) / share)
                expected = number % 100 + (1.5 if PLANTED == "wrong" else 0.5)
                if check and not bool((self.out[:n] == expected).all()):
                    raise ValueError(f"{name}: payload {number} of {n} numbers has others")
            self.found.setdefault(name, {})[f"{n >> 18} MiB"] = round(statistics.median(times[2:]), 3)

    def run(self) -> dict[str, Any]:
        """Return the ms of each way, or why it failed."""
        for way in (self.bare, self.handles, self.registered, self.device_map):
            try:
                if PLANTED == "missing":
                    raise OSError("missing, as planted")
                way()
            except Exception as error:
                last = traceback.format_exc()[-1500:]
                self.found[f"{way.__name__}"] = f"failed: {type(error).__name__}: {error}"[:300]
                print(f"--- {way.__name__}\n{last}", flush=True)
        return self.found


def main(device: str, sizes: str) -> None:
    """Print `RESULT {...}`."""
    where = torch.device(device)
    _use(where)
    consumer = Consumer(where, [int(mib) << 18 for mib in sizes.split(",")])
    print("RESULT", json.dumps(consumer.run()), flush=True)
    consumer.process.kill()
    os._exit(0)  # RPC would wait for the other side


if __name__ == "__main__":
    main(*sys.argv[1:])
