"""Whose a folder of checkpoints is: a restart goes on from those of its own job, and two jobs do not write in one."""

import errno
import json
import os
import subprocess
import sys

import pytest
from processes import start
from refusals import refused

from rpc_pipe.checkpoints import folder as folders
from rpc_pipe.checkpoints.folder import MANIFEST


def written(folder, step):
    path = folder / f"step-{step:08}"
    path.mkdir(parents=True, exist_ok=True)
    (path / MANIFEST).write_text("{}")
    return path


def test_a_job_that_is_started_again_knows_its_own_checkpoints(tmp_path):
    # In a used folder an older run's checkpoint, which had come further, was taken by a restart under torchrun.
    further = written(tmp_path, 99)
    assert folders.claim(tmp_path, ["agent a", "agent b"]) == []
    own = written(tmp_path, 2)
    assert folders.claim(tmp_path, ["agent b", "agent c"]) == [own]  # one host of two has been replaced
    assert folders.claim(tmp_path, ["agent c"]) == [own]
    os.utime(further / MANIFEST, ns=(1, 1))  # it was removed, and the job has written another one of this name
    assert folders.claim(tmp_path, ["agent c"]) == [further, own]
    assert folders.claim(tmp_path, ["agent d"]) == []  # another job


def test_a_job_that_is_started_again_needs_no_room(tmp_path, monkeypatch):
    """On a full disk training goes on without checkpoints, but a restart was refused, whose job is noted already."""

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    folders.claim(tmp_path, ["a"])
    own = written(tmp_path, 2)
    monkeypatch.setattr(folders, "write_json", full)
    assert folders.claim(tmp_path, ["a"]) == [own]
    with refused("checkpoint"):
        folders.claim(tmp_path, ["b"])


@pytest.mark.parametrize("noted", ["", "{}", "[]", '{"starters": 3}', '{"starters": ["a"], "before": 3}', "[" * 9999])
def test_a_damaged_note_is_as_good_as_none(tmp_path, noted):
    written(tmp_path, 1)
    (tmp_path / ".job.json").write_text(noted)
    assert folders.claim(tmp_path, ["a"]) == []
    assert json.loads((tmp_path / ".job.json").read_text())["starters"] == ["a"]


def test_a_shell_between_agent_and_worker_is_not_who_starts_it():
    code = "from rpc_pipe.system.files import starter; print(starter())"
    shell = ["sh", "-c", f"{sys.executable} -c '{code}'; true"]
    worker = {**os.environ, "RANK": "0"}
    found = {
        subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
        for command, environment in (([sys.executable, "-c", code], worker), (shell, worker), (shell, worker))
    }
    assert len(found) == 1 and f" {os.getpid()} " in found.pop()


def test_two_jobs_do_not_write_in_one_folder(tmp_path, monkeypatch):
    # The second removed what the first was writing, and the first ended by that.
    monkeypatch.setattr(folders, "_ENDING_S", 0.1)
    code = (
        f"import signal; from rpc_pipe.checkpoints import folder as o; from pathlib import Path\n"
        f"o.hold(Path({str(tmp_path)!r})); o.hold(Path({str(tmp_path)!r})); print('held', flush=True); signal.pause()"
    )
    other = start("-c", code)
    try:
        assert other.stdout.readline() == "held\n"
        with refused("checkpoint"):
            folders.claim(tmp_path, ["a"])
    finally:
        other.kill()
        other.communicate()
    folders.hold(tmp_path)
