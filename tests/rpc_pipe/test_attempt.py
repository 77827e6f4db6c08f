"""What a launcher makes of what its workers tell, without any process."""

import io
import runpy
import signal
from functools import partial

import pytest
from refusals import refused

from rpc_pipe.launching import attempt, launcher, worker_main
from rpc_pipe.launching.attempt import Attempt
from rpc_pipe.launching.launcher import Launcher
from rpc_pipe.launching.report import Reporter
from rpc_pipe.launching.worker_main import as_worker
from rpc_pipe.launching.worker_process import WorkerEvent

LOST = {"kind": "failure", "error": "PeerLost", "text": "worker 0 lost worker 1"}
EARLY = {"kind": "failure", "error": "Disagreement", "text": "early"}


class Process:
    """A worker's process that ends when it is killed; the third cannot be started."""

    def __init__(self, rank, *_):
        if rank == 2:
            raise OSError(24, "Too many open files")
        self.process, self.killed = self, False

    def kill(self):
        self.killed = True

    def end(self):
        assert self.killed


def of(num_workers=3):
    return Attempt(num_workers, Reporter(), None)


def test_workers_that_the_system_does_not_allow_are_told_and_the_others_ended(monkeypatch):
    """Exhausted descriptors: a traceback of the launcher, and whoever had been started was not killed."""
    monkeypatch.setattr(attempt, "WorkerProcess", Process)
    found = of()
    with refused("--workers"):
        found.start([], {}, None)
    assert len(found.workers) == 2
    found.end()


def test_the_cause_is_told_where_not_all_characters_can_be(monkeypatch):
    """An output of Latin-1 was taken for a closed one by the line around the cause, and nothing more was shown."""
    written = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(written, encoding="latin-1", write_through=True))
    Reporter().failure("worker 1 failed", "in 中.py: é", [])
    assert b"-- worker 1 failed --" in written.getvalue() and b"in \\u4e2d.py: \xe9\n" in written.getvalue()


def test_who_has_not_come_is_named_by_those_who_waited(monkeypatch, capsys):
    """The others told for how long they had waited, but not for whom."""
    monkeypatch.setattr(attempt, "_JOIN_TOLD_S", 0.0)
    found = of()
    for worker in (0, 2):
        found._take(WorkerEvent("told", worker, {"kind": "joining"}))
    found._look()
    found._look()
    assert capsys.readouterr().out == "waiting for all workers to meet; worker 1 has made no Pipeline so far\n"
    found._take(WorkerEvent("told", 2, {"kind": "wrong input", "text": "no"}))
    assert found._cause.text == "no; worker 1 has made no Pipeline so far"


def test_who_ends_as_if_stopped_though_nobody_asked_is_the_cause():
    """A script that raised KeyboardInterrupt by itself: no worker named a cause."""
    found = of(2)
    found._take(WorkerEvent("told", 0, LOST))
    found._take(WorkerEvent("ended", 1, 130))
    assert found._without_cause().text == "worker 1 ended with exit code 130"


@pytest.mark.parametrize("done", [True, False])
def test_who_calls_nothing_more_has_died_or_ended_early(done):
    """A worker that ended by os._exit before it had said anything was said to end its loop early."""
    found = of(2)
    found._take(WorkerEvent("told", 0, EARLY))
    if done:
        found._take(WorkerEvent("told", 1, {"kind": "done"}))
    found._take(WorkerEvent("ended", 1, 0))
    found._take(WorkerEvent("ended", 0, 1))
    death = "worker 1 ended with exit code 0; it may call os._exit or sys.exit"
    assert found.watch(lambda: None).text == ("early" if done else death)


@pytest.mark.parametrize(
    "error, stopping, failure",
    [
        (KeyboardInterrupt("by itself"), False, "KeyboardInterrupt: by itself"),
        (GeneratorExit("by itself"), False, "GeneratorExit: by itself"),
        (KeyboardInterrupt(), True, ""),
        (SystemExit(3), False, "SystemExit: 3"),
        (SystemExit(0), False, ""),
        (SystemExit(130), True, ""),
    ],
    ids=repr,
)
def test_a_script_that_ends_itself_has_failed_unless_a_stop_was_asked_for(monkeypatch, error, stopping, failure):
    """The others told that it had ended, and nobody why."""
    told = []
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(launcher.link, "present", lambda: True)
    for what in ("hold_leash", "lodge_children"):
        monkeypatch.setattr(worker_main, what, lambda: None)
    monkeypatch.setattr(launcher.link, "stopping", lambda: stopping)
    monkeypatch.setattr(launcher.link, "tell", lambda **message: told.append(message))

    def work():
        raise error

    if failure:
        assert as_worker(work, Reporter()) == 1
        assert told[0]["error"] == type(error).__name__ and failure in told[0]["text"]
    else:
        with pytest.raises(type(error)):
            as_worker(work, Reporter())
        assert told == []


def test_an_error_of_the_scripts_is_shown_from_the_script_on(monkeypatch, tmp_path):
    """Seven frames of the launcher and of runpy stood above it."""
    script, told = tmp_path / "mine.py", []
    script.write_text("raise ValueError('my own')\n")
    monkeypatch.setattr(launcher.link, "tell", lambda **message: told.append(message))
    assert as_worker(partial(runpy.run_path, str(script)), Reporter()) == 1
    first, frame, *_ = told[0]["text"].splitlines()
    assert first.startswith("Traceback") and frame == f'  File "{script}", line 1, in <module>'


def test_a_second_signal_does_not_keep_the_launcher_from_clearing_up():
    """It raised wherever the launcher was, also between killing the workers and removing their files."""
    running = Launcher([], 1, Reporter())
    running._on_signal(signal.SIGINT, None)
    running._ending = True
    running._on_signal(signal.SIGINT, None)
    running._ending = False
    with pytest.raises(BaseException, match="2"):
        running._on_signal(signal.SIGINT, None)
