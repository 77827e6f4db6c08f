"""The same training over every transport, as a user starts it: real processes."""

import os
import re
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from processes import free_port, python, rpc_pipe, start, unmerged
from refusals import refused
from torch.distributed import HashStore

from rpc_pipe.boards import run_folders
from rpc_pipe.launching.interfaces import make_key, read_key
from rpc_pipe.launching.job import current_job, own_part
from rpc_pipe.launching.meeting_place import _secret, join, place_of
from rpc_pipe.workers.transport.meeting import Meeting, agree_on_attempt, store_at

SCRIPT = """
import os, sys
from functools import partial
import torch
if "--without-rpc" in sys.argv:
    sys.modules["rpc_pipe.workers.transport.rpc"] = None
    torch.distributed.rpc.init_rpc = None
from torch import nn
from rpc_pipe.pipeline import Pipeline, Training

layers = [partial(nn.Linear, 4, 4), nn.Tanh, partial(nn.Linear, 4, 2)]
sgd = partial(torch.optim.SGD, lr=0.1)
pipe = Pipeline(layers, nn.functional.cross_entropy, num_microbatches=4, training=Training(sgd))
x, y = torch.randn(8, 4, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 2
for step in range(int(sys.argv[1])):
    loss = pipe.step((x, y))
    if step == 0 and pipe.worker == 0:
        print("training", flush=True)
os.chdir("/")
post = pipe.actors[0].carrier.post
print(f"loss {loss:.9f} {type(getattr(post, 'link', post)).__name__}\\n", end="")
"""


@pytest.fixture
def script(tmp_path):
    file = tmp_path / "train.py"
    file.write_text(SCRIPT)
    return file


def test_every_transport_trains_alike(script, tmp_path):
    losses = {}
    # Over RPC a folder of this name was waited at for ever: torch took its path for a URL.
    folder = tmp_path / "a b'c\n\u00fc#x?y;z%41"
    folder.mkdir()
    for transport, carrier in (("rpc", "RpcLink"), ("zmq", "ZmqLink"), ("local", "LocalPost")):
        more = ["--without-rpc"] if transport != "rpc" else []
        options = "--workers", 2, "--transport", transport, "--save", f"{transport}.safetensors", "--", 3, *more
        done = rpc_pipe("run", script, *options, cwd=tmp_path, TMPDIR=str(folder))
        assert done.returncode == 0, done.stdout + done.stderr
        told = re.findall(r"loss (\S+) (\w+)", unmerged(done.stdout))
        assert len(told) == (1 if transport == "local" else 2)
        assert {name for _, name in told} == {carrier}
        assert (tmp_path / f"{transport}.safetensors").is_file(), "not in the folder that the script has gone to"
        losses[transport] = {loss for loss, _ in told}
        assert "3 steps on 2 workers" in done.stdout
    assert len(set().union(*losses.values())) == 1


def test_an_open_port_of_zeromq_refuses_strangers_and_trains_on(script):
    port = free_port()
    arguments = ["run", script, "--transport", "zmq", "--port", port, "--", 300]
    with start("-m", "rpc_pipe", *arguments, merged=True) as launcher:
        lines = []
        while "training" not in "".join(lines[-1:]):
            lines.append(launcher.stdout.readline())
            assert lines[-1], lines
        for data in (b"GET / HTTP/1.0\r\n\r\n", b"\xff" * 3000, b"", b"\xff" + b"\0" * 8 + b"\x7f\x03\x01NULL"):
            with socket.create_connection(("127.0.0.1", port), timeout=5) as stranger:
                stranger.sendall(data)
        output = launcher.communicate(timeout=60)[0]
    assert launcher.returncode == 0, output
    assert len(re.findall(r"loss", unmerged(output))) == 3, output  # of both workers, and the summary's
    assert "worker 0 refused 4 connections that did not prove to be of this job" in output


def test_the_store_of_an_rpc_job_listens_on_the_loopback_interface_alone():
    """Torch's own store listens on all: from another host a worker's address in it was overwritten."""
    port = free_port()
    kept = store_at("127.0.0.1", port, 0, 2, 5)
    Meeting(kept).leave("greeting", "hello")
    assert Meeting(store_at("127.0.0.1", port, 1, 2, 5)).take("greeting", 5) == "hello"
    with pytest.raises(OSError):  # what listens on all interfaces listens there too
        socket.create_connection(("127.0.0.2", port), timeout=1)


