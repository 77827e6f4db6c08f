"""Folders of runs: found, kept while they live, cleared when they do not; nothing depends on them."""

import os

import pytest

from rpc_pipe.dependency import ConfigError
from rpc_pipe.launching.launcher import Launcher
from rpc_pipe.launching.report import Reporter
from rpc_pipe.tracing import run_folders as jobs


@pytest.fixture
def root(tmp_path, monkeypatch):
    monkeypatch.setattr(jobs, "root", lambda: tmp_path)
    return tmp_path


def test_a_process_is_known_by_more_than_its_number():
    me = jobs.identity()
    number, started, namespace = me.split("/")
    assert int(number) == os.getpid() and jobs.alive(me) and jobs.state_of(me) in "RS"
    assert not jobs.alive(f"{number}/{int(started) + 1}/{namespace}")  # had our number before us
    assert jobs.alive(f"{number}/{started}/pid:[1]") and jobs.state_of(f"1/1/{namespace}") == ""


def test_what_others_left_is_cleared_and_what_cannot_be_judged_is_kept(root):
    number, started, namespace = jobs.identity().split("/")
    for name, launcher in (
        ("dead", f"{number}/1/{namespace}"), ("mine", f"{number}/{started}/{namespace}"), ("other", "1/1/pid:[7]"),
    ):  # fmt: skip
        (root / name).mkdir()
        (root / name / jobs.LAUNCHER).write_text(launcher)
    (root / "just-begun").mkdir()
    jobs.sweep()
    assert {path.name for path in root.iterdir()} == {"mine", "other", "just-begun"}
    assert {path.name for path in jobs.running()} == {"mine", "other"}
    with pytest.raises(ConfigError, match=r"2 runs are going on; name one of mine \(starting\), other \(starting\)"):
        jobs.find(None)
    assert jobs.find(number).name == "mine" and jobs.find("other").name == "other"


def test_a_folder_of_the_same_number_does_not_hinder_a_run(root):
    (root / f"run-{os.getpid()}").mkdir()
    (root / f"run-{os.getpid()}" / jobs.LAUNCHER).write_text("1/1/pid:[7]")
    assert jobs.new_folder().name.startswith(f"run-{os.getpid()}-")


def test_a_run_that_cannot_be_watched_runs_all_the_same(tmp_path, monkeypatch, capsys):
    def refuse():
        raise ConfigError("/dev/shm/x: must be a folder that only you can read; remove it")

    monkeypatch.setattr(jobs, "root", refuse)
    assert Launcher(["true"], 2, Reporter())._make_boards() is None
    assert "this run cannot be watched: /dev/shm/x: must be a folder" in capsys.readouterr().out


def test_boards_can_be_switched_off(root):
    assert jobs.folder({jobs.FOLDER: "off"}) is None and not list(root.iterdir())
    assert jobs.folder({jobs.FOLDER: "/a/b"}).as_posix() == "/a/b"
    torchrun = jobs.folder({"RANK": "0", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "a/b"})
    assert torchrun.name.startswith("torchrun-a_b-29500-") and torchrun.is_dir()
