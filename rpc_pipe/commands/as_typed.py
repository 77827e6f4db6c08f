"""An error in the words of the command line: classes and files know their parameters, the user has typed options."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

#: parameters of `Pipeline` whose options have another name
_OPTIONS = {"num_workers": "workers", "num_microbatches": "microbatches"}


def as_typed(text: str, argv: Sequence[str]) -> str:
    """Return the text of an error with the option that it is about, as it was typed.

    >>> as_typed("window -1: must be at least 2", ["simulate", "--window", "-1"])
    '--window -1: must be at least 2'
    >>> as_typed("chunks=x: takes int", ["simulate", "--set", "chunks=x"])
    '--set chunks=x: takes int'
    """
    typed = list(_pairs(argv))
    if any(re.search(rf"{option}(?![\w-])", text) for option, _ in typed):
        return text
    lead = re.match(r"\w+", text)
    name = _OPTIONS.get(lead[0], lead[0]).replace("_", "-") if lead else ""
    if lead and any(option == f"--{name}" for option, _ in typed):
        return f"--{name}{text[lead.end() :]}"
    for option, value in typed:
        names = [part.partition("=")[0].strip() for part in value.split(",")]
        if option == "--set" and (name in names or value in text):
            rest = text.removeprefix(f"{name} {value.partition('=')[2]}: ")
            return f"--set {text}" if text.startswith(f"{name}=") else f"--set {value}: {rest}"
    about = [pair for pair in typed if _tells(text, *pair)]
    return "".join(f"{option} {value}: {text}" for option, value in about[:1]) or text


def _pairs(argv: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the options that were typed, and their values."""
    for word, following in zip(argv, [*argv, ""][1:], strict=True):
        option, equals, value = word.partition("=")
        if re.fullmatch("--[a-z-]+", option):
            yield option, value if equals else following


def _tells(text: str, option: str, value: str) -> bool:
    """Tell whether the text is about an option: it has the value, and beside a number the name of the option."""
    word = option[2:].replace("-", " ")
    if value.isdecimal():
        return bool(re.search(rf"\b({value} {word[:-1]}|{word} {value}\b)", text))
    return len(value) > 2 and value in text