def test_workers_that_are_started_again_find_nobodys_old_words():
    # torchrun keeps its store over restarts: over several hosts the workers met at the addresses of those before them.
    store, attempts = HashStore(), []
    for _ in range(3):
        with ThreadPoolExecutor(3) as workers:
            deadline = time.monotonic() + 20
            late = workers.submit(agree_on_attempt, store, 0, 3, deadline), workers.submit(time.sleep, 0.1)
            late[1].result()  # worker 0 has read the words of the attempt before
            others = [workers.submit(agree_on_attempt, store, rank, 3, deadline) for rank in (1, 2)]
            found = {each.result() for each in (late[0], *others)}
        assert len(found) == 1
        attempts += found
    assert len(set(attempts)) == 3


@pytest.mark.parametrize("attempts_before", [0, 1])
def test_who_has_not_come_to_torchruns_store_is_named(attempts_before):
    """A worker whose script ended before its pipeline was not: "no answer" was all that the others said."""
    store = HashStore()
    with ThreadPoolExecutor(3) as workers:
        for _ in range(attempts_before):
            list(workers.map(lambda rank: agree_on_attempt(store, rank, 3, time.monotonic() + 20), range(3)))
    with pytest.raises(TimeoutError, match=r"workers \[1\] have not come"):
        _two_of_three(store)


def _two_of_three(store):
    """Let workers 0 and 2 meet, and return what worker 0 hears."""
    with ThreadPoolExecutor(2) as workers:
        found, _ = [workers.submit(agree_on_attempt, store, rank, 3, time.monotonic() + 1) for rank in (0, 2)]
        return found.result()


def test_torchrun_on_one_host_needs_neither_port_nor_key(script):
    torchrun = "-m", "torch.distributed.run", "--nproc-per-node", 2
    before = set(run_folders.root().glob("sockets-*"))
    done = python(*torchrun, script, 3, "--without-rpc", RPC_PIPE_TRANSPORT="zmq")
    others = set(run_folders.root().glob("sockets-*")) - before  # of jobs that run beside this test
    assert all(map(run_folders.in_use, others)), "nothing is left"
    assert done.returncode == 0, done.stderr
    alone = python(script, 3, OMP_NUM_THREADS="1")
    (loss,) = re.findall(r"loss (\S+) LocalPost", alone.stdout)
    assert re.findall(r"loss (\S+) ZmqLink", unmerged(done.stdout)) == [loss] * 2
    # Worker 0 says how it went; what else is on stderr is torchrun's.
    said = [line for line in done.stderr.splitlines() if line.startswith(("3 steps on 2 workers: ", "costs most: "))]
    assert len(said) == 2, done.stderr


FORK = """
    if pipe.stopped:
        break
    if step == 0:  # a process that loads data, which is ended by SIGTERM as ever
        import os, signal, time
        ready, tell = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(tell, b"1")  # a signal that comes before the interpreter has seen the fork is lost
            time.sleep(15)  # if it outlives a worker that is killed, it holds its output
            os._exit(1)
        os.read(ready, 1)
        os.kill(child, signal.SIGTERM)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
"""


@pytest.mark.parametrize("number, killed", [(signal.SIGHUP, False), (signal.SIGINT, False), (signal.SIGTERM, True)])
def test_torchruns_signals_stop_in_good_order_and_leave_nothing(script, number, killed):
    """Workers died at once: what they showed stayed in memory, and nobody said which worker had been lost.

    By Ctrl-C they did longer: it was a KeyboardInterrupt in the middle of a step, and nothing was saved.
    """
    port = free_port()
    text = script.read_text().replace("\n    if step ==", f"{FORK}    if step ==")
    script.write_text(text.replace("if step == 0 and", "if step == 1 and"))  # when both have ended their processes
    job = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    job |= {"RPC_PIPE_TRANSPORT": "zmq", "TORCHELASTIC_RUN_ID": "sigterm"}
    workers = [start(script, 10**6, RANK=str(w), LOCAL_RANK=str(w), merged=True, **job) for w in range(2)]
    with workers[0], workers[1]:
        lines = [""]
        while "training" not in lines[-1]:
            lines.append(workers[0].stdout.readline())
            assert lines[-1], "".join(lines)
        (folder,) = run_folders.root().glob(f"torchrun-sigterm-{port}-*")
        if killed:
            workers[1].kill()
        for worker in workers:
            worker.send_signal(number)
        said = workers[0].communicate(timeout=30)[0]
        workers[1].communicate(timeout=30)
    assert not folder.exists()
    assert (workers[0].returncode == 0 and "steps on 2 workers" in said) or killed, said
    assert "worker 0 lost worker 1" in said or not killed


