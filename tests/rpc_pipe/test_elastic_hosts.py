"""An elastic job on several hosts: the first host's launcher decides, and hosts that it loses end."""

import json
import os
import socket
import time
from contextlib import suppress

import pytest
import zmq
from processes import ROOT, free_port, rpc_pipe, start

from rpc_pipe.dependency import ConfigError
from rpc_pipe.launching import hosts as of_hosts
from rpc_pipe.launching.epochs import CAUGHT_UP, EVICTED, LEAVES_WORD, REST, RESTS, RESUMED, Epochs
from rpc_pipe.launching.hosts import Hosts, frames_of, launcher_keys, make_socket, open_journal, read
from rpc_pipe.launching.interfaces import make_key

MORTAL = ROOT / "tests" / "mortal.py"
READY = dict.fromkeys(range(4), "ready")


class Worker:
    """A worker of any host that follows orders."""

    def __init__(self, rank):
        self.rank, self.orders = rank, []

    def order(self, order):
        self.orders.append(order)

    def order_stop(self):
        self.order(b"s")

    def kill(self):
        self.orders.append(b"killed")

    @property
    def rosters(self):
        return [json.loads(order[1:]) for order in self.orders if order.startswith(b"e")]


@pytest.fixture
def workers():
    return [Worker(rank) for rank in range(4)]


@pytest.fixture
def epochs(workers):
    return Epochs(4, workers, lambda text, warning: None)


def test_a_lost_host_ends_one_epoch_and_another_takes_its_places(epochs, workers):
    assert epochs.survives([1, 3], -9, READY, "host h1 is gone")
    assert workers[0].rosters == workers[2].rosters == [[1, [1, 3], False, 0]]
    assert epochs.vacant == [1, 3]
    for rank in (1, 3):
        epochs.comes(rank)
        epochs.takes(rank, {"kind": CAUGHT_UP})
    assert epochs.vacant == []
    for rank in (0, 2):
        epochs.takes(rank, {"kind": RESTS, "goes": False})
    assert workers[0].rosters[1:] == workers[2].rosters[1:] == [[2, [], True, 0]]


