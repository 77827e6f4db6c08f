"""Carriers for tests: processes are threads here, and what they say to each other is bytes on the way."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial

from rpc_pipe.workers.transport.remote import RemoteCarrier


class Loopback(RemoteCarrier):
    """A remote carrier whose peers are in this process; like RPC it handles requests in two threads a worker."""

    def __init__(self, worker, num_workers, group, **options):
        super().__init__(worker, num_workers, **options)
        self.group = group
        group[worker] = self
        self.handlers = ThreadPoolExecutor(2, f"handler of worker {worker}")
        self.broken = set()
        self._sender.start()

    def _request(self, peer, what, args, then):
        if peer in self.broken:
            self._failed(peer, "connection reset")
        else:
            self.group[peer].handlers.submit(
                self.group[peer].serve, what, self.worker, partial(self.answer, then), args
            )

    def serve(self, what, peer, reply, args):
        with self.answering_for_errors():
            self.handle(what, peer, reply, *args)

    def answer(self, then, value):
        self.handlers.submit(self.take_reply, then, value)

    def take_reply(self, then, value):
        with self.answering_for_errors():
            then(value)


def loopback_carriers(num_workers, **options):
    group = {}
    return [Loopback(worker, num_workers, group, **options) for worker in range(num_workers)]
