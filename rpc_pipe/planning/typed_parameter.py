"""Parameters of schedules as text, as typed after `--set`. Loads without torch."""

from __future__ import annotations

import typing
from contextlib import suppress
from typing import Any

from ..dependency import ConfigError


def typed_parameter(schedule: str, key: str, value: Any, wanted: Any) -> Any:
    """Return a parameter of a schedule that may have been typed, as a value of its type.

    Raises:
        ConfigError: its text is none of that type.
    """
    if not isinstance(value, str):
        return value
    choices = typing.get_args(wanted)
    if typing.get_origin(wanted) is typing.Literal:
        if value in (named := {str(choice): choice for choice in choices}):
            return named[value]
        raise ConfigError(f"{key}={value}: schedule {schedule} takes {', '.join(named)}")
    types = [kind for kind in choices or (wanted,) if kind is not type(None)]
    for kind in types:
        if kind is not bool:
            with suppress(ValueError):
                return kind(value)
        elif value.lower() in ("true", "false"):
            return value.lower() == "true"
    names = " or ".join(kind.__name__ for kind in types)
    raise ConfigError(f"{key}={value}: schedule {schedule} takes {names}")
