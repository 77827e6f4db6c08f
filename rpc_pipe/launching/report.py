"""The user's view of a run: its progress, the first cause of a failure, the summary."""

import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import IO, Any, ClassVar, cast

from rich.console import Console

#: a word that is too long to be read
_ENDLESS = re.compile(r"\S{400,}")
#: characters that a terminal follows
_STEERING = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class _Output:
    """A wrapper of stdout or stderr that survives write errors, so that training continues."""

    def __init__(self, name: str) -> None:
        self._name = name

    def write(self, text: str) -> int:
        try:
            getattr(sys, self._name).write(text)
        except UnicodeEncodeError as error:  # write at least the characters that its encoding has
            known = text.replace("─", "-").encode(error.encoding, "backslashreplace")
            return self.write(known.decode(error.encoding))
        except (OSError, ValueError):  # closed, or full
            self._give_up()
        return len(text)

    def flush(self) -> None:
        try:
            getattr(sys, self._name).flush()
        except (OSError, ValueError):
            self._give_up()

    def _give_up(self) -> None:
        """Drop buffered output; the interpreter would try to write it at its end."""
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), getattr(sys, self._name).fileno())

    def __getattr__(self, name: str) -> Any:
        return getattr(getattr(sys, self._name), name)


class Reporter:
    """Prints the messages of workers. With `as_json` human text goes to stderr, results to stdout as JSON."""

    #: puts an error in the words of the command line, which `main` knows
    reword: ClassVar[Callable[[str], str]] = str

    def __init__(self, as_json: bool = False) -> None:
        self.console, self.aside = _console("stderr" if as_json else "stdout"), _console("stderr")
        #: follow-ups of the results shown so far
        self.exit_code = 0
        #: whether text is shown as it grows, into which no line may come
        self.grows = False
        #: whether a summary or a result has been shown
        self.concluded = False
        self._json = as_json

    def handle(self, message: dict[str, Any]) -> None:
        """Show one message of worker 0."""
        kind = message["kind"]
        self.concluded |= kind == "result"
        self.exit_code = max(self.exit_code, message.get("exit_code", 0))
        if kind == "failure":
            self.failure("lost another worker" if message["error"] == "PeerLost" else "failed", message["text"], [])
        elif kind == "wrong input":
            self.error(message["text"])
        elif kind == "progress":
            self.progress(message["text"])
        elif kind == "piece":  # of an unfinished line
            self.grows = True
            self.console.print(_visible(message["text"]), end="", markup=False)
        elif "text" in message:
            self.text(message["text"])
            if kind == "result" and self._json:
                print(json.dumps(message["json"]), flush=True)

    def text(self, text: str) -> None:
        """Show text, such as a line of the launcher."""
        self.console.print(text, markup=False)

    def progress(self, text: str) -> None:
        """Show progress on stderr."""
        self.aside.print(text, markup=False)

    def line(self, ranks: Sequence[int], text: str, members: int = 1) -> None:
        """Show a line that these processes printed, which are workers if these have one member each."""
        one, several = ("worker", "workers") if members == 1 else ("process", "processes")
        who = f"{one} {ranks[0]}" if len(ranks) == 1 else f"({len(ranks)} {several})"
        self.console.print(f"{who} | {text}", markup=False)

    def failure(self, title: str, text: str, consequences: list[str]) -> None:
        """Show the first cause, then its consequences in one line."""
        width = min(self.console.width, 100)
        self.console.print(f"── {title} ".ljust(width, "─"), style="bold red", markup=False)
        self.console.print(_visible(text.rstrip()), markup=False)
        self.console.print("─" * width, style="bold red")
        if consequences:
            self.console.print(f"consequences: {'; '.join(consequences)}", markup=False)

    def error(self, text: str) -> None:
        """Show wrong input, with long words cut."""
        shown = _ENDLESS.sub(lambda found: f"{found[0][:80]}... ({len(found[0])} characters)", Reporter.reword(text))
        _console("stderr").print(f"error: {_visible(shown)}", markup=False)

    def roll_call(self, lines: Sequence[str], stacks: Sequence[str]) -> None:
        """Show the report on a stall."""
        for line in ["nothing has finished for a while:", *(f"  {line}" for line in lines), *stacks]:
            self.console.print(line, markup=False)


def _visible(text: str) -> str:
    """Return a text with its control characters, which would steer a terminal, as escapes."""
    return _STEERING.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def _console(name: str) -> Console:
    return Console(file=cast(IO[str], _Output(name)), highlight=False, soft_wrap=True, emoji=False)
