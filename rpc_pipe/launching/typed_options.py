"""Options of the command line that override the arguments of a script's pipelines, with a message for each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from ..dependency.parallelism import OPTIONS
from ..dependency.pipeline_options import TYPED, Options
from .overrides import Overrides


class TypedOptions(Overrides):
    """The options typed, by name, for every pipeline that is made from now on.

    Args:
        schedule_options: from `--set`, `--window`, `--replicas` and `--slices`.
        tell: function that shows the user a line; called once for each difference.
    """

    def __init__(
        self, typed: Mapping[str, Any], schedule_options: Mapping[str, str], tell: Callable[[str], None]
    ) -> None:
        self._typed = {name: typed[option] for name, option in TYPED.items() if option in typed}
        self._schedule_options = dict(schedule_options)
        self._tell = tell
        self._told: set[str] = set()

    def over(self, said: Options) -> Options:
        """Return the options of a pipeline with the typed options in place of the script's."""
        options = dict(said.schedule_options or {})
        for name, value in self._typed.items():
            shown = ",".join(map(str, value)) if isinstance(value, list) else str(value)
            self._replaced(TYPED[name], shown, name, getattr(said, name), value)
        if self._typed.get("schedule", said.schedule) != said.schedule:
            kept = {name: value for name, value in options.items() if name in OPTIONS}
            if options != kept:
                gone = ", ".join(f"{name}={value!r}" for name, value in options.items() if name not in kept)
                self._say(f"--schedule {self._typed['schedule']} leaves out the script's {gone}")
            options = kept
        for name, value in self._schedule_options.items():
            self._replaced("set", f"{name}={value}", name, options.get(name), value)
        options |= self._schedule_options
        return replace(said, **{**self._typed, "schedule_options": options})

    def _replaced(self, option: str, shown: str, name: str, old: Any, new: Any) -> None:
        option = option.replace("_", "-")
        if old is not None and str(old) != str(new):
            old = old.__name__ if isinstance(old, type) else repr(old)
            self._say(f"--{option} {shown} replaces the script's {name}={old}")

    def _say(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            self._tell(text)