def test_the_last_worker_of_a_stage_waits_for_a_newcomer_to_have_its_state(epochs, workers):
    """Spot machines end and come so: the newcomer came, and the only worker with its state went, in one epoch."""
    for rank in range(4):
        epochs.takes(rank, {"kind": "ready", "stages": [rank // 2]})

    def rest(*ranks):
        for rank in ranks:
            epochs.takes(rank, {"kind": RESTS, "goes": ""})

    assert epochs.survives([1], -9, READY)
    epochs.comes(1)
    for rank, kind in (1, CAUGHT_UP), (0, EVICTED):
        epochs.takes(rank, {"kind": kind})
    rest(0, 2, 3)
    assert workers[0].rosters[-1] == [2, [], True, 0]
    asked = workers[0].orders.count(REST)
    epochs.takes(2, {"kind": RESUMED, "step": 5})
    assert workers[0].orders.count(REST) == asked + 1
    rest(0, 1, 2, 3)
    assert workers[0].rosters[-1] == [3, [0], True, 0] and b"s" not in workers[0].orders
    epochs.takes(1, {"kind": EVICTED})  # nobody else has the stage now
    rest(1, 2, 3)
    assert workers[1].rosters[-1] == [4, [0], True, 0] and b"s" in workers[1].orders


@pytest.mark.parametrize("order", [(1, 2), (2, 1)])
def test_two_deaths_at_once_are_two_epochs_in_one_order_for_all(epochs, workers, order):
    for rank in order:
        assert epochs.survives([rank], -9, READY)
    assert workers[0].rosters == workers[3].rosters == [[1, [order[0]], False, 0], [2, [1, 2], False, 0]]


def test_a_lost_host_of_newcomers_costs_no_epoch(epochs, workers):
    assert epochs.survives([1, 3], -9, READY)
    epochs.comes(1)
    epochs.comes(3)
    assert epochs.survives([1, 3], -9, READY)
    assert epochs.vacant == [1, 3] and len(workers[0].rosters) == 1


def test_a_host_that_is_lost_before_all_workers_are_ready_ends_the_job(epochs, workers):
    assert not epochs.survives([1, 3], -9, {0: "ready", 1: "joined"})
    assert not workers[0].orders


def test_a_record_goes_to_the_workers_of_all_hosts(epochs, workers):
    assert epochs.takes(2, {"kind": LEAVES_WORD, "name": "epoch 1 address-2", "word": "tcp://h1:7"})
    assert {b"".join(worker.orders) for worker in workers} == {b'w["epoch 1 address-2", "tcp://h1:7"]\n'}


@pytest.fixture
def first(tmp_path, monkeypatch):
    """The first host of two, with four workers, as its launcher has it."""
    make_key(tmp_path / "key")
    monkeypatch.setenv("RPC_PIPE_KEY_FILE", str(tmp_path / "key"))
    monkeypatch.setattr(of_hosts, "LOOK_EVERY_S", 0.0)
    found = Hosts("127.0.0.1:0", 2, 4)
    yield found
    found.end(0)


class Other:
    """The launcher of another host."""

    def __init__(self, first, keys=None):
        self.context = zmq.Context()
        self.socket = make_socket(self.context, zmq.DEALER)
        self.monitor = self.socket.get_monitor_socket()
        (keys or launcher_keys()).prove(self.socket, 1, 0)
        self.socket.connect(first.socket.getsockopt(zmq.LAST_ENDPOINT))
        self.say("hello", "h1")

    def say(self, *message):
        with suppress(zmq.Again):  # a stranger's connection may be broken already
            self.socket.send(json.dumps(message).encode(), zmq.DONTWAIT)

    def hear(self):
        """Return the next message that is no sign of life."""
        while not (message := json.loads(b"".join(self.socket.recv_multipart()))):
            pass
        return message

    def end(self):
        self.context.destroy(0)


def events(first, vacant=()):
    """Return the next events of other hosts."""
    while not (found := list(first.events(vacant))):
        time.sleep(0.001)
    return found


def test_the_first_host_starts_hears_and_loses_workers_of_another_one(first, tmp_path):
    other = Other(first)
    first.begin(["run", "train.py"], 0, tmp_path, lambda: None)
    assert other.hear() == ["begin", 0, 4, 2, ["run", "train.py"], [1, 3]]
    assert first.worker(0, newcomer=False) is None and first.worker(2, newcomer=False) is None
    worker = first.worker(1, newcomer=False)
    os.write(open_journal(tmp_path), b"journal")
    worker.order(b"p")
    assert [other.hear() for _ in range(3)] == [
        ["worker", 1, False],
        ["journal", 0, b"journal".hex()],  # a newcomer has all of it before it hears of an epoch
        ["order", 1, "p"],
    ]
    other.say("event", 7, 3, "ended", -9)  # of another attempt
    other.say("event", 0, 3, "told", {"kind": "ready"})
    assert events(first) == [("told", 3, {"kind": "ready"})]
    spare = Other(first)
    while not spare.socket.poll(0):
        assert not list(first.events([]))
    other.end()
    assert events(first) == [("lost", -1, ([1, 3], "h1"))]
    assert not first.can_start(1) and first.can_start(2)
    assert events(first, vacant=[1, 3]) == [("come", -1, ([1, 3], "h1"))]
    assert spare.hear()[-1] == [1, 3] and first.can_start(1)
    spare.end()


def test_a_launcher_without_the_key_is_not_heard(first, tmp_path, monkeypatch):
    make_key(tmp_path / "another")
    monkeypatch.setenv("RPC_PIPE_KEY_FILE", str(tmp_path / "another"))
    stranger = Other(first)
    kinds = set()
    while not kinds & {zmq.EVENT_DISCONNECTED, zmq.EVENT_CLOSED}:
        kinds.add(int.from_bytes(stranger.monitor.recv_multipart()[0][:2], "little"))
    assert not list(first.events([1, 3])) and zmq.EVENT_HANDSHAKE_SUCCEEDED not in kinds
    stranger.end()


EVENT = "event", 0, 1
FOREIGN = {
    "no JSON": b"{",
    "no text": b"\xff\xfe",
    "no list": b"{}",
    "a name twice": ["hello", "h1"],
    "no kind": [[1]],
    "too few parts": ["event"],
    "a worker of another host": ["event", 0, 2, "ended", 0],
    "a rank that is a list": ["event", 0, [1], "ended", 0],
    "an end by a text": [*EVENT, "ended", "-9"],
    "a line that is a number": [*EVENT, "printed", 5],
    "a message without a kind": [*EVENT, "told", {}],
    "stages that are a text": [*EVENT, "told", {"kind": "ready", "stages": "x"}],
    "a journal with a gap": ["journal", 2**60, "00"],
    "a journal that is no hexadecimal": ["journal", 0, "zz"],
}


@pytest.mark.parametrize("case", FOREIGN)
def test_what_no_launcher_sends_ends_the_job_with_a_sentence(case, first, tmp_path):
    """Whoever has the key may send it; most of these were tracebacks."""
    other = Other(first)
    first.begin(["run", "train.py"], 0, tmp_path, lambda: None)
    foreign = FOREIGN[case]
    other.socket.send(foreign) if isinstance(foreign, bytes) else other.say(*foreign)
    try:
        with pytest.raises(ConfigError) as refused:
            events(first)
        assert refused.value.subject == "--meet"
    finally:
        other.end()


def test_a_stranger_can_keep_little_of_a_port():
    """The first host's launcher kept whatever a stranger sent as one frame, for 30 s."""
    with zmq.Context() as context, make_socket(context, zmq.ROUTER) as socket:
        assert socket.maxmsgsize <= 2**15 and socket.getsockopt(zmq.HANDSHAKE_IVL) <= 10_000
        message = ["x" * 100_000]
        assert max(map(len, frames_of(message))) <= socket.maxmsgsize / 2
        assert read(frames_of(message), "this host") == message


@pytest.mark.parametrize(
    "typed",
    [["--hosts", 2], ["--hosts", 2, "--meet", "127.0.0.1:9", "--elastic", "--workers", 1], ["--meet", "h0:9"]],
    ids=str,
)
def test_several_hosts_are_refused_where_they_cannot_be(typed):
    done = rpc_pipe("run", MORTAL, "--transport", "zmq", *typed)
    assert done.returncode == 2 and done.stderr.startswith("error: ")


def test_a_host_dies_and_another_joins_in_its_place(tmp_path):
    """Two launchers stand for two hosts; the second is killed, and its workers end with it."""
    make_key(tmp_path / "key")
    env = {"RPC_PIPE_LOGS": "off", "WAITS": "long", "RPC_PIPE_KEY_FILE": str(tmp_path / "key"), "TMPDIR": str(tmp_path)}
    weights = []
    for folder in (tmp_path / "whole", tmp_path / "again"):
        folder.mkdir()
        typed = [MORTAL, "--workers", 4, "--replicas", 2, "--transport", "zmq", "--elastic"]
        script = ["--", folder, "step", 30, 2]
        if folder.name == "whole":
            assert rpc_pipe("run", *typed, *script, **env).returncode == 0
        else:
            said = _with_a_death_of_the_second(folder, [*typed, "--hosts", 2], script, env)
            assert "comes in the places of workers [1, 3]" in said
        weights.append((folder / "weights.safetensors").read_bytes() + (folder / "losses").read_bytes())
    assert weights[0] == weights[1]


def _steps(folder):
    """Return how many steps a worker of the second host has made."""
    with suppress(OSError, ValueError):
        return int((folder / "step-1").read_text())
    return 0


def _with_a_death_of_the_second(folder, typed, script, env):
    port = free_port()
    at = f"127.0.0.1:{port}"
    command = ["-m", "rpc_pipe", "run", *typed, "--meet", at, *script]
    with start(*command, merged=True, **env) as first:
        while first.poll() is None:
            with suppress(OSError):
                socket.create_connection(("127.0.0.1", port)).close()
                break
            time.sleep(0.01)
        with start(*command, merged=True, **env) as second:
            while first.poll() is None and _steps(folder) < 4:
                time.sleep(0.01)
            second.kill()
            with start("-m", "rpc_pipe", "join", at, merged=True, **env) as third:
                said = [each.communicate(timeout=120)[0] for each in (first, second, third)]
                assert [each.returncode for each in (first, second, third)] == [0, -9, 0], said
    return said[0]
