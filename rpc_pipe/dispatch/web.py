"""A run in the browser, and for Prometheus: read-only, for this machine alone by default.

Needs the extra `.[dispatch]`. Requests must name a served address in Host (against DNS rebinding, as in
CVE-2025-62593), and an Origin, if there is one, must be this page. On any other address than loopback requests also
need the token that is printed at the start.
"""

import asyncio
import hmac
import ipaddress
import json
import logging
import math
import re
import secrets
import socket
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.openmetrics.exposition import CONTENT_TYPE_LATEST, generate_latest

from ..boards.run_boards import RunBoards
from ..boards.view import View
from ..dependency import ConfigError
from ..drawing.svg import fill_page, sections
from ..tracing.lost_time import lost_time
from .rows import STATES, describe, draw_steps, link_rows, whole_state, worker_rows


def metrics_of(view: View) -> bytes:
    """Return the text of all metrics; figures that are not known are left out."""
    registry, state, rows = CollectorRegistry(), describe(view), worker_rows(view)

    def tell(name: str, values: Mapping[Any, float | None], *labels: str) -> None:
        unit = next((unit for unit in ("seconds", "ratio", "bytes") if name.endswith(f"_{unit}")), "")
        gauge = Gauge(f"rpc_pipe_{name}", name.replace("_", " "), labels, unit=unit, registry=registry)
        for said, value in values.items():
            if value is not None and not math.isnan(value):
                (gauge.labels(*said) if labels else gauge).set(value)

    if state["step"] is not None:
        Counter("rpc_pipe_steps", "steps that all workers have finished", registry=registry).inc(state["step"])
    figures = {
        "workers": len(rows), "stalled": state["stalled"], "loss": state["loss"], "gradient_norm": state["grad_norm"],
        "held_out_loss": state["held_out"][-1][1] if state["held_out"] else None, "bubble_ratio": state["bubble"],
        "learning_rate": state["learning_rate"], "step_seconds": state["step_ms"] and state["step_ms"] / 1e3,
        f"{state['unit'] or 'rows'}_per_second": state["rate"],
    }  # fmt: skip
    for name, value in figures.items():
        tell(name, {"": value})
    if lost := lost_time(view):
        causes = {"work": lost.limit_ms, **lost.parts}
        tell("lost_seconds", {(cause,): ms / 1e3 for cause, ms in causes.items()}, "cause")
    tell("worker_bubble_ratio", {(row.worker,): row.bubble for row in rows}, "worker")
    tell("worker_action_seconds", {(row.worker,): row.action_ms / 1e3 for row in rows}, "worker")
    tell("worker_memory_peak_bytes", {(row.worker,): row.peak_mb * 1e6 for row in rows}, "worker")
    tell("worker_outbox_payloads", {(row.worker,): row.outbox for row in rows}, "worker")
    tell("worker_state", {(row.worker, s): row.state == s for row in rows for s in STATES}, "worker", "state")
    links, ends = [((link.source, link.target), link) for link in link_rows(view)], ("source", "target")
    tell("link_latency_seconds", {at: link.ms / 1e3 for at, link in links}, *ends)
    tell("link_bytes_per_second", {at: link.mb_per_s * 1e6 for at, link in links}, *ends)
    return bytes(generate_latest(registry))


#: beyond this number the eldest is closed, so idle connections cannot lock users out
_MOST_CONNECTIONS = 64
_IDLE_S = 60.0
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


_logger = logging.getLogger(__name__)
# A request that is no HTTP is answered by 400; its traceback, with all of its bytes, does not belong on a terminal.
_logger.addFilter(lambda record: not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError)))


def parse_address(option: str, text: str) -> tuple[str, int]:
    """Read `PORT`, `HOST:PORT` or `[IPv6]:PORT`; without a host it is loopback, port 0 is any that is free.

    Raises:
        ConfigError: it is none of them.
    """
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]") or "127.0.0.1"
    if not re.fullmatch("[0-9]{1,5}", port) or int(port) > 65535:
        raise ConfigError(f"{option} {text}: must be PORT or HOST:PORT, such as 8800 or 0.0.0.0:8800")
    return host, int(port)


