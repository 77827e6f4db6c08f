"""Authentication of peers over a network: each proves that it knows the job's secret (CurveZMQ, ZeroMQ RFC 26).

The secret and the job's name give the key pairs of all its workers. So no key travels, and a connection to a worker
reaches that worker alone: a forged address leads to a peer that cannot prove its identity.
"""

import hashlib
import threading
from collections.abc import Iterable
from functools import partial

import zmq
from zmq.utils import z85

#: milliseconds until a peer without a proof of identity is disconnected
HANDSHAKE_MS = 10_000
_DOMAIN = b"rpc-pipe"
_ZAP_VERSION = b"1.0"


class Keys:
    """The key pairs of a job's workers.

    Args:
        secret: of the job.
        job: distinguishes jobs with the same secret.
    """

    def __init__(self, secret: bytes, job: str, workers: Iterable[int]) -> None:
        digest = hashlib.blake2b(secret, digest_size=32, person=b"rpc-pipe job").digest()
        hashed_by = partial(hashlib.blake2b, key=digest, digest_size=32, person=b"rpc-pipe worker")
        hashed = {worker: hashed_by(f"{job}\0{worker}".encode()).digest() for worker in workers}
        self._secrets = {worker: z85.encode(found) for worker, found in hashed.items()}
        self._public = {worker: zmq.curve_public(found) for worker, found in self._secrets.items()}
        self._known = {z85.decode(public) for public in self._public.values()}

    def listen(self, socket: zmq.Socket[bytes], worker: int) -> None:
        """Let only workers of the job connect to a socket of `worker`."""
        socket.curve_server = True
        socket.curve_secretkey = self._secrets[worker]
        socket.setsockopt(zmq.ZAP_DOMAIN, _DOMAIN)
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)

    def prove(self, socket: zmq.Socket[bytes], worker: int, peer: int) -> None:
        """Let a socket of `worker` connect to `peer`, and to no other process."""
        socket.curve_publickey = self._public[worker]
        socket.curve_secretkey = self._secrets[worker]
        socket.curve_serverkey = self._public[peer]

    def is_known(self, key: bytes) -> bool:
        """Return whether a public key belongs to a worker of the job."""
        return key in self._known


class KeyServer(threading.Thread):
    """Answers libzmq whether a peer may connect (ZAP, ZeroMQ RFC 27); it asks when the handshake has proved the key.

    Args:
        context: of the sockets that ask.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], keys: Keys) -> None:
        super().__init__(name="doorkeeper", daemon=True)
        self._keys = keys
        self._socket = context.socket(zmq.REP)
        self._socket.linger = 0
        self._socket.bind("inproc://zeromq.zap.01")
        self.start()

    def run(self) -> None:
        while True:
            try:
                version, request, domain, _, _, mechanism, *credentials = self._socket.recv_multipart()
                said = version, domain, mechanism, len(credentials)
                known = said == (_ZAP_VERSION, _DOMAIN, b"CURVE", 1) and self._keys.is_known(credentials[0])
                status = (b"200", b"OK") if known else (b"400", b"no worker of this job")
                self._socket.send_multipart([_ZAP_VERSION, request, *status, b"", b""])
            except zmq.ContextTerminated:
                self._socket.close(0)
                return
