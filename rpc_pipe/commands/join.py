"""`rpc-pipe join`: take the places of workers that an elastic job on several hosts has lost."""

import os
from typing import Any

from ..launching.job import KEY
from ..launching.report import Reporter
from .options import Parser


def add(commands: Any) -> None:
    """Add `join` to the command line."""
    parser: Parser = commands.add_parser("join", help="from another host, take the places of dead workers of a job")
    parser.add_argument("address", metavar="HOST:PORT", help="the job's --meet; its script is here at the same path")
    parser.add_argument("--key-file", metavar="FILE", help=f"the job's key ({KEY})")
    parser.take("threads")


def command(typed: dict[str, Any], argv: list[str]) -> int:
    from ..launching.attempt import How
    from ..launching.host_launcher import HostLauncher

    if "key_file" in typed:
        os.environ[KEY] = typed["key_file"]
    how = How(typed.get("threads"), transport="zmq", meet=typed["address"])
    return HostLauncher(typed["address"], [], Reporter(), how).run()
