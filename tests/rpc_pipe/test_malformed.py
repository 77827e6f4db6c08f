"""Bad input of all kinds: one clear error, exit code 2, at once, without a traceback and much memory."""

import json

import pytest

from rpc_pipe.commands.main import main

SPECS = """
from rpc_pipe.dependency import Spec

class Stages(Spec):
    number: int = 0
    @property
    def num_stages(self):
        return self.number

class Text(Spec):
    num_stages = "three"

class Nothing(Spec):
    def actions(self, stage, index):
        return None

class Idle(Spec):
    def actions(self, stage, index):
        return []

class Stops(Spec):
    def actions(self, stage, index):
        raise StopIteration

class Hosted(Spec):
    def hosted(self, worker):
        return 3

class Bare(Spec):
    def __init__(self, **more):
        pass
"""
PLAN = {"schedule": "1f1b", "cut": [1], "num_microbatches": 2}
BLOCKS = [{"ms": dict.fromkeys("FBIWR", 1.0), "bytes": {}}]
PROFILE = {"rows": {"1": BLOCKS}}
SHARD = {"name": "x", "bytes": 1, "crc32": "0", "tokens": 1}
RUN = {"kind": "run", "workers": [], "listings": [], "clock_error_ms": 0}
FILES = {
    "specs.py": SPECS,
    "exits.py": "import sys; sys.exit(0)",
    "models.py": "import torch\ndef make():\n    return [None], (torch.ones(4), torch.ones(4)), torch.nn.MSELoss()\n",
    "empty.py": "import torch\ndef make():\n    return [torch.nn.Linear(4, 4)], torch.ones(0, 4), torch.sum\n",
    "uneven.py": "import torch\ndef make():\n    layers = [torch.nn.Linear(4, 4) for _ in range(2)]\n"
    "    return layers, (torch.ones(8, 4), torch.ones(2, 4)), torch.nn.MSELoss()\n",
    "plans.json": json.dumps({"plans": {"a": 1}}),
    "list.json": json.dumps(PLAN | {"parameters": {"recompute": [[]]}}),
    "uneven.json": json.dumps(PROFILE | {"rows": {"1": BLOCKS, "2": [{"ms": {}, "bytes": {}}]}}),
    "without.json": json.dumps(PROFILE | {"rows": {"1": [{"ms": {"F": 1.0, "B": 2.0, "R": 1.0}, "bytes": {}}]}}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("malformed")
    for name, content in FILES.items():
        (made / name).parent.mkdir(exist_ok=True)
        (made / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    (made / "loop.svg").symlink_to("loop.svg")
    return made


@pytest.mark.parametrize(
    "typed, said",
    [
        ("simulate --workers 2 --generate 999999999", "needs every action"),
        ("simulate --schedule specs.py:Stages", "has 0 stages; must be at least 1"),
        ("simulate --schedule specs.py:Stages --set number=-3", "has -3 stages; must be at least 1"),
        ("simulate --schedule specs.py:Stages --set number=²", "takes int"),
        ("simulate --schedule interleaved --set chunks=0", "has 0 stages"),
        ("simulate --schedule specs.py:Bare", "Bare must not define __init__; a parameter is an attribute with a type"),
        ("simulate --svg loop.svg", "cannot be written: Too many levels of symbolic links"),
        ("simulate --svg " + "n/" * 3000 + "n", "cannot be written: File name too long"),
        ("simulate --svg new/", "is a folder; name a file in it"),
        ("profile models.py:make", "model: layer 0 is a NoneType; must be a module, or make one"),
        ("run --checkpoint-folder= --checkpoint-every 1", "--checkpoint-folder '': is empty"),
        ("plan empty.py:make --estimate", "empty.py:make: the batch has no rows; at least 1"),
        ("verify uneven.py:make --transport local --steps 1", "batch: needs tensors that agree in dimension 0"),
        ("run --save /proc/x", "cannot be written"),
        ("run --transport local --port 2000", "has no effect with --transport local"),
        ("run models.py --plan plans.json", "is no plan (KeyError: 0)"),
        ("run models.py --plan list.json", "recompute=[[]]: must be all, none or stages"),
        ("simulate --set recompute=-1", "recompute=-1: must be all, none or stages"),
        ("profile --profile uneven.json", "rows 2, block '': has no time of F"),
        ("plan --batch 8 --profile without.json", "rows 1, block '': has no time of I"),
    ],
)
def test_bad_input_gives_one_error(folder, monkeypatch, capsys, typed, said):
    monkeypatch.chdir(folder)
    monkeypatch.setenv("RPC_PIPE_TRANSPORT", "rpc")  # what is typed is told to workers by their environment
    assert main(typed.split()) == 2
    lines = capsys.readouterr().err.splitlines()
    (error,) = [line for line in lines if not line.startswith("loading ")]
    assert error.startswith("error: ") and said in error
