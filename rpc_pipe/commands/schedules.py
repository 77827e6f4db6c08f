"""`rpc-pipe schedules`: list the schedules."""

import dataclasses
import json
import typing
from typing import Any

from ..launching.report import Reporter
from ..planning.specs import parameter_types
from ..schedules import SCHEDULES


def add(commands: Any) -> None:
    """Add `schedules` to the command line."""
    parser = commands.add_parser("schedules", help="list the schedules")
    parser.take("json")


def command(typed: dict[str, Any], argv: list[str]) -> int:
    """Print the schedules; return the exit code."""
    rows: list[dict[str, Any]] = []
    for name, cls in SCHEDULES.items():
        defaults = {field.name: field.default for field in dataclasses.fields(cls)}
        parameters = {key: defaults[key] for key in parameter_types(cls)}
        summary = (cls.__doc__ or "").strip().split("\n")[0]
        rows.append({"name": name, "summary": summary, "source": cls.source, "parameters": parameters})
    if "json" in typed:
        print(json.dumps(rows))
        return 0
    reporter = Reporter()
    for row in rows:
        reporter.console.print(f"[bold]{row['name']}[/]  {row['summary']}")
        types = parameter_types(SCHEDULES[row["name"]])
        settings = ", ".join(f"{key}={_values(value, types[key])}" for key, value in row["parameters"].items())
        reporter.text(f"    {row['source']}" + (f"; --set {settings}" if settings else ""))
    reporter.text("--set shows the default, and behind | what else there is; all that are synchronous also take")
    reporter.text("recompute=all, or stages such as recompute=0+1, unless they recompute by themselves")
    return 0


def _values(default: Any, wanted: Any) -> str:
    """Return the default of a parameter, with the other choices if there are a few."""
    others = typing.get_args(wanted) if typing.get_origin(wanted) is typing.Literal else ()
    return "|".join(str(value) for value in (default, *(other for other in others if other != default)))