class Server:
    """Serves a view at one address.

    Args:
        option: as the user typed it, for errors.
        page: whether the page is served, besides the metrics.
    """

    def __init__(self, view: View, source: RunBoards, option: str, host: str, port: int, *, page: bool) -> None:
        self._view, self._source, self._option = view, source, option
        self._host, self._port, self._page = host, port, page
        self._token = "" if _is_loopback(host) else secrets.token_urlsafe(24)
        self._cookie = ""
        self._runner: web.AppRunner | None = None
        self._listener: asyncio.Server | None = None
        self._pictures: dict[int, tuple[str, str]] = {}

    async def start(self) -> str:
        """Begin to serve; return the address to open.

        Raises:
            ConfigError: the address cannot be had.
        """
        app = web.Application(middlewares=[self._guard])
        app.router.add_get("/metrics", self._metrics)
        if self._page:
            app.router.add_get("/", self._index)
            app.router.add_get("/state", self._state)
        self._runner = web.AppRunner(
            app, access_log=None, handle_signals=False, shutdown_timeout=1.0, logger=_logger,
            keepalive_timeout=_IDLE_S, lingering_time=0, auto_decompress=False,
        )  # fmt: skip
        await self._runner.setup()
        try:
            self._listener = await asyncio.get_running_loop().create_server(self._admit, self._host, self._port)
        except OSError as error:
            at = f"{self._option} {self._host}:{self._port}"
            raise ConfigError(f"{at}: {error.strerror or error}; port 0 takes any that is free") from error
        self._port = self._listener.sockets[0].getsockname()[1]
        self._cookie = f"rpc-pipe-token-{self._port}"  # cookies do not know ports
        shown = f"[{self._host}]" if ":" in self._host else self._host
        token = f"?token={self._token}" if self._token else ""
        return f"http://{shown}:{self._port}/{'' if self._page else 'metrics'}{token}"

    async def stop(self) -> None:
        """Stop serving at once, even with open connections."""
        if self._listener is not None:
            self._listener.close()
        if self._runner is not None:
            await self._runner.cleanup()

    # --- access

    def _admit(self) -> asyncio.Protocol:
        """Return the protocol object of one more connection."""
        assert self._runner is not None and self._runner.server is not None
        for eldest in self._runner.server.connections[: 1 - _MOST_CONNECTIONS]:
            if eldest.transport is not None:
                eldest.transport.abort()
        return self._runner.server()

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if not self._knows(request.headers.get("Host", "")):
            raise web.HTTPForbidden(text=f"this page is served for {self._host}:{self._port} only\n")
        origin = request.headers.get("Origin")
        if origin is not None and not (origin.startswith("http://") and self._knows(origin[7:])):
            raise web.HTTPForbidden(text="requests from other pages are refused\n")
        if self._token and not self._has_token(request):
            raise web.HTTPUnauthorized(text="add ?token=... as rpc-pipe watch has printed it\n")
        response = await handler(request)
        if self._token and "token" in request.query:
            response.set_cookie(self._cookie, self._token, httponly=True, samesite="Strict")
        response.headers["X-Content-Type-Options"] = "nosniff"
        response.headers["Cache-Control"] = "no-store"
        response.headers["Referrer-Policy"] = "no-referrer"
        return response

    def _knows(self, host: str) -> bool:
        name, _, port = host.rpartition(":") if not host.endswith("]") and ":" in host else (host, "", "80")
        name = name.removeprefix("[").removesuffix("]")
        # Beyond loopback the token guards; a foreign name is still refused.
        here = name in (self._host, "localhost", socket.gethostname()) or _is_address(name)
        return port == str(self._port) and (_is_loopback(name) if _is_loopback(self._host) else here)

    def _has_token(self, request: web.Request) -> bool:
        bearer = request.headers.get("Authorization", "").removeprefix("Bearer ")
        given = (request.query.get("token", ""), request.cookies.get(self._cookie, ""), bearer)
        sent = [token.encode(errors="surrogateescape") for token in given]
        return any([hmac.compare_digest(token, self._token.encode()) for token in sent])

    # --- responses

    async def _index(self, request: web.Request) -> web.Response:
        nonce = secrets.token_urlsafe(16)
        # style-src allows the styles that the script sets on elements; scripts run only with this page's nonce.
        policy = (
            f"default-src 'none'; script-src 'nonce-{nonce}'; style-src 'unsafe-inline'; connect-src 'self'; "
            "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        )
        text = fill_page(TITLE="rpc-pipe watch", NONCE=nonce)
        return web.Response(text=text, content_type="text/html", headers={"Content-Security-Policy": policy})

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(body=metrics_of(self._view), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def _state(self, request: web.Request) -> web.Response:
        try:
            steps, after = int(request.query.get("steps", "1")), int(request.query.get("after", "-1"))
        except ValueError:
            raise web.HTTPBadRequest(text="steps and after must be whole numbers\n") from None
        view = self._view
        state = whole_state(view, self._source.name, self._source.over, after)
        version = f"{state['step']}/{steps}/{len(view.headers)}"
        if version != request.query.get("have"):
            state |= {"version": version, "pictures": self._drawn(version, min(max(1, steps), 10))}
        return web.Response(text=json.dumps(state, separators=(",", ":")), content_type="application/json")

    def _drawn(self, version: str, count: int) -> str:
        """Return the pictures of `count` steps, which are drawn once for all viewers."""
        if self._pictures.get(count, ("", ""))[0] != version:
            self._pictures[count] = version, sections(draw_steps(self._view, count))
        return self._pictures[count][1]


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _is_loopback(host: str) -> bool:
    return host == "localhost" or (_is_address(host) and ipaddress.ip_address(host).is_loopback)
