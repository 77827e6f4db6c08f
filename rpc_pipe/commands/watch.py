"""`rpc-pipe watch`: show a run until it ends or the user quits."""

import asyncio
import contextlib
import os
import re
from typing import Any

from ..boards.run_boards import RunBoards, find
from ..dependency import ConfigError
from ..dispatch.watcher import Watcher
from .options import Parser, refuse_typed, try_files

#: option that replaces the display -> options that have no effect with it
_ALONE = {"trace": ("once", "web", "metrics", "tensorboard"), "once": ("web", "metrics")}

_AT = "PORT or HOST:PORT"


def add(commands: Any) -> None:
    """Add `watch` to the command line."""
    parser: Parser = commands.add_parser("watch", help="watch a running job undisturbed")
    parser.add_argument("address", nargs="?", help="script, name or folder of one of several runs")
    parser.add_argument("--web", nargs="?", const="8800", metavar="PORT", help=f"show it in a browser: {_AT}")
    parser.add_argument("--metrics", metavar="PORT", help=f"serve OpenMetrics for Prometheus: {_AT}")
    parser.add_argument("--tensorboard", metavar="FOLDER", help="write scalars for TensorBoard")
    parser.add_argument("--trace", metavar="FILE", help="write --steps for Chrome's tracing or Perfetto, then end")
    parser.add_argument("--steps", metavar="A-B", help="the steps for --trace (those available now)")
    parser.add_argument("--once", action="store_true", help="show the current state, then end")
    parser.add_argument("--json", action="store_true", help="with --once: as JSON")


def command(typed: dict[str, Any], argv: list[str]) -> int:
    if "once" not in typed:
        refuse_typed(typed, ["json"], "needs --once")
    if "trace" not in typed:
        refuse_typed(typed, ["steps"], "needs --trace FILE")
    for alone in (alone for alone in _ALONE if alone in typed):
        refuse_typed(typed, _ALONE[alone], f"has no effect with --{alone}, which ends as soon as it can; leave one out")
    if "steps" in typed:
        typed["steps"] = _parse_steps(typed["steps"])
    try_files(typed, ("trace",))
    with contextlib.suppress(OSError):
        os.nice(19)  # the workers have priority
    source = RunBoards(find(typed.get("address")))
    watcher = Watcher(source, typed)
    try:
        asyncio.run(watcher.run())
    except KeyboardInterrupt:
        watcher.console.print(f"no longer watching {source.name}", markup=False, soft_wrap=True)
    return 0


def _parse_steps(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"([0-9]{1,18})(?:-([0-9]{1,18}))?", text)
    first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
    if first > last:
        raise ConfigError(f"--steps {text}: must be a step or a range that ascends, such as 100-110")
    return first, last
