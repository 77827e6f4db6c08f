"""The entry point of the command line: `rpc-pipe COMMAND`; `rpc-pipe --help` lists the commands.

Each command is a file beside this one. Modules that need torch are imported where they are used, so that
planning answers at once. Exit codes: 0 done, 1 the run failed or differed, 2 wrong input, 130 stopped by the user.
"""

from __future__ import annotations

import argparse
import errno
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from importlib import import_module

from ..dependency import ConfigError, ScheduleError
from ..launching.report import Reporter
from .as_typed import as_typed
from .options import Parser, with_listed

_COMMANDS = (
    "run", "plan", "profile", "verify", "watch", "simulate", "compare", "export", "schedules", "ranks", "data",
    "key", "join", "completion",
)  # fmt: skip

#: arguments that are no options
_POSITIONAL = ("script", "model", "address", "source", "file", "folder", "shell")
#: errors of writing: no space, a quota, or a broken device
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return its exit code."""
    argv = list(sys.argv[1:] if arguments is None else arguments)
    words = argv[: argv.index("--")] if "--" in argv else argv
    Reporter.reword = staticmethod(partial(as_typed, argv=words))
    try:
        code = _dispatch(argv)
        _flush()  # here, where a write error can still be reported
        return code
    except (ConfigError, ScheduleError) as error:
        Reporter().error(str(error))
        return 2
    except BrokenPipeError:  # the reader of the output, such as `head`, has closed it
        _give_up_stdout()
        return 0
    except OSError as error:
        if error.filename is None and error.errno not in _FULL:
            raise
        with suppress(OSError):
            _flush()
        Reporter().error(f"{error.filename or 'standard output, or a file'}: cannot be written: {error.strerror}")
        return 2
    except KeyboardInterrupt:  # before anything ran that could be stopped
        return 130


def _flush() -> None:
    """Flush the output; on errors drop it, as the interpreter would try to write it at its end."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except ValueError:  # a script has closed it
        pass
    except OSError:
        _give_up_stdout()
        raise


def _give_up_stdout() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


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
    for name, value in typed.items():
        if value == "" or value == [""]:
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
    for command in [name for name in _COMMANDS if name in typed] or _COMMANDS:
        import_module(f".{command}", __package__).add(commands)
    return parser
