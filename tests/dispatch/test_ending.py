"""A watcher says how a run ended: who failed and why, however the run was started."""

import re
import shutil
import time

import pytest
from processes import start

from rpc_pipe.boards import run_folders
from rpc_pipe.boards.run_boards import RunBoards, headers_in
from rpc_pipe.boards.run_folders import RUN_FAILED, Ending, tell_end

SCRIPT = """
import os, sys, time
from functools import partial
import torch
from torch import nn
from rpc_pipe.pipeline import Pipeline

class Layer(nn.Linear):
    calls = 0
    def forward(self, x):
        Layer.calls += 1
        if os.environ.get("RANK", "1") == "1" and os.path.exists(sys.argv[1]):
            if "die" in sys.argv:
                os._exit(7)
            raise ArithmeticError("no such number")
        return super().forward(x)

alone = None if "RANK" in os.environ else 2
pipe = Pipeline([partial(Layer, 4, 4) for _ in range(2)], nn.functional.mse_loss, num_microbatches=4, num_workers=alone)
x = torch.ones(8, 4)
while not pipe.stopped:
    pipe.step((x, x))
    time.sleep(0.02)
"""


def test_an_end_is_read_after_its_folder_has_gone(tmp_path):
    folder = tmp_path / "run-1"
    folder.mkdir()
    boards = RunBoards(folder)
    assert boards.look().ending is None
    tell_end(folder, Ending(RUN_FAILED, "worker 0 lost worker 1", True))
    tell_end(folder, Ending(RUN_FAILED, "worker 1 failed\n" + "x" * 9999))
    shutil.rmtree(folder)
    assert (
        str(boards.look().ending).startswith("failed: worker 1 failed\nxxx") and len(str(boards.look().ending)) < 8100
    )
    folder.mkdir()  # the workers are started again
    assert boards.look().ending is None
    tell_end(folder, Ending(RUN_FAILED, "again"))
    assert str(boards.look().ending) == "failed: again"
    shutil.rmtree(folder)
    tell_end(folder, Ending(RUN_FAILED, "nobody hears it"))
    assert not folder.exists()


def _started(how, script, tmp_path, more):
    """Start the script and return its processes, with the folder of the run."""
    arguments, variables = [script, tmp_path / "now", *more], [{}]
    if how == "launcher":
        arguments = ["-m", "rpc_pipe", "run", "--workers", 2, script, "--", *arguments[1:]]
    if how == "torchrun":
        shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29651", "LOCAL_WORLD_SIZE": "2"}
        variables = [{**shared, "RANK": rank, "LOCAL_RANK": rank, "TORCHELASTIC_RUN_ID": "ending"} for rank in "01"]
    runs = [start(*arguments, RPC_PIPE_LOGS="off", **own) for own in variables]
    found = f"run-{runs[0].pid}" if how != "torchrun" else "torchrun-ending-29651-*"
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for folder in run_folders.root().glob(found):
            if len(headers_in(folder)) == 2:
                return runs, folder
        time.sleep(0.05)
    raise TimeoutError("the run has not started")


@pytest.mark.parametrize("how, more, says", [
    ("launcher", ["die"], r"worker 1 died\nworker 1 ended with exit code 7 while running 1F"),
    ("alone", [], r"worker \d failed \(running \dF"),
    ("torchrun", [], r"worker 1 failed \(running 1F"),
])  # fmt: skip
def test_a_watcher_says_who_failed_and_why(tmp_path, how, more, says):
    (tmp_path / "train.py").write_text(SCRIPT)
    runs, folder = _started(how, tmp_path / "train.py", tmp_path, more)
    watcher = start("-m", "rpc_pipe", "watch", folder.name)
    try:
        assert any(" step " in line for line in watcher.stdout)  # a process of its own has a deadline
        (tmp_path / "now").touch()
        out, _ = watcher.communicate(timeout=60)
        assert re.search(f"{folder.name} failed: {says}", out), out
        assert "has ended" not in out
        assert all(run.wait(60) for run in runs)
    finally:
        for run in [*runs, watcher]:
            run.kill()
            run.communicate()
    assert not folder.exists() or how == "torchrun"
