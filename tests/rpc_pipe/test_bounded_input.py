"""Files and numbers that a user names are read within bounds, and an error names the option as it was typed."""

import json
import os
import re

import pytest

from rpc_pipe.boards import run_folders
from rpc_pipe.boards.run_boards import headers_in
from rpc_pipe.commands.main import as_typed, main
from rpc_pipe.demo.corpus import read_text
from rpc_pipe.dependency import ConfigError
from rpc_pipe.launching.interfaces import read_key
from rpc_pipe.system.files import read_file

CSV = "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"
MODEL = "import torch\ndef make():\n    return [torch.nn.Linear(4, 4)] * 2, torch.ones(8, 4), torch.sum\n"


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m.py").write_text(MODEL)
    blocks = [{"ms": dict.fromkeys("FBIWR", 1.0), "bytes": {}}] * 2
    (tmp_path / "p.json").write_text(json.dumps({"rows": {"1": blocks}}))
    (tmp_path / "p.csv").write_text(CSV)
    return tmp_path


def refused(capfd, typed):
    """Return the one error line of a command that exits with 2."""
    assert main(typed) == 2
    (line,) = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error: ")]
    return line


@pytest.mark.parametrize(
    "typed",
    [
        "simulate --microbatches 1000000",
        "simulate --microbatches 8 --steps 100000",
        "compare --microbatches 1000000",
    ],
)
def test_a_simulation_without_end_is_refused(capfd, typed):
    """Two million forwards took two minutes and 5 GB, and twenty million were taken."""
    said = refused(capfd, typed.split())
    assert all(option in said for option in re.findall(r"--\w+ \d+", typed))


@pytest.mark.parametrize(
    "typed",
    [
        "--workers 1000000: simulate --workers 1000000",
        "--workers 1000000: verify --workers 1000000",
        "--steps 4294967296000: verify --steps 4294967296000",
        "--width 4294967296000: run --width 4294967296000",
        "--context 4294967296000: run --context 4294967296000",
        "--stage-cost 0,0: simulate --stage-cost 0,0",
        "--slow 0=0: simulate --slow 0=0",
        "--cost F=0,B=0: simulate --cost F=0,B=0",
        "--set window=-1: export --set window=-1",
        "--set chunks=x: export --schedule interleaved --set chunks=x",
        "--schedule x.csv: simulate --schedule x.csv",
        "--window 0: simulate --window 0",
        "--microbatches 9: simulate --schedule p.csv --microbatches 9",
        "--workers 3: simulate --schedule p.csv --workers 3",
        "--model m.py:no: run --model m.py:no --transport local",
    ],
)
def test_an_error_names_the_option_as_typed(here, capfd, typed):
    """Numbers without bound hung or filled the memory; 105 of 2,738 error lines named a parameter of a class."""
    option, command = typed.split(": ")
    assert refused(capfd, command.split()).startswith(f"error: {option}")


@pytest.mark.parametrize(
    "typed",
    [
        ["simulate", "--schedule", "big.csv"],
        ["run", "--model", "m.py:make", "--plan", "big.json"],
    ],
)
def test_a_large_file_named_by_mistake_is_not_read_whole(here, capfd, typed):
    """Such as the data in the place of the plan: it took as much memory as its size, and ended in a traceback."""
    for name in ("big.csv", "big.json"):
        with (here / name).open("wb") as file:
            file.truncate(3 * 2**30)
    assert "the most that is read" in refused(capfd, typed)


@pytest.mark.parametrize("option", ["watch --tensorboard", "run --data", "simulate --schedule", "run --model"])
def test_an_empty_value_is_refused(here, capfd, option):
    """`--data ''` read the current folder, and `--tensorboard ''` wrote to it."""
    command, name = option.split()
    assert refused(capfd, [command, name, ""]).startswith(f"error: {name} ''")


def test_the_text_of_the_built_in_model_has_a_bound(here, monkeypatch):
    """Every worker holds all of the text."""
    with (here / "big").open("wb") as file:
        file.truncate(3 * 2**20)
    monkeypatch.setattr("rpc_pipe.demo.corpus._MOST_BYTES", 2**20)
    with pytest.raises(ConfigError):
        read_text("big", 8)