LEAVE_A_CHILD = """
    if pipe.worker == 1:
        import signal, time
        child = os.fork()
        if child == 0:
            time.sleep(30)
            os._exit(0)
        print("child", child, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("transport", ["rpc", "zmq"])
def test_a_worker_that_dies_is_missed_though_a_fork_of_it_lives(script, transport):
    """The fork kept its connections open: without a launcher the others waited for its end, 15 s in a trial."""
    script.write_text(script.read_text().replace("\n    if step ==", f"{LEAVE_A_CHILD}    if step =="))
    job = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    job |= {"RPC_PIPE_TRANSPORT": transport, "TORCHELASTIC_RUN_ID": f"fork-{transport}"}
    workers = [start(script, 10**6, RANK=str(w), LOCAL_RANK=str(w), merged=True, **job) for w in range(2)]
    with workers[0], workers[1]:
        while not (line := workers[1].stdout.readline()).startswith("child"):
            assert line, workers[0].communicate(timeout=30)
        said = workers[0].communicate(timeout=30)[0]
        child = int(line.split()[1])
        assert os.stat(f"/proc/{child}").st_uid == os.getuid(), "it has ended, so nothing was shown"
        os.kill(child, signal.SIGKILL)
    assert workers[0].returncode == 1 and "worker 0 lost worker 1" in said, said


BEYOND = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}


def test_rpc_beyond_this_host_must_be_asked_for():
    job = current_job({**BEYOND, "RPC_PIPE_INTERFACE": "eth0"})
    with refused("transport"):
        join(place_of(job))
    with refused("transport"):
        _secret(job)


@pytest.mark.parametrize(
    "here, interface, one_host",
    [("2", "lo", True), ("1", "", False), (None, "lo", True)],
    ids=["all", "half", "unsaid"],
)
def test_a_host_whose_own_name_is_the_loopback_asks_the_others(here, interface, one_host):
    """On Debian a host's own name resolves to 127.0.1.1: worker 0 was bound to `lo`, where no other host reaches it."""
    environ = {**BEYOND, "MASTER_ADDR": "127.0.1.1"}
    del environ["LOCAL_WORLD_SIZE"]
    job = current_job(environ | ({} if here is None else {"LOCAL_WORLD_SIZE": here}))
    assert (job.interface, job.one_host) == (interface, one_host)


def test_a_transport_that_cannot_be_is_refused(monkeypatch):
    with refused("RPC_PIPE_TRANSPORT"):
        current_job({"RPC_PIPE_TRANSPORT": "mpi"})
    for name, value in {**BEYOND, "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with refused("transport"):
        own_part("local", None)
    assert own_part("zmq", 2)[0].transport == "zmq"


def test_a_key_file_is_the_owners_alone(tmp_path, monkeypatch):
    path = tmp_path / "key"
    make_key(path)
    assert path.stat().st_mode & 0o777 == 0o600 and len(read_key(path)) == 64
    with refused("key"):
        make_key(path)
    path.chmod(0o640)
    with refused("key"):
        read_key(path)
    path.chmod(0o600)
    os.chown(path, owner := os.getuid() or 4321, -1)  # root reads it all the same
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with refused("key"):
        read_key(path)
    monkeypatch.undo()
    os.chown(path, os.getuid(), -1)
    path.write_text("short")
    path.chmod(0o600)
    with refused("key"):
        read_key(path)
    with refused("key"):
        read_key(tmp_path / "none")


#: asks for a stop on worker 0, which does not hold the last stage
STOPS = """
import torch
from rpc_pipe import Pipeline, Training
pipe = Pipeline(
    [torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)], torch.nn.functional.mse_loss,
    training=Training(lambda p: torch.optim.SGD(p, lr=0.1)), num_microbatches=2,
)
for step in range(100):
    pipe.step((torch.ones(8, 4), torch.ones(8, 2)))
    if pipe.worker == 0 and step == 2:
        pipe.request_stop()
    if pipe.stopped:
        break
print("ended after", step, flush=True)
"""


@pytest.mark.parametrize("transport", ["rpc", "zmq"])
def test_any_worker_can_stop_the_job(tmp_path, transport):
    """A request of a worker without the last stage, as of a host that is about to go, was not heard."""
    (tmp_path / "train.py").write_text(STOPS)
    done = rpc_pipe("run", "train.py", "--workers", 2, "--transport", transport, cwd=tmp_path, RPC_PIPE_LOGS="off")
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(re.findall(r"ended after (\d+)", done.stdout)[0]) < 99, done.stdout
