"""`rpc-pipe watch`: show a run, live or recorded, until it ends or the user quits."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
from pathlib import Path
from typing import Any

from ..dependency import ConfigError
from ..dispatch.recording import Replay, Source
from ..dispatch.watcher import Watcher, Wishes
from ..system.files import DAMAGED
from ..tracing.boards import RunBoards, find
from .options import Parser, filled, refuse_typed
from .output_files import try_files
from .readers import positive

#: option that replaces the display -> options that have no effect with it
_ALONE = {"trace": ("once", "web", "metrics", "record", "tensorboard"), "once": ("web", "metrics")}

_AT = "PORT or HOST:PORT"


def add(commands: Any) -> None:
    """Add `watch` to the command line."""
    parser: Parser = commands.add_parser("watch", help="watch a running job undisturbed, or replay a recording")
    parser.add_argument("address", nargs="?", help="script, name or folder of one of several runs, or a recording")
    parser.add_argument("--web", nargs="?", const="8800", metavar="PORT", help=f"show it in a browser: {_AT}")
    parser.add_argument("--metrics", metavar="PORT", help=f"serve OpenMetrics for Prometheus: {_AT}")
    parser.add_argument("--record", metavar="FILE", help="write every step to this file of JSON lines")
    parser.add_argument("--tensorboard", metavar="FOLDER", help="write scalars for TensorBoard")
    parser.add_argument("--trace", metavar="FILE", help="write --steps for Chrome's tracing or Perfetto, then end")
    parser.add_argument("--steps", metavar="A-B", help="the steps for --trace (those available now)")
    parser.add_argument("--speed", type=positive, help="replay a recording so many times as fast as it ran (1)")
    parser.add_argument("--once", action="store_true", help="show the current state, then end")
    parser.add_argument("--json", action="store_true", help="with --once: as JSON")


def command(typed: dict[str, Any], argv: list[str]) -> int:
    _refuse_idle(typed)
    if "steps" in typed:
        typed["steps"] = _parse_steps(typed["steps"])
    try_files(typed, ("trace", "record"))
    with contextlib.suppress(OSError):
        os.nice(19)  # the workers have priority
    source = _open_source(typed.get("address"))
    if not isinstance(source, Replay):
        refuse_typed(typed, ["speed"], f"is of a recording, but {source.name} runs now")
    watcher = Watcher(source, filled(Wishes, typed))
    try:
        asyncio.run(watcher.run())
    except DAMAGED as error:  # a header, say, that another version has written
        if not isinstance(source, Replay) or isinstance(error, ConfigError):
            raise
        raise ConfigError(f"watch {source.name}: cannot be shown: {type(error).__name__}: {error}") from error
    except KeyboardInterrupt:
        watcher.console.print(f"no longer watching {source.name}", markup=False, soft_wrap=True)
    return 0


def _open_source(address: str | None) -> Source:
    """Return the recording, or the run on this machine, named `address`.

    Raises:
        ConfigError: there is none, or several.
    """
    if address is not None and Path(address).is_file() and not address.endswith(".py"):  # a script's run, by its name
        return Replay(Path(address))
    if address is not None and address.endswith(".jsonl"):
        raise ConfigError(f"watch {address}: there is no such file")
    return RunBoards(find(address))


def _refuse_idle(typed: dict[str, Any]) -> None:
    if "once" not in typed:
        refuse_typed(typed, ["json"], "needs --once; --record writes every step as JSON")
    if "trace" not in typed:
        refuse_typed(typed, ["steps"], "needs --trace FILE")
    for alone in (alone for alone in _ALONE if alone in typed):
        refuse_typed(typed, _ALONE[alone], f"has no effect with --{alone}, which ends as soon as it can; leave one out")
    for hurried in (hurried for hurried in ("once", "trace", "record") if hurried in typed):
        refuse_typed(typed, ["speed"], f"with --{hurried} a recording is read as fast as it can be")


def _parse_steps(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"([0-9]{1,18})(?:-([0-9]{1,18}))?", text)
    first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
    if first > last:
        raise ConfigError(f"--steps {text}: must be a step or a range that ascends, such as 100-110")
    return first, last