def test_a_schedule_in_a_file_says_its_workers_and_microbatches(here, capfd):
    """Without --microbatches it was "microbatches 8: p.csv lists 2", which nobody had typed."""
    assert main(["simulate", "--schedule", "p.csv", "--json"]) == 0
    assert '"workers": 2' in (said := capfd.readouterr().out) and '"microbatches": 2' in said
    (here / "three.csv").write_text(CSV + "2F0,2B0,2F1,2B1\n")
    assert main(["export", "--schedule", "three.csv"]) == 0
    assert capfd.readouterr().out.count("\n") == 3


def test_a_device_that_is_not_there_is_refused_before_measuring(here, capfd):
    """`profile --device cuda:0` without CUDA ended in torch's traceback."""
    assert refused(capfd, ["profile", "m.py:make", "--device", "cuda:99"]).startswith("error: --device cuda:99")


def test_what_names_an_option_already_is_left_alone():
    assert as_typed("--workers 3: no", ["run", "--workers", "3"]) == "--workers 3: no"
    assert as_typed("zero 1: is of replicas", ["run", "--workers", "3"]) == "zero 1: is of replicas"
    assert as_typed("no", []) == as_typed("no", ["run", "²", ""]) == "no"


@pytest.mark.parametrize("there", ["file", "fifo", "link", "open"])
def test_the_name_of_our_folder_may_be_taken(tmp_path, monkeypatch, there):
    """A file, a pipe or a dangling link of this name in /dev/shm stopped every job by a FileExistsError."""
    memory, temporary = tmp_path / "shm", tmp_path / "tmp"
    memory.mkdir(), temporary.mkdir()
    monkeypatch.setattr(run_folders, "_MEMORY", memory)
    monkeypatch.setattr(run_folders.tempfile, "gettempdir", lambda: str(temporary))
    ours = memory / f"rpc-pipe-{os.getuid()}"
    if there == "open":  # mode 777 left boards readable
        ours.mkdir()
        ours.chmod(0o777)
    else:
        {"file": ours.touch, "fifo": lambda: os.mkfifo(ours), "link": lambda: ours.symlink_to("none")}[there]()
    found = run_folders.root()
    assert found.parent == (memory if there == "open" else temporary) and found.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("name", ["fifo", "/dev/zero", "/dev/stdin", "."])
def test_only_regular_files_are_read(here, name):
    """A pipe without a writer made the reader wait for ever, and /dev/zero never ended."""
    os.mkfifo(here / "fifo", 0o600)
    for read in (lambda path: read_file(path, name), read_key):
        with pytest.raises(ConfigError):
            read(here / name)


def test_a_pipe_is_no_board(tmp_path):
    """Opening it hung `watch`."""
    os.mkfifo(tmp_path / "worker-0")
    os.mkfifo(tmp_path / f"{run_folders._MEMBER}7")
    assert headers_in(tmp_path) == {} and run_folders.processes(tmp_path) == set()


def test_a_file_that_cannot_take_what_is_written_is_named(here, capfd):
    """A pipe waited for a reader, and a trace on a full disk was a traceback."""
    os.mkfifo("pipe")
    for option, path in ("--html", "pipe"), ("--chrome", "pipe"), ("--chrome", "/dev/full"):
        assert main(["simulate", "--workers", "2", "--microbatches", "2", option, path]) == 2
        assert capfd.readouterr().err.startswith(f"error: {option} {path}: ")


def test_an_error_does_not_steer_the_terminal(here, capfd):
    assert main(["run", "\x1b]0;title\x07\x1b[31mred.py"]) == 2
    said = capfd.readouterr().err
    assert "red.py" in said and not {"\x1b", "\x07"} & set(said)


@pytest.mark.parametrize(
    "batch", ["{'x': torch.ones(2, 2), 'y': object()}", "torch.nested.nested_tensor([torch.ones(2)])"]
)
def test_a_batch_of_what_cannot_travel_is_refused_before_it_is_measured(batch, here, capfd):
    (here / "odd.py").write_text(f"import torch\ndef make():\n    return torch.nn.Linear(2, 2), {batch}\n")
    assert main(["profile", "odd.py:make"]) == 2
    assert "error: odd.py:make: " in capfd.readouterr().err
