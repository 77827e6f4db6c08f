"""`rpc-pipe completion`: a shell script that completes commands, options and their choices."""

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

    commands = {name: _words(parser) for name, parser in all_commands().items()}
    choices = {word: words for options in commands.values() for word, words in options.items() if words}
    print(_SHELLS[typed["shell"]].format(
        commands=" ".join(commands),
        options="\n".join(f'            {name}) words="{" ".join(own)}";;' for name, own in commands.items()),
        choices="\n".join(f'        {word}) words="{" ".join(words)}";;' for word, words in choices.items()),
        lines="\n".join(_fish(commands)),
    ))  # fmt: skip
    return 0


def _words(parser: Parser) -> dict[str, list[str]]:
    """Return the options of a command, and the words that each takes."""
    found = {word: action for word, action in parser._option_string_actions.items() if word.startswith("--")}
    return {word: list(SCHEDULES if word == "--schedule" else map(str, a.choices or ())) for word, a in found.items()}


def _fish(commands: dict[str, dict[str, list[str]]]) -> list[str]:
    lines = [f"complete -c rpc-pipe -n __fish_use_subcommand -f -a {name}" for name in commands]
    for name, word, words in ((name, *each) for name, options in commands.items() for each in options.items()):
        takes = f" -x -a '{' '.join(words)}'" if words else ""
        lines.append(f"complete -c rpc-pipe -n '__fish_seen_subcommand_from {name}' -l {word[2:]}{takes}")
    return lines
