"""`rpc-pipe completion`: a shell script that completes commands, options and their choices."""

from __future__ import annotations

import argparse
from typing import Any

from ..schedules import SCHEDULES
from .options import Parser

#: shell -> how it takes the words of bash's function
_SHELLS = {
    "bash": """\
_rpc_pipe() {{
    local word="${{COMP_WORDS[COMP_CWORD]}}" before="${{COMP_WORDS[COMP_CWORD-1]}}" words
    case "$before" in
{choices}
        *) case "${{COMP_WORDS[1]}}" in
{options}
            *) words="{commands}";;
        esac;;
    esac
    case "$COMP_CWORD $before $word" in
        "1 "*|*" -"*) ;;
        *) words=;;
    esac
    COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
complete -o default -F _rpc_pipe rpc-pipe
""",
    "fish": "{lines}",
}
_SHELLS["zsh"] = "autoload -U +X bashcompinit && bashcompinit\n" + _SHELLS["bash"]


def add(commands: Any) -> None:
    """Add `completion` to the command line."""
    parser: Parser = commands.add_parser("completion", help="print what lets a shell complete rpc-pipe's options")
    parser.add_argument("shell", choices=sorted(_SHELLS), help='bash: eval "$(rpc-pipe completion bash)" in ~/.bashrc')


def command(typed: dict[str, Any], argv: list[str]) -> int:
    from .main import all_commands

    parsers = all_commands()
    print(_SHELLS[typed["shell"]].format(
        commands=" ".join(parsers),
        options="\n".join(f'            {name}) words="{" ".join(_options(p))}";;' for name, p in parsers.items()),
        choices="\n".join(f'        {o}) words="{" ".join(c)}";;' for o, c in _choices(parsers).items()),
        lines="\n".join(_fish(parsers)),
    ))  # fmt: skip
    return 0


def _options(parser: Parser) -> list[str]:
    return [word for word in parser._option_string_actions if word.startswith("--")]


def _of(action: argparse.Action) -> list[str]:
    """Return the words that an option takes."""
    return list(SCHEDULES) if action.dest == "schedule" else [str(each) for each in action.choices or ()]


def _choices(parsers: dict[str, Parser]) -> dict[str, list[str]]:
    found = {word: _of(parser._option_string_actions[word]) for parser in parsers.values() for word in _options(parser)}
    return {word: choices for word, choices in found.items() if choices}


def _fish(parsers: dict[str, Parser]) -> list[str]:
    lines = [f"complete -c rpc-pipe -n __fish_use_subcommand -f -a {name}" for name in parsers]
    for name, parser in parsers.items():
        for word in _options(parser):
            words = _of(parser._option_string_actions[word])
            takes = f" -x -a '{' '.join(words)}'" if words else ""
            lines.append(f"complete -c rpc-pipe -n '__fish_seen_subcommand_from {name}' -l {word[2:]}{takes}")
    return lines
