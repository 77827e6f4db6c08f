"""Folders of runs: found, kept while they live, cleared when they do not; nothing depends on them."""

import os
import tempfile
from pathlib import Path

import pytest
from refusals import refused

from rpc_pipe.boards import run_folders
from rpc_pipe.boards.board import BoardWriter
from rpc_pipe.boards.run_boards import find, running
from rpc_pipe.launching.launcher import Launcher
from rpc_pipe.launching.report import Reporter


@pytest.fixture
def root(tmp_path, monkeypatch):
    monkeypatch.setattr(run_folders, "root", lambda: tmp_path)
    return tmp_path


def test_a_process_is_known_by_more_than_its_number():
    me = run_folders.identity()
    number, started, namespace = me.split("/")
    assert int(number) == os.getpid() and run_folders.alive(me) and run_folders.state_of(me) in "RS"
    assert not run_folders.alive(f"{number}/{int(started) + 1}/{namespace}")  # had our number before us
    assert run_folders.alive(f"{number}/{started}/pid:[1]") and run_folders.state_of(f"1/1/{namespace}") == ""


def test_what_others_left_is_cleared_and_what_cannot_be_judged_is_kept(root):
    number, started, namespace = run_folders.identity().split("/")
    for name, launcher in (
        ("dead", f"{number}/1/{namespace}"), ("mine", f"{number}/{started}/{namespace}"), ("other", "1/1/pid:[7]"),
    ):  # fmt: skip
        (root / name).mkdir()
        (root / name / run_folders.LAUNCHER).write_text(launcher)
    (root / "just-begun").mkdir()
    run_folders.sweep()
    assert {path.name for path in root.iterdir()} == {"mine", "other", "just-begun"}
    assert {path.name for path in running()} == {"mine", "other"}
    with refused("watch"):
        find(None)
    assert find(number).name == "mine" and find("other").name == "other"


def test_a_folder_that_processes_need_is_kept_until_the_last_has_gone(root):
    """The next run removed the sockets of a job that had run under torchrun for more than ten minutes."""
    number, _, namespace = run_folders.identity().split("/")
    used = root / "sockets-1"
    used.mkdir()
    run_folders.enter(used)
    (used / "member-other").write_text(f"{number}/1/{namespace}")  # it was killed
    os.utime(used, (0, 0))
    run_folders.sweep()
    assert used.is_dir() and not list(running()), "it is no run"
    (used / "member-another").write_text("1/1/pid:[7]")
    run_folders.leave(used)
    assert used.is_dir()
    (used / "member-another").unlink()
    run_folders.leave(used)
    assert not used.exists()


def test_a_folder_of_the_same_number_does_not_hinder_a_run(root):
    (root / f"run-{os.getpid()}").mkdir()
    (root / f"run-{os.getpid()}" / run_folders.LAUNCHER).write_text("1/1/pid:[7]")
    assert run_folders.new_folder().name.startswith(f"run-{os.getpid()}-")


def test_a_folder_that_another_user_has_claimed_is_not_used(tmp_path, monkeypatch):
    """Who made it first could keep torchrun's workers from meeting over ZeroMQ, whose sockets are there."""
    memory, other = tmp_path / "memory", tmp_path / "temporary"
    claimed = memory / f"rpc-pipe-{os.getuid()}"
    claimed.mkdir(parents=True)
    other.mkdir()
    monkeypatch.setattr(run_folders, "_MEMORY", memory)
    monkeypatch.setattr(tempfile, "tempdir", str(other))
    monkeypatch.setattr(os, "getuid", lambda: 4711)
    (memory / "rpc-pipe-4711").mkdir()
    with refused("temporary"):
        run_folders.root()


def test_a_run_in_a_container_with_full_shared_memory_runs_all_the_same(root, monkeypatch, capsys):
    def full(path, text):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    folder, boards = Launcher(["true"], 2, Reporter())._make_folder()
    assert boards is None and folder.is_dir() and not list(root.iterdir())
    folder.rmdir()
    assert "this run cannot be watched: [Errno 28]" in capsys.readouterr().out


def test_boards_can_be_switched_off(root):
    assert run_folders.folder({run_folders.FOLDER: "off"}) is None and not list(root.iterdir())
    assert run_folders.folder({run_folders.FOLDER: "/a/b"}).as_posix() == "/a/b"
    torchrun = run_folders.folder({"RANK": "0", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "a/b"})
    assert torchrun.name.startswith("torchrun-a_b-29500-") and torchrun.is_dir()


def test_what_a_killed_launcher_left_is_removed(root):
    """A launcher that is killed by SIGKILL removes nothing: the folder where its workers had met stayed for ever."""
    left, running = run_folders.new_launchers_folder(watched=False), run_folders.new_launchers_folder(watched=True)
    (left / run_folders.LAUNCHER).write_text("999999999/1/" + run_folders.identity().split("/")[2])
    new = run_folders.new_folder()
    assert set(root.iterdir()) == {running, new}


def test_a_run_is_found_by_its_script(root):
    """Runs were listed by process alone, of which nobody knows which script it runs."""
    boards = []
    for name, script in (("run-1", "train.py"), ("run-2", "tune.py"), ("run-3", "tune.py")):
        (root / name).mkdir()
        header = {
            "process": run_folders.identity(),
            "script": script,
            "started": 0.0,
            "schedule": "1f1b",
            "microbatches": 4,
        }
        boards.append(BoardWriter(root / name / "worker-0", header, lambda _: None))
        run_folders.enter(root / name)
    assert find("train.py").name == find("folder/train.py").name == "run-1"
    with refused("watch"):
        find("tune.py")
