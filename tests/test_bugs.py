"""Bugs that were found, each with its story."""

import pickle
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch
from torch import nn
from torch.futures import Future

from rpc_pipe.pipeline import Pipeline


def test_a_worker_does_not_leave_before_its_last_words_are_read(monkeypatch):
    """`verify` with 3 workers hung in about one run of twenty, in the last barrier.

    The transport's thread delivered the last payload and then sent the acknowledgement. In between the
    compute thread could finish, leave and end the process; the peer waited for the acknowledgement for ever.
    Later an acknowledgement could also be the answer to a request, which nobody confirms. So who leaves tells
    every peer what is still to be said, and that it takes nothing more, and waits until that has been read.
    """
    from rpc_pipe.workers.transport import rpc as module
    from rpc_pipe.workers.transport.exchange import NOTHING, Message
    from rpc_pipe.workers.transport.payload import Payload

    sent, shut_down, read = [], [], Future()

    def invoke(info, pickled, tensors, timeout_s, is_async):
        sent.append(pickle.loads(pickled))
        return read

    monkeypatch.setattr(module.rpc, "init_rpc", lambda *args, **kwargs: None)
    monkeypatch.setattr(module.rpc, "get_worker_info", lambda name: name)
    monkeypatch.setattr(module, "_invoke_rpc_python_udf", invoke)
    monkeypatch.setattr(module.rpc, "shutdown", lambda graceful: shut_down.append(read.done()))
    monkeypatch.setattr(module.time, "sleep", lambda seconds: read.done() or read.set_result(module.encode(NOTHING)))
    carrier = module.RpcCarrier(0, 2, "file:///nowhere")
    held = Future()
    carrier.exchange(1).hold(held)
    carrier.exchange(1).ask({(1, "barrier"): lambda answer, at_ns: None})
    carrier.received(1, Message([], [], [((1, "barrier"), Payload([], None))]), own=False)
    carrier.close()
    assert sent[-1].func is module._leave
    messages = [module.decode(*call.args[1:]) for call in sent if call.func is not module._offered]
    assert [key for message in messages for key in message.taken] == [(1, "barrier")]
    assert held.done(), "the peer's request would break, and be reported"
    assert shut_down == [True], "left before its last words were read"


def test_a_worker_does_not_leave_with_what_others_have_not_taken(tmp_path):
    """The README's script failed in two runs of three: worker 1 had handed over its weights and left.

    Runs no longer wait at their end for what they made to be taken, so leaving has to.
    """
    script = tmp_path / "leave.py"
    script.write_text(LEAVING)
    command = [sys.executable, "-m", "rpc_pipe", "run", str(script), "--workers", "3"]
    for _ in range(2):
        done = subprocess.run(command, capture_output=True, text=True, timeout=100)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "worker 0 | True" in done.stdout


LEAVING = """
import time
from torch import nn
from rpc_pipe.pipeline import Pipeline

pipe = Pipeline([nn.Linear(2, 2) for _ in range(3)], nn.functional.mse_loss, num_microbatches=2)
if pipe.worker == 0:
    time.sleep(1)  # the others are done long before this one asks
state = pipe.state_dict()
if pipe.worker == 0:
    print(len(state) == 6)
"""


def test_what_a_peer_answered_before_it_died_is_delivered_first(monkeypatch):
    """Read, not met: an answer in shared memory was thrown away if the connection broke before it was read."""
    from rpc_pipe.workers.transport import rpc as module
    from rpc_pipe.workers.transport.payload import Payload
    from rpc_pipe.workers.transport.shared_memory import POSSIBLE

    if not POSSIBLE:
        return
    monkeypatch.setattr(module.rpc, "init_rpc", lambda *args, **kwargs: None)
    carrier = module.RpcCarrier(0, 2, "file:///nowhere")
    assert carrier.channels.accept(1, carrier.channels.offer(1))  # worker 1's end too is in this test
    carrier.exchange(1).hold(Future())  # worker 1 has talked
    delivered = []
    for key in ((1, "1B0"), (1, "1B1")):
        carrier.exchange(1).ask({key: lambda answer, at_ns, key=key: delivered.append((key, answer))})
    payload = Payload([], None)
    assert carrier.channels.write(1, (1, "1B0"), payload)
    carrier._failed(1, "eof")
    assert carrier.wait(60)
    carrier.poll()
    assert delivered == [((1, "1B0"), payload), ((1, "1B1"), "eof")]


def test_two_threads_that_come_first_share_one_exchange(monkeypatch):
    """Read, not met: a handler and the compute thread could each make an exchange to the same peer.

    One of the two was lost with the questions in it, and nobody would ever have answered them.
    """
    from rpc_pipe.workers.transport import rpc as module

    together = threading.Barrier(2)

    class SlowExchange(module.Exchange):
        def __init__(self):
            super().__init__()
            together.wait(10)

    monkeypatch.setattr(module.rpc, "init_rpc", lambda *args, **kwargs: None)
    monkeypatch.setattr(module, "Exchange", SlowExchange)
    carrier = module.RpcCarrier(0, 2, "file:///nowhere")
    with ThreadPoolExecutor(2) as pool:
        exchanges = list(pool.map(carrier.exchange, [1, 1]))
    assert exchanges[0] is exchanges[1] is carrier.exchange(1)


def test_workers_in_threads_compute_like_their_caller():
    """Losses differed in the last bit between 2 and 3 workers of one process.

    torch keeps its number of threads by thread, so workers' threads used all cores where the caller had asked
    for one; how a sum is divided among threads decides its last bits.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        seen = []

        class Watch(nn.Module):
            def forward(self, x):
                seen.append(torch.get_num_threads())
                return x

        pipe = Pipeline([partial(nn.Linear, 2, 2), Watch], nn.functional.mse_loss, num_microbatches=2, num_workers=2)
        pipe.step((torch.ones(4, 2), torch.ones(4, 2)))
        assert seen == [1, 1]
    finally:
        torch.set_num_threads(before)


def test_no_workers_is_not_the_default_number_of_workers():
    """`Pipeline(num_workers=0)` made two workers: `num_workers or 2`."""
    import pytest

    from rpc_pipe.dependency import ConfigError

    with pytest.raises(ConfigError, match="workers 0"):
        Pipeline([nn.Identity], nn.functional.mse_loss, num_microbatches=1, num_workers=0)


def test_workers_of_one_process_restore_its_random_numbers_together():
    """The caller's random numbers after a step differed from run to run, with all workers in one process.

    Each worker saved and restored the process's generator for itself; one that began late saved, and in the end
    restored, what another had seeded for a layer.
    """
    layers = [partial(nn.Linear, 4, 4), *[partial(nn.Dropout, 0.5)] * 6, partial(nn.Linear, 4, 4)]
    pipe = Pipeline(layers, nn.functional.mse_loss, num_microbatches=4, num_workers=4)
    for _ in range(20):
        torch.manual_seed(3)
        pipe.step((torch.ones(8, 4), torch.ones(8, 4)))
        found = torch.rand(1)
        torch.manual_seed(3)
        assert torch.equal(found, torch.rand(1))


def test_ctrl_c_before_anything_runs_is_not_a_crash(monkeypatch):
    """A watcher that was stopped while it still looked for runs ended with a traceback."""
    from rpc_pipe.commands import main as cli
    from rpc_pipe.dispatch import command

    def interrupted(address):
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "_open_source", interrupted)
    monkeypatch.setattr(command.os, "nice", lambda _: 0)
    assert cli.main(["watch"]) == 130
