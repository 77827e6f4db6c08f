"""`rpc-pipe export`: write a schedule as torch.distributed.pipelining's CSV of actions."""

from typing import Any

from ..dependency import check_all
from ..planning.listed_schedule import export_csv
from .options import SCHEDULE, try_files, typed_spec, write


def add(commands: Any) -> None:
    """Add `export` to the command line."""
    parser = commands.add_parser("export", help="write a schedule as torch.distributed.pipelining's CSV of actions")
    parser.take(*SCHEDULE)
    parser.add_argument("file", nargs="?", help="where to; by default it is printed")


def command(typed: dict[str, Any], argv: list[str]) -> int:
    """Write or print the schedule; return the exit code."""
    spec = typed_spec(typed)
    check_all(spec)
    text = export_csv(spec)
    if "file" in typed:
        try_files(typed, ["file"])
        write(typed["file"], text)
    else:
        print(text, end="")
    return 0
