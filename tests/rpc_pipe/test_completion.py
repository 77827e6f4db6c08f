"""A shell completes commands, options and their choices; what is a file is left to the shell."""

import os
import subprocess

import pytest

from rpc_pipe.commands.main import main


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (("sim",), ["simulate"]),
        (("run", "--transp"), ["--transport"]),
        (("run", "--schedule", "zb-h"), ["zb-h1", "zb-h2"]),
        (("run", "--transport", ""), ["rpc", "zmq", "local"]),
        (("run", "train"), []),
    ],
)
def test_bash_completes(words, found, capsys, tmp_path):
    assert main(["completion", "bash"]) == 0
    script = tmp_path / "completion.sh"
    script.write_text(capsys.readouterr().out)
    typed = " ".join(f"'{word}'" for word in ("rpc-pipe", *words))
    code = f"source {script}; COMP_WORDS=({typed}); COMP_CWORD={len(words)}; _rpc_pipe; echo ${{COMPREPLY[@]}}"
    done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, check=True, env=dict(os.environ))
    assert done.stdout.split() == found


def test_fish_knows_each_option_of_each_command(capsys):
    assert main(["completion", "fish"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "complete -c rpc-pipe -n '__fish_seen_subcommand_from run' -l save" in lines
