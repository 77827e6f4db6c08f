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
from pathlib import Path

from torch.distributed import HashStore

from rpc_pipe.workers.transport.carrier import Carrier
from rpc_pipe.workers.transport.meeting import Meeting
from rpc_pipe.workers.transport.message import decode, encode
from rpc_pipe.workers.transport.messages import Messages
from rpc_pipe.workers.transport.shared_memory import Channels
from rpc_pipe.workers.transport.wakeup import Wakeup


class Loopback:
    """A link to peers in this process; like RPC it hears in two threads a worker."""

    sends_cheaply = False
    look = None

    def __init__(self, worker, group):
        self.worker, self.group, self.wakeup = worker, group, Wakeup()
        group[worker] = self
        self.threads = ThreadPoolExecutor(2, f"hears for worker {worker}")
        self.cut_off = set()

    def open(self, ears):
        self.ears = ears

    def send(self, peer, message):
        if peer in self.cut_off:
            self.ears.on_lost(peer, "connection reset")
        else:
            self.group[peer].threads.submit(self.group[peer].hear, self.worker, *encode(message))

    def hear(self, peer, data, tensors):
        with self.ears.guard:
            beside = iter(tensors)
            self.ears.on_message(peer, decode(data, lambda _: next(beside)))

    def wait(self, timeout_s):
        return self.wakeup.wait(timeout_s)

    def close(self):
        """Its threads end with the process."""

    def end_threads(self):
        """End the threads, without a word to the others."""
        self.threads.shutdown()


def loopback_carriers(num_workers, *, shared_memory=True):
    group = {}
    return [joined(worker, num_workers, Loopback(worker, group), shared_memory) for worker in range(num_workers)]


def joined(worker, num_workers, link, shared_memory):
    return Carrier(worker, range(num_workers), Messages(link, Channels(worker, link.wakeup) if shared_memory else None))


def zmq_carriers(
    num_workers, *, tcp=False, shared_memory=False, secrets=None, through=str, host="127.0.0.1", **options
):
    """Carriers over ZeroMQ: unix sockets, or TCP with CURVE where `tcp`; `through`: changes the addresses."""
    from rpc_pipe.workers.transport.keys import Keys
    from rpc_pipe.workers.transport.zeromq import Network, ZmqLink

    folder = Path(tempfile.mkdtemp(prefix="rpc-pipe-test-"))

    class Through(Meeting):
        def leave(self, name, word):
            place, address = word.split("\n")
            super().leave(name, f"{place}\n{through(address)}")

    meeting = Through(HashStore())

    def make(worker):
        network = None
        if tcp:
            secret = secrets[worker] if secrets else b"of the job" * 4
            keys = Keys(secret, "test", range(num_workers))
            network = Network(keys, host, 0, meeting, options.get("lost_after_s", 20))
        where = None if tcp else folder
        timeout_s = options.get("join_timeout_s", 20)
        link = ZmqLink(worker, range(num_workers), where, network, timeout_s)
        return joined(worker, num_workers, link, shared_memory)

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

    def pause(self, seconds):
        """Carry nothing for a while."""
        self.stopped = True
        threading.Timer(seconds, setattr, (self, "stopped", False)).start()

    def close(self):
        self.stopped = False
        self.listener.close()
        self.cut()
