"""What strangers send to the pages of a run: requests of all kinds."""

from __future__ import annotations

import gzip
import random
import re
import socket
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress

_ANSWER_S, _MORE_S = 5.0, 0.02
#: of an answer so much is looked at
_MOST_ANSWER = 2**16

Request = Callable[[random.Random, int], bytes]


def _request(line: str, port: int, *headers: str, body: bytes = b"", host: str | None = None) -> bytes:
    lines = [line, f"Host: {f'127.0.0.1:{port}' if host is None else host}", *headers]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


def _garbage(draw: random.Random, port: int) -> bytes:
    return draw.randbytes(draw.randrange(1, 20_000)) + b"\r\n\r\n"


def _tls(draw: random.Random, port: int) -> bytes:
    return b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + draw.randbytes(508)


def _other_protocol(draw: random.Random, port: int) -> bytes:
    return draw.choice([
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"SSH-2.0-x\r\n\r\n", b"GET /\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n",
        b"\xff" + bytes(8) + b"\x7f\x03\x01CURVE", b"GET / HTTP/1.1\r\n : x\r\n\r\n",
    ])  # fmt: skip


def _foreign_host(draw: random.Random, port: int) -> bytes:
    """A name that leads here by somebody else's DNS."""
    hosts = [
        f"evil.example:{port}", f"127.0.0.1.evil.example:{port}", "127.0.0.1", "127.0.0.1:1", "", f"x@127.0.0.1:{port}",
        f"127.0.0.1:{port}@evil.example", f"127.0.0.1:{port}:{port}", "[::1", "\xff:80", f"0177.0.0.1:{port}",
    ]  # fmt: skip
    return _request("GET /state HTTP/1.1", port, host=draw.choice(hosts))


def _without_host(draw: random.Random, port: int) -> bytes:
    return draw.choice([b"GET /state HTTP/1.0\r\n\r\n", b"GET /metrics HTTP/1.1\r\n\r\n"])


def _foreign_origin(draw: random.Random, port: int) -> bytes:
    origins = ["http://evil.example", "null", f"https://127.0.0.1:{port}", f"http://evil.example:{port}", "file://", ""]
    return _request("GET /state HTTP/1.1", port, f"Origin: {draw.choice(origins)}")


def _forged_post(draw: random.Random, port: int) -> bytes:
    """What a form of another page sends, or a program."""
    body = b"steps=1&command=rm"
    method, path = (
        draw.choice(["POST", "PUT", "DELETE", "PATCH", "TRACE", "X" * 50]),
        draw.choice(["", "state", "metrics"]),
    )
    headers = ["Content-Type: application/x-www-form-urlencoded", f"Content-Length: {len(body)}"]
    origin = draw.choice([[], [f"Origin: http://127.0.0.1:{port}"], ["Origin: http://evil.example"]])
    return _request(f"{method} /{path} HTTP/1.1", port, *headers, *origin, body=body)


def _path(draw: random.Random, port: int) -> bytes:
    paths = [
        "/../../../../etc/passwd", "/%2e%2e/%2e%2e/etc/passwd", "//etc/passwd", "/state/../../etc/passwd", "/\\..\\x",
        "/..%2f..%2fetc/passwd", "/etc/passwd%00.html", "/live.html", "/state%00", "file:///etc/passwd",
        "http://evil.example/etc/passwd", "/" + "a" * 9000, "/." * 2000, "*", "/static/../web.py",
    ]  # fmt: skip
    return _request(f"GET {draw.choice(paths)} HTTP/1.1", port)


def _query(draw: random.Random, port: int) -> bytes:
    queries = ["steps=1e99", "steps=" + "9" * 5000, "after=inf", "steps=0x10", "after=%00", "steps=", "after=%ff%fe"]
    return _request(f"GET /state?{draw.choice(queries)} HTTP/1.1", port)


def _large_header(draw: random.Random, port: int) -> bytes:
    return draw.choice([
        _request("GET / HTTP/1.1", port, "X: " + "a" * 2**20),
        _request("GET / HTTP/1.1", port, *(f"X-{number}: y" for number in range(20_000))),
        _request("GET / HTTP/1.1", port, "Cookie: " + "a=b; " * 100_000),
    ])  # fmt: skip


