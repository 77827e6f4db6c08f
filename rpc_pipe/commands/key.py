"""`rpc-pipe key`: make the secret by which workers on several hosts authenticate each other."""

from pathlib import Path
from typing import Any

from ..launching.interfaces import make_key
from ..launching.job import KEY
from .options import Parser


def add(commands: Any) -> None:
    """Add `key` to the command line."""
    parser: Parser = commands.add_parser("key", help="make a key file for workers on several hosts (--transport zmq)")
    parser.add_argument("file", help="file to make; copy it to all hosts, readable by you alone")


def command(typed: dict[str, Any], argv: list[str]) -> int:
    make_key(Path(typed["file"]))
    print(f"key written to {typed['file']}; copy it to all hosts and set {KEY} there")
    return 0
