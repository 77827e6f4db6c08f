"""Bugs that were found, each with its story."""

from functools import partial

import torch
from torch import nn
from torch.futures import Future

from rpc_pipe.pipeline import Pipeline


def test_a_worker_does_not_leave_with_an_acknowledgement_unsent(monkeypatch):
    """`verify` with 3 workers hung in about one run of twenty, in the last barrier.

    The transport's thread delivered the last payload and then sent the acknowledgement. In between the
    compute thread could finish, leave and end the process; the peer waited for the acknowledgement for ever.
    It is now counted before the delivery, and close() waits until what is counted has been read.
    """
    from rpc_pipe.workers import rpc as module

    read = Future()
    monkeypatch.setattr(module.rpc, "init_rpc", lambda *args, **kwargs: None)
    monkeypatch.setattr(module.rpc, "rpc_async", lambda *args, **kwargs: read)
    shut_down = []
    monkeypatch.setattr(module.rpc, "shutdown", lambda graceful: shut_down.append(transport._acks_due))
    monkeypatch.setattr(module.time, "sleep", lambda seconds: read.done() or read.set_result(None))
    transport = module.RpcTransport(0, 2, "file:///nowhere")
    transport._open[1] = 1
    due_at_delivery = []
    transport._arrived(1, (1, "barrier"), lambda answer: due_at_delivery.append(transport._acks_due), None)
    assert due_at_delivery == [1]
    transport.close()
    assert shut_down == [0], "closed before the acknowledgement was read"


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
