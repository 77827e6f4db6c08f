"""Carriers for tests: processes are threads here, and what they say to each other is bytes on the way."""

import shutil
import socket
import struct
import tempfile
import threading
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path

from rpc_pipe.workers.transport.remote import RemoteCarrier


class Loopback(RemoteCarrier):
    """A remote carrier whose peers are in this process; like RPC it handles requests in two threads a worker."""

    def __init__(self, worker, num_workers, group, **options):
        super().__init__(worker, num_workers, **options)
        self.group = group
        group[worker] = self
        self.handlers = ThreadPoolExecutor(2, f"handler of worker {worker}")
        self.cut_off = set()
        self._sender.start()

    def _request(self, peer, what, args, then):
        if peer in self.cut_off:
            self._failed(peer, "connection reset")
        else:
            self.group[peer].handlers.submit(
                self.group[peer].serve, what, self.worker, partial(self.answer, then), args
            )

    def _clock_of(self, peer):
        return time.perf_counter_ns()

    def serve(self, what, peer, reply, args):
        with self.answering_for_errors:
            self.handle(what, peer, reply, *args)

    def end_threads(self):
        """End the threads, without a word to the others."""
        self._to_send.put(None)
        self.handlers.shutdown()

    def answer(self, then, value):
        self.handlers.submit(self.take_reply, then, value)

    def take_reply(self, then, value):
        with self.answering_for_errors:
            then(value)


def loopback_carriers(num_workers, **options):
    group = {}
    return [Loopback(worker, num_workers, group, **options) for worker in range(num_workers)]


def zmq_carriers(
    num_workers, *, tcp=False, shared_memory=False, secrets=None, through=str, host="127.0.0.1", **options
):
    """Carriers over ZeroMQ: unix sockets, or TCP with CURVE where `tcp`; `through`: changes the addresses."""
    from rpc_pipe.workers.transport.keys import Keys
    from rpc_pipe.workers.transport.zeromq import Network, ZmqCarrier

    told, folder = {}, Path(tempfile.mkdtemp(prefix="rpc-pipe-test-"))

    def ask(peer, timeout_s):
        deadline = time.monotonic() + timeout_s
        while peer not in told:
            if time.monotonic() > deadline:
                raise TimeoutError(f"worker {peer} told nothing")
            time.sleep(0.005)
        return told[peer]

    def make(worker):
        network = None
        if tcp:

            def tell(place, address):
                told[worker] = place, through(address)

            secret = secrets[worker] if secrets else b"of the job" * 4
            keys = Keys(secret, "test", num_workers)
            network = Network(keys, host, 0, tell, ask, options.get("lost_after_s", 20))
        where = None if tcp else folder
        timeout_s = options.get("join_timeout_s", 20)
        return ZmqCarrier(worker, num_workers, where, network, timeout_s, shared_memory=shared_memory)

    try:
        with ThreadPoolExecutor(num_workers) as pool:
            return list(pool.map(make, range(num_workers)))
    finally:
        shutil.rmtree(folder)


class Cable:
    """Carries TCP connections to an address, until they are cut, or the cable is."""

    def __init__(self, address):
        host, port = address.removeprefix("tcp://").split(":")
        self.to = host, int(port)
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self.listener.getsockname()[1]}"
        self.ends, self.cuts, self.stopped = deque(), 0, False
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self):
        with suppress(OSError):
            while True:
                near, _ = self.listener.accept()
                if self.stopped:
                    self.ends.append(near)  # as if nobody were there
                    continue
                try:
                    far = socket.create_connection(self.to)
                except OSError:
                    near.close()
                    continue
                self.ends += [near, far]
                for pair in ((near, far), (far, near)):
                    threading.Thread(target=self.carry, args=pair, daemon=True).start()

    def carry(self, source, target):
        with suppress(OSError):
            while data := source.recv(2**16):
                while self.stopped:
                    time.sleep(0.01)
                target.sendall(data)
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def cut(self):
        """Break all connections, with what is under way in them."""
        self.cuts += bool(self.ends)
        while self.ends:
            end = self.ends.popleft()
            with suppress(OSError):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def stop(self):
        """Carry nothing more, silently."""
        self.stopped = True

    def close(self):
        self.stopped = False
        self.listener.close()
        self.cut()
