"""Bad input of all kinds: one clear error, exit code 2, at once, without a traceback and much memory."""

import json
import os

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
    "huge.csv": "99999999999F0,99999999999B0\n",
    "far.csv": "999999999F0\n",
    "digits.csv": "²F0,0B0\n",
    "zero.csv": "0F0\0,0B0\n",
    "empty.csv": "",
    "long.csv": "0F0," * 2**21,
    "bytes.csv": b"\xff\xfe" * 99,
    "specs.py": SPECS,
    "exits.py": "import sys; sys.exit(0)",
    "models.py": "import torch\ndef make():\n    return [None], (torch.ones(4), torch.ones(4)), torch.nn.MSELoss()\n",
    "empty.py": "import torch\ndef make():\n    return [torch.nn.Linear(4, 4)], torch.ones(0, 4), torch.sum\n",
    "uneven.py": "import torch\ndef make():\n    layers = [torch.nn.Linear(4, 4) for _ in range(2)]\n"
    "    return layers, (torch.ones(8, 4), torch.ones(2, 4)), torch.nn.MSELoss()\n",
    "links.json": json.dumps({"workers": [{}], "links": [1]}),
    "deep.jsonl": "[" * 100_000 + "\n",
    "nothing.jsonl": "{}\n",
    "cut.jsonl": json.dumps({"kind": "run"}) + "\n",
    "none.jsonl": json.dumps(RUN) + "\n" + json.dumps({"kind": "step", "records": []}) + "\n",
    "fields.jsonl": json.dumps(RUN) + "\n" + json.dumps({"kind": "step", "records": [{"worker": 0}]}) + "\n",
    "types.jsonl": json.dumps(RUN | {"workers": [{"worker": "0"}]}) + "\n",
    "infinite.jsonl": json.dumps(RUN | {"listings": [{"worker": float("inf"), "microbatches": 1}]}) + "\n",
    "long.jsonl": " " * 2**23 + "\n",
    "plans.json": json.dumps({"plans": {"a": 1}}),
    "infinite.json": json.dumps(PLAN | {"num_workers": float("inf")}),
    "large.json": json.dumps(PLAN | {"predicted_ms": 10**400}),
    "list.json": json.dumps(PLAN | {"parameters": {"recompute": [[]]}}),
    "program.json": json.dumps(PLAN | {"program": ["0F0 0B0"], "placement": [[0]], "num_microbatches": 2**30}),
    "ties.json": json.dumps(PROFILE | {"ties": [{"first": "a", "last": 10**12, "together": True}]}),
    "topology.json": json.dumps(PROFILE | {"topology": {"a": 1}}),
    "nan.json": json.dumps(PROFILE | {"per_step_ms": float("nan")}),
    "uneven.json": json.dumps(PROFILE | {"rows": {"1": BLOCKS, "2": [{"ms": {}, "bytes": {}}]}}),
    "without.json": json.dumps(PROFILE | {"rows": {"1": [{"ms": {"F": 1.0, "B": 2.0, "R": 1.0}, "bytes": {}}]}}),
    "wide.py": " " * (2**21 + 1),
    "wide.json": "[" + "[]," * 10**6,
    "latin/index.json": b"\xe4",
    "above/index.json": json.dumps({"dtype": "uint8", "shards": [SHARD | {"name": "../x"}]}),
    "type/index.json": json.dumps({"dtype": "object", "shards": [SHARD]}),
    "infinite/index.json": json.dumps({"dtype": "uint8", "shards": [SHARD | {"bytes": float("inf")}]}),
    "begun/.packing.json": "[" * 10**5,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("malformed")
    for name, content in FILES.items():
        (made / name).parent.mkdir(exist_ok=True)
        (made / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    os.mkfifo(made / "pipe")
    (made / "loop.svg").symlink_to("loop.svg")
    os.mkfifo(made / "pipe.csv")
    return made


@pytest.mark.parametrize(
    "typed, said",
    [
        ("watch run.jsonl --once --tensorboard=", "--tensorboard: must name a folder"),
        ("simulate --schedule huge.csv --workers 1", "'99999999999F0' is no action"),
        ("simulate --schedule far.csv --workers 1", "no row has stage 0"),
        ("simulate --schedule digits.csv --workers 1", "'²F0' is no action"),
        ("simulate --schedule zero.csv --workers 1", "is no action"),
        ("simulate --schedule empty.csv --workers 1", "no row has stage 0"),
        ("simulate --schedule long.csv --workers 1", "at most 4194304 are read"),
        ("simulate --schedule bytes.csv --workers 1", "is no text"),
        ("simulate --schedule pipe.csv --workers 1", "is not a regular file"),
        ("simulate --schedule specs.py:Stages", "has 0 stages; must be at least 1"),
        ("simulate --schedule specs.py:Stages --set number=-3", "has -3 stages; must be at least 1"),
        ("simulate --schedule specs.py:Stages --set number=²", "takes int"),
        ("simulate --schedule specs.py:Text", "num_stages is 'three'; must be a whole number"),
        ("simulate --schedule specs.py:Nothing", "actions(0, 0) returned None: it must return a list of actions"),
        ("simulate --schedule exits.py:Z", "raised SystemExit"),
        ("simulate --schedule interleaved --set chunks=0", "has 0 stages"),
        ("simulate --svg pipe", "is not a regular file"),
        ("simulate --chrome /dev/full", "cannot be written: No space left on device"),
        ("simulate --schedule specs.py:Stops", "actions(0, 0) raised StopIteration"),
        ("simulate --schedule specs.py:Hosted", "hosted is not for a schedule to say"),
        ("simulate --schedule specs.py:Bare", "Bare must not define __init__; a parameter is an attribute with a type"),
        ("simulate --svg loop.svg", "cannot be written: Too many levels of symbolic links"),
        ("simulate --svg " + "n/" * 3000 + "n", "cannot be written: File name too long"),
        ("run --data " + "n" * 300, "File name too long"),
        ("simulate --svg new/", "is a folder; name a file in it"),
        ("simulate --workers " + "9" * 5000, "(5001 characters) must be a whole number"),
        ("simulate --schedule \x1b[31m", "'\\x1b[31m'"),
        ("profile models.py:make", "model: layer 0 is a NoneType: it must be a module, or make one when called"),
        ("plan --batch 8 --profile pipe", "is not a regular file"),
        ("plan --batch 8 --profile deep.jsonl", "cannot be read as JSON: maximum recursion depth exceeded"),
        ("plan models.py:make --topology links.json", "links.json: is no topology"),
        ("run --width 99999999999 --heads 1", "this machine has"),
        (
            "run --workers 9",
            "use at most 6 stages, so fewer workers (num_workers=, or --workers if typed), or a larger --depth",
        ),
        ("run wide.py", "has 2097153 bytes; at most 2097152 of code are read"),
        ("run --checkpoint-folder= --checkpoint-every 1", "--checkpoint-folder: must name a folder"),
        ("run exits.py --workers 99999", "at most 1024 processes are started on one machine"),
        ("run --data pipe", "is not a regular file"),
        ("run --save /dev/full", "is not a regular file"),
        ("simulate --schedule specs.py:Idle", "actions(0, 0) gives nothing: each kind once, F among them"),
        ("plan empty.py:make --estimate", "empty.py:make: the batch has no rows; at least 1"),
        ("verify uneven.py:make --transport local --steps 1", "a batch needs tensors that agree in dimension 0"),
        ("run --save /proc/x", "cannot be written"),
        ("run --transport local --port 2000", "has no effect with --transport local"),
        ("watch nothing.jsonl --once", "line 1 is not of a recording: KeyError: 'kind'"),
        ("watch cut.jsonl --once", "line 1 is not of a recording: KeyError"),
        ("watch none.jsonl --once", "line 2 is not of a recording: ValueError: a step without records"),
        ("watch deep.jsonl --once", "line 1 is not of a recording: RecursionError"),
        ("watch fields.jsonl --once", "line 2 is not of a recording: KeyError: 'step'"),
        ("watch types.jsonl --once", "line 1 is not of a recording: TypeError: worker is '0'"),
        ("watch infinite.jsonl --once", "line 1 is not of a recording: OverflowError"),
        ("watch long.jsonl --once", "line 1 is not of a recording: JSONDecodeError"),
        ("run models.py --plan plans.json", "is no plan (KeyError: 0)"),
        ("run models.py --plan infinite.json", "num_workers must be a whole number of at least 0"),
        ("run models.py --plan large.json", "is no plan (OverflowError"),
        ("run models.py --plan list.json", "recompute=[[]]: must be all, none or stages"),
        ("simulate --schedule program.json --workers 1", "num_microbatches 1073741824: the program lists 2 actions"),
        ("simulate --set recompute=-1", "recompute=-1: must be all, none or stages"),
        ("profile --profile ties.json", "first must be a whole number"),
        ("profile --profile topology.json", "topology: is no topology"),
        ("profile --profile nan.json", "must be at least 0, and finite"),
        ("profile --profile uneven.json", "rows 2, block '': has no time of F"),
        ("plan --batch 8 --profile without.json", "rows 1, block '': has no time of I"),
        ("plan --batch 8 --profile wide.json", "has 2000001 values; at most 2000000 are read"),
        ("plan models.py:make --seconds inf", "must be above 0, and at most 1e+06"),
        ("data latin", "its index.json: is no text"),
        ("data above", "its index.json cannot be read: ValueError"),
        ("data type", "its index.json cannot be read: ValueError"),
        ("data infinite", "its index.json cannot be read: OverflowError"),
        ("data pack specs.py begun", "cannot be read as JSON: maximum recursion depth"),
        ("data pack specs.py out --shard " + "9" * 400, "must be a number of bytes above 0"),
    ],
)
def test_bad_input_gives_one_error(folder, monkeypatch, capsys, typed, said):
    monkeypatch.chdir(folder)
    monkeypatch.setenv("RPC_PIPE_TRANSPORT", "rpc")  # what is typed is told to workers by their environment
    assert main(typed.split()) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and said in error and error.count("\n") == 1


@pytest.mark.parametrize("columns", ["0", "²", "9" * 5000])
def test_an_error_is_told_whatever_the_width_of_the_terminal(folder, monkeypatch, capsys, columns):
    """With 0, nothing was printed by any command, and others were tracebacks."""
    monkeypatch.setenv("COLUMNS", columns)
    assert main(["watch", "nothing"]) == 2
    assert capsys.readouterr().err.startswith("error: watch nothing: ")


def test_a_cache_that_cannot_be_written_is_named(folder, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/no")
    assert main(["run", "--data", str(folder)]) == 2
    assert "set XDG_CACHE_HOME to a folder that can be written" in capsys.readouterr().err


def test_standard_output_that_is_full_is_told(monkeypatch, capsys):
    """It was told by the interpreter at its end, as an exception that it ignored, with exit code 120."""
    with open("/dev/full", "w") as full:
        monkeypatch.setattr("sys.stdout", full)
        assert main(["schedules", "--json"]) == 2
    assert "standard output, or a file: cannot be written: No space left on device" in capsys.readouterr().err
