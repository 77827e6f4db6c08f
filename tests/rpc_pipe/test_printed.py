"""What workers print, as the launcher shows it."""

import pytest
from processes import rpc_pipe

from rpc_pipe.launching import worker_process
from rpc_pipe.launching.worker_process import Printed

SCRIPT = """
import warnings
warnings.warn("look here")
import os
print("alike")
print("rank", os.environ["RANK"])
"""


def shown_of(lines, workers=(0, 1, 2)):
    shown = []
    lines_shown = Printed(workers, lambda workers, text: shown.append((sorted(workers), text)))
    for worker, text in lines:
        lines_shown.add(worker, text)
    before = len(shown)
    lines_shown.show()
    return shown, before


def test_a_line_of_all_workers_is_shown_once_and_each_workers_lines_stay_in_order():
    """A warning of 8 workers filled the screen with 16 lines."""
    shown, before = shown_of([(0, "a"), (1, "a"), (1, "own"), (2, "a"), (0, "b"), (2, "b"), (1, "b")])
    assert shown == [([0, 1, 2], "a"), ([1], "own"), ([0, 1, 2], "b")]
    assert before == 1, "a line of one worker waits for the others"


def test_a_line_that_is_printed_again_is_another_line():
    shown, _ = shown_of([(0, "a"), (0, "b"), (0, "a"), (1, "b"), (1, "a"), (1, "b")], (0, 1))
    assert shown == [([0], "a"), ([0, 1], "b"), ([0, 1], "a"), ([1], "b")]


def test_lines_of_workers_that_were_not_asked_for_are_left_out():
    assert shown_of([(0, "a"), (1, "a"), (2, "b")], (0,)) == ([([0], "a")], 1)


def test_a_line_waits_for_others_for_a_limited_time(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(worker_process.time, "monotonic", lambda: now[0])
    shown = []
    lines = Printed((0, 1), lambda workers, text: shown.append(text))
    lines.add(0, "a")
    lines.show(worker_process.PATIENCE_S)
    assert not shown
    now[0] = worker_process.PATIENCE_S
    lines.show(worker_process.PATIENCE_S)
    assert shown == ["a"]


@pytest.mark.parametrize(
    "typed, wanted", [((), {"rank 0", "rank 1", "alike"}), (("--log-workers", "1"), {"rank 1", "alike"})]
)
def test_a_run_shows_the_lines_of_the_workers_that_were_asked_for(tmp_path, typed, wanted):
    (tmp_path / "train.py").write_text(SCRIPT)
    done = rpc_pipe("run", tmp_path / "train.py", "--workers", 2, *typed)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line.split(" | ") for line in done.stdout.splitlines() if " | " in line]
    assert {text for _, text in lines} >= wanted and ("rank 0" in done.stdout) == ("rank 0" in wanted)
    assert any("look here" in text for _, text in lines)


def test_a_worker_that_there_is_not_is_refused(tmp_path, capsys):
    (tmp_path / "train.py").write_text(SCRIPT)
    done = rpc_pipe("run", tmp_path / "train.py", "--workers", 2, "--log-workers", "0,2")
    assert done.returncode == 2 and "--log-workers 2: there are workers 0 to 1" in done.stderr
