"""What a training run loads: the core, and nothing that plans, simulates, draws or watches."""

import ast
import functools
import os
import subprocess
import sys
import tokenize
from pathlib import Path

import pytest
from test_layers import FILES, folder

#: the most code lines, without blanks, comments and docstrings, that a script with a list of layers loads
MOST_LINES = {"alone": 8_000, "as a worker of rpc-pipe run": 11_800}
#: what it does without
BESIDES = ("drawing", "dispatch", "planning/measuring", "verifying", "data", "model/assign", "model/replay")
#: what a job does without that is not elastic
OF_ELASTIC_JOBS = {
    *(
        "rpc_pipe.elastic.recovery",
        "rpc_pipe.elastic.heir",
        "rpc_pipe.elastic.recovery",
        "rpc_pipe.launching.epochs",
    ),
    *("rpc_pipe.workers.compute.stash", "rpc_pipe.workers.surviving", "rpc_pipe.launching.epochs"),
}
#: without the compiler of torch, which each optimizer loads, in more than a second
SCRIPT = """
import sys, types, zmq, beside
sys.modules["torch._dynamo"] = types.SimpleNamespace(disable=lambda call, *_, **__: call, graph_break=lambda: None)
import torch
from torch import nn
from rpc_pipe import Pipeline, Training
layers = [nn.Linear(8, 8), nn.Linear(8, 3)]
pipe = Pipeline(layers, nn.functional.cross_entropy, training=Training(torch.optim.AdamW), num_microbatches=4)
pipe.step((torch.randn(16, 8), torch.randint(3, (16,))))
open(sys.argv[1] + str(pipe.worker), "w").write(" ".join(name for name in sys.modules if name.startswith("rpc_pipe")))
"""
#: modules of these names in the current folder
STRANGERS = "zmq", "rpc_pipe", "numpy"


@functools.cache
def code_lines(path):
    """Return the number of lines with code: without blanks, comments and docstrings."""
    with path.open("rb") as source:
        tokens = list(tokenize.tokenize(source.readline))
    tree = ast.parse(path.read_text())
    bodies = [node.body for node in ast.walk(tree) if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))]
    texts = [body[0] for body in bodies if body and isinstance(body[0], ast.Expr)]
    texts = [text for text in texts if isinstance(text.value, ast.Constant) and isinstance(text.value.value, str)]
    silent = {line for text in texts for line in range(text.lineno, text.end_lineno + 1)}
    told = (tokenize.NAME, tokenize.OP, tokenize.NUMBER, tokenize.STRING)
    lines = {line for token in tokens if token.type in told for line in range(token.start[0], token.end[0] + 1)}
    return len(lines - silent)


@pytest.mark.parametrize("how", MOST_LINES)
def test_a_training_run_loads_the_core_alone(how, tmp_path):
    """And nothing from the current folder, which `python -m` puts first: a `zmq.py` in a shared one ran as the user."""
    script = tmp_path / "own" / "train.py"
    script.parent.mkdir()
    script.write_text(SCRIPT)
    script.with_name("beside.py").touch()
    for name in STRANGERS:
        (tmp_path / f"{name}.py").write_text("raise SystemExit('a stranger ran as you')")
    alone = [sys.executable, script, tmp_path / "loaded-"]
    job = [Path(sys.executable).with_name("rpc-pipe"), "run", script, "--workers", "2", "--", tmp_path / "loaded-"]
    subprocess.run(
        alone if how == "alone" else job,
        check=True, timeout=120, cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert len(list(tmp_path.glob("loaded-*"))) == (1 if how == "alone" else 2)
    loaded = [name for name in (tmp_path / "loaded-0").read_text().split() if name in FILES]
    assert [name for name in loaded if folder(name) in BESIDES and FILES[name].name != "__init__.py"] == []
    assert not {"rpc_pipe.planning.simulator", *OF_ELASTIC_JOBS} & {*loaded}
    assert [name for name in loaded if folder(name) == "schedules"] == [
        "rpc_pipe.schedules",
        "rpc_pipe.schedules.one_f_one_b",
    ]
    assert sum(code_lines(FILES[name]) for name in loaded) <= MOST_LINES[how]
