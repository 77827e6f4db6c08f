"""A run in the browser, and for Prometheus: read-only, for this machine alone by default.

Needs the extra `.[dispatch]`. Requests must name a served address in Host (against DNS rebinding, as in
CVE-2025-62593), and an Origin, if there is one, must be this page. On any other address than loopback requests also
need the token that is printed at the start.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import json
import logging
import math
import re
import secrets
import socket
from collections.abc import Awaitable, Callable, Iterator, Mapping
from importlib.resources import files
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from prometheus_client import CollectorRegistry, Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.openmetrics.exposition import CONTENT_TYPE_LATEST, generate_latest

from ..dependency import ConfigError
from ..drawing.page import encode, with_parts
from ..tracing.view import View
from .recording import Source
from .rows import STATES, describe, draw_steps, finite, link_rows, mean_bubble, worker_rows

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

    def __init__(self, view: View, source: Source, option: str, host: str, port: int, *, page: bool) -> None:
        self._view = view
        self._source = source
        self._option = option
        self._host, self._port, self._page = host, port, page
        self._token = "" if _is_loopback(host) else secrets.token_urlsafe(24)
        self._cookie = ""
        self._runner: web.AppRunner | None = None
        self._listener: asyncio.Server | None = None
        self._pictures: dict[int, tuple[str, dict[str, object]]] = {}

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
        if port != str(self._port):
            return False
        name = name.removeprefix("[").removesuffix("]")
        if _is_loopback(self._host):
            return _is_loopback(name)
        # Beyond loopback the token guards; a foreign name is still refused.
        return name in (self._host, "localhost", socket.gethostname()) or _is_address(name)

    def _has_token(self, request: web.Request) -> bool:
        bearer = request.headers.get("Authorization", "").removeprefix("Bearer ")
        given = (request.query.get("token", ""), request.cookies.get(self._cookie, ""), bearer)
        sent = [token.encode(errors="surrogateescape") for token in given]
        return any([hmac.compare_digest(token, self._token.encode()) for token in sent])

    # --- responses

    async def _index(self, request: web.Request) -> web.Response:
        nonce = secrets.token_urlsafe(16)
        page = files(__package__).joinpath("live.html").read_text(encoding="utf-8")
        # style-src allows the styles that the script sets on elements; scripts run only with this page's nonce.
        policy = (
            f"default-src 'none'; script-src 'nonce-{nonce}'; style-src 'unsafe-inline'; connect-src 'self'; "
            "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        )
        text = with_parts(page).replace("@NONCE@", nonce)
        return web.Response(text=text, content_type="text/html", headers={"Content-Security-Policy": policy})

    async def _metrics(self, request: web.Request) -> web.Response:
        registry = CollectorRegistry()
        registry.register(_Collector(self._view))
        return web.Response(body=generate_latest(registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def _state(self, request: web.Request) -> web.Response:
        try:
            steps, after = int(request.query.get("steps", "1")), int(request.query.get("after", "-1"))
        except ValueError:
            raise web.HTTPBadRequest(text="steps and after must be whole numbers\n") from None
        view = self._view
        state = describe(view)
        state |= {
            "name": self._source.name,
            "over": self._source.over,
            "losses": [(step, finite(loss)) for step, loss in view.losses if step > after],
            "fresh": bool(view.losses) and view.losses[-1][0] < after,
        }
        version = f"{state['step']}/{steps}/{len(view.headers)}"
        if version != request.query.get("have"):
            state |= {"version": version, "pictures": self._drawn(version, min(max(1, steps), 10))}
        return web.Response(text=json.dumps(state, separators=(",", ":")), content_type="application/json")

    def _drawn(self, version: str, count: int) -> dict[str, object]:
        """Return the pictures of `count` steps, which are drawn once for all viewers."""
        if self._pictures.get(count, ("", {}))[0] != version:
            self._pictures[count] = version, encode(draw_steps(self._view, count))
        return self._pictures[count][1]


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _is_loopback(host: str) -> bool:
    return host == "localhost" or (_is_address(host) and ipaddress.ip_address(host).is_loopback)


class _Collector:
    def __init__(self, view: View) -> None:
        self._view = view

    def collect(self) -> Iterator[Metric]:
        view, steps, step_ms = self._view, self._view.complete_steps(1), self._view.step_ms()
        if steps:
            yield CounterMetricFamily("rpc_pipe_steps", "Steps that all workers have finished.", steps[0])
        held_out = view.held_out_losses
        rows, links, lost, rate = worker_rows(view), link_rows(view), view.lost(), view.throughput()
        at = [(row.worker,) for row in rows]
        whole = [
            ("workers", "Workers that can be seen.", "", len(view.headers)),
            ("loss", "Loss of the last step.", "", view.losses[-1][1] if view.losses else None),
            ("held_out_loss", "Loss of the last evaluation.", "", held_out[-1][1] if held_out else None),
            ("learning_rate", "Learning rate of the next update.", "", view.learning_rate),
            ("gradient_norm", "Norm of all gradients before clipping.", "", view.grad_norm),
            ("step_seconds", "Median time of the recent steps.", "seconds", step_ms and step_ms / 1e3),
            ("bubble_ratio", "Share of the workers' time without computing.", "ratio", mean_bubble(rows)),
            ("stalled", "1 if nothing finishes.", "", int(view.stalled)),
            *([(f"{rate[1]}_per_second", "Throughput of the recent steps.", "", rate[0])] if rate else []),
        ]
        for name, text, unit, value in whole:
            yield _gauges(name, text, [], {} if value is None else {(): value}, unit)
        if lost:
            causes = {(cause,): ms / 1e3 for cause, ms in {"work": lost.limit_ms, **lost.parts}.items()}
            yield _gauges("lost_seconds", "Time of a step by cause.", ["cause"], causes, "seconds")
        for name, text, unit, values in (
            ("bubble_ratio", "Share of time without computing.", "ratio", [row.bubble for row in rows]),
            ("action_seconds", "Mean time of an action.", "seconds", [row.action_ms / 1e3 for row in rows]),
            ("memory_peak_bytes", "Most memory held.", "bytes", [row.peak_mb * 1e6 for row in rows]),
            ("outbox_payloads", "Payloads not taken yet.", "", [row.outbox for row in rows]),
        ):
            yield _gauges(f"worker_{name}", text, ["worker"], dict(zip(at, values, strict=True)), unit)
        states = {(row.worker, state): int(row.state == state) for row in rows for state in STATES}
        yield _gauges("worker_state", "1 for the state it is in.", ["worker", "state"], states)
        ends = ["source", "target"]
        latency = {(link.source, link.target): link.ms / 1e3 for link in links}
        yield _gauges("link_latency_seconds", "Median way of a payload.", ends, latency, "seconds")
        way = {(link.source, link.target): link.mb_per_s * 1e6 for link in links}
        yield _gauges("link_bytes_per_second", "Payload bytes a second.", ends, way)


def _gauges(name: str, text: str, labels: list[str], values: Mapping[Any, float], unit: str = "") -> Metric:
    """Return a value for each tuple of labels; unknown values of a worker are omitted."""
    family = GaugeMetricFamily(f"rpc_pipe_{name}", text, labels=labels, unit=unit)
    for said, value in values.items():
        if not labels or not math.isnan(value):
            family.add_metric(list(map(str, said)), value)
    return family
