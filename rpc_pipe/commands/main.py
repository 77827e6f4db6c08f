"""The entry point of the command line: `rpc-pipe COMMAND`; `rpc-pipe --help` lists the commands.

Each command is a file beside this one: `add` adds its parser, and `command` carries it out. Modules that need torch
are imported where they are used, so that planning answers at once.

Exit codes: 0 done, 1 the run failed or differed, 2 wrong input, 130 stopped by the user.
"""

import argparse
import os
import re
import sys
import traceback
from collections.abc import Iterator, Sequence
from functools import partial
from importlib import import_module
from shlex import quote

from ..dependency import ConfigError, ScheduleError
from ..dependency.pipeline_options import TYPED
from ..launching.report import Reporter
from .options import Parser, with_listed

_COMMANDS = (
    "run", "plan", "profile", "verify", "watch", "simulate", "compare", "export", "schedules", "ranks",
    "generate", "key", "join", "completion",
)  # fmt: skip

#: arguments that are no options
_POSITIONAL = ("script", "model", "address", "source", "file", "folder", "shell")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return its exit code."""
    argv = list(sys.argv[1:] if arguments is None else arguments)
    words = argv[: argv.index("--")] if "--" in argv else argv
    Reporter.reword = staticmethod(partial(as_typed, argv=words))
    try:
        code = _dispatch(argv)
        sys.stdout.flush()  # here, where a write error can still be reported
        return code
    except (ConfigError, ScheduleError) as error:
        Reporter().error(str(error))
        return 2
    except BrokenPipeError:  # the reader of the output, such as `head`, has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if error.filename is None:
            raise
        Reporter().error(f"{error.filename}: cannot be written: {error.strerror}")
        return 2
    except KeyboardInterrupt as stopped:  # before anything ran that could be stopped, or a model has raised it
        *_, (frame, line) = traceback.walk_tb(stopped.__traceback__)
        Reporter().progress(f"stopped by KeyboardInterrupt in {frame.f_code.co_filename}:{line}")
        return 130


def _dispatch(argv: list[str]) -> int:
    # Options may follow the script; the script's arguments follow `--`.
    at = argv.index("--") if "--" in argv else len(argv)
    namespace, unknown = _parser(argv[:1]).parse_known_args(argv[:at])
    typed = vars(namespace)
    command, parser = typed.pop("command"), typed.pop("parser")
    if unknown:
        said = " ".join(unknown)
        rule = f"{parser.prog} --help lists what can be typed"
        if "script" in typed:
            rule = f"put the script's own options after --: rpc-pipe run {typed['script']} -- {said}"
        raise ConfigError(f"{said}: not an option of {parser.prog}; {parser.near(unknown[0])}{rule}")
    if at < len(argv) and "script" not in typed:
        raise ConfigError(f"{' '.join(argv[at:])}: what follows -- is for a script, but no script is run")
    for name in (name for name, value in typed.items() if value in ("", [""])):
        raise ConfigError(f"{name if name in _POSITIONAL else f'--{name}'.replace('_', '-')} '': is empty")
    code: int = command(with_listed(typed), argv)
    return code


def all_commands() -> dict[str, Parser]:
    """Return the parsers of all commands by name."""
    (commands,) = (action for action in _parser(())._actions if isinstance(action, argparse._SubParsersAction))
    return dict(commands.choices)


def _parser(typed: Sequence[str]) -> Parser:
    """Return a parser of the typed command, or of all: a worker, which runs one, loads no other."""
    about = "Train models that do not fit on one device, as a pipeline of workers."
    parser = Parser(prog="rpc-pipe", description=about)
    version = sys.modules[__name__.partition(".")[0]].__version__
    parser.add_argument("--version", action="version", version=f"rpc-pipe {version}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=Parser)
    for name in [name for name in _COMMANDS if name in typed] or _COMMANDS:
        module = import_module(f".{name}", __package__)
        module.add(commands)
        commands.choices[name].set_defaults(command=module.command)
    return parser


def as_typed(text: str, argv: Sequence[str]) -> str:
    """Return the text of an error with the option that it is about, as it was typed.

    >>> as_typed("window -1: must be at least 2", ["simulate", "--window", "-1"])
    '--window -1: must be at least 2'
    >>> as_typed("chunks=x: takes int", ["simulate", "--set", "chunks=x"])
    '--set chunks=x: takes int'
    >>> as_typed("split [5, 5]: must add up to 4 layers", ["run", "--split", "5,5"])
    '--split 5,5: must add up to 4 layers'
    """
    typed = list(_pairs(argv))
    if any(re.search(rf"{option}(?![\w-])", text) for option, _ in typed):
        return text
    lead = re.match(r"\w+", text)
    name = TYPED.get(lead[0], lead[0]).replace("_", "-") if lead else ""
    if lead and (found := [value for option, value in typed if option == f"--{name}"]):
        shown, colon, rule = text[lead.end() :].partition(": ")
        same = colon and _bare(shown) in ("", _bare(found[-1]))  # a list or a text is typed in another form
        return f"--{name} {quote(found[-1])}: {rule}" if same else f"--{name}{text[lead.end() :]}"
    for option, value in typed:
        names = [part.partition("=")[0].strip() for part in value.split(",")]
        if option == "--set" and (name in names or value in text):
            rest = text.removeprefix(f"{name} {value.partition('=')[2]}: ")
            return f"--set {text}" if text.startswith(f"{name}=") else f"--set {value}: {rest}"
    about = [pair for pair in typed if _tells(text, *pair)]
    return "".join(f"{option} {value}: {text}" for option, value in about[:1]) or text


def _bare(value: str) -> str:
    """Return a value without the signs that show its type in Python."""
    return re.sub(r"[]\s='\"()[]", "", value)


def _pairs(argv: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the options that were typed, and their values."""
    for word, following in zip(argv, [*argv, ""][1:], strict=True):
        option, equals, value = word.partition("=")
        if re.fullmatch("--[a-z-]+", option):
            yield option, value if equals else following


def _tells(text: str, option: str, value: str) -> bool:
    """Return whether the text is about an option: it has the value, and beside a number the name of the option."""
    word = option[2:].replace("-", " ")
    if value.isdecimal():
        return bool(re.search(rf"\b({value} {word[:-1]}|{word} {value}\b)", text))
    return len(value) > 2 and value in text