def _large_body(draw: random.Random, port: int) -> bytes:
    bomb = gzip.compress(bytes(2**24))
    return draw.choice([
        _request("POST /state HTTP/1.1", port, f"Content-Length: {2**63}", body=bytes(2**16)),
        _request("POST /state HTTP/1.1", port, f"Content-Length: {2**20}", body=bytes(2**20)),
        _request("POST /state HTTP/1.1", port, "Content-Encoding: gzip", f"Content-Length: {len(bomb)}", body=bomb),
        _request("POST /state HTTP/1.1", port, "Content-Length: -1"),
    ])  # fmt: skip


def _smuggled(draw: random.Random, port: int) -> bytes:
    chunks = "Transfer-Encoding: chunked"
    return draw.choice([
        _request("POST / HTTP/1.1", port, chunks, "Content-Length: 4", body=b"0\r\n\r\nGET /state HTTP/1.1\r\n\r\n"),
        _request("POST / HTTP/1.1", port, chunks, body=b"ffffffffffffffff\r\n" + bytes(1000)),
        _request("POST / HTTP/1.1", port, chunks, body=b"zz\r\n\r\n"),
        _request("GET /state HTTP/1.1", port, f"Host: evil.example:{port}"),
        _request("POST / HTTP/1.1", port, "Content-Length: 1", "Content-Length: 2", body=b"xx"),
        _request("CONNECT evil.example:80 HTTP/1.1", port),
    ])  # fmt: skip


def _upgrade(draw: random.Random, port: int) -> bytes:
    key = "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA=="
    return _request("POST / HTTP/1.1", port, "Upgrade: websocket", "Connection: Upgrade", key, body=bytes(2**18))


def _slow(draw: random.Random, port: int) -> bytes:
    """Stays, having said nothing, or half of what there is to say."""
    return draw.choice([b"", b"G", b"\r\n" * 5000, b"GET / HTTP/1.1\r\nHost: "])


def _deaf(draw: random.Random, port: int) -> bytes:
    """Stays, asks again and again, and reads nothing."""
    return _request("GET / HTTP/1.1", port) * 200


#: none of them may be answered but by an error
REFUSED: list[Request] = [
    _garbage, _tls, _other_protocol, _foreign_host, _without_host, _foreign_origin, _forged_post, _path, _query,
    _large_header, _large_body, _smuggled, _upgrade,
]  # fmt: skip
#: and they are not over when they have asked
STAYING: list[Request] = [_slow, _deaf]


class Attack(threading.Thread):
    """Connections to a page, one after the other; those that stay do so until `leave`."""

    def __init__(self, port: int, connections: int, host: str = "127.0.0.1") -> None:
        super().__init__(daemon=True)
        self._host, self._port, self._connections = host, port, connections
        #: (kind, status, 0: none)
        self.answers: Counter[tuple[str, int]] = Counter()
        #: what should not have been answered so
        self.wrong: list[str] = []
        self._open: list[socket.socket] = []

    def run(self) -> None:
        draw, kinds = random.Random(self._port), REFUSED + STAYING
        for number in range(self._connections):
            kind = kinds[number % len(kinds)]
            data = kind(draw, self._port)
            answer = b""
            with suppress(OSError):
                answer = self._ask(data, stays=kind in STAYING)
            self._note(kind.__name__[1:].replace("_", " "), data, answer)

    def _ask(self, data: bytes, *, stays: bool) -> bytes:
        stranger = socket.create_connection((self._host, self._port), timeout=_ANSWER_S)
        if stays:
            self._open.append(stranger)
            stranger.setblocking(False)
            with suppress(BlockingIOError):
                stranger.send(data)
            return b""
        with stranger:
            # A server that refuses a large request may close while it is still being sent.
            with suppress(ConnectionError):
                stranger.sendall(data)
            answer = b""
            with suppress(TimeoutError, ConnectionError):
                while len(answer) < _MOST_ANSWER and (more := stranger.recv(_MOST_ANSWER)):
                    answer += more
                    stranger.settimeout(_MORE_S)
            return answer

    def _note(self, name: str, data: bytes, answer: bytes) -> None:
        found = re.match(rb"HTTP/1\.[01] ([0-9]{3}) ", answer)
        status = int(found[1]) if found is not None else 0
        self.answers[name, status] += 1
        if (status and not 400 <= status < 500) or b"root:" in answer or b"Traceback" in answer:
            self.wrong.append(f"{name}: {data[:200]!r} was answered by {answer[:200]!r}")

    def leave(self) -> None:
        for stranger in self._open:
            stranger.close()
