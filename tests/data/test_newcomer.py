"""A newcomer in an elastic job, whose script begins at the top while no other worker talks to it."""

from types import SimpleNamespace

import torch

from rpc_pipe.model.batches.batch_reader import BatchReader
from rpc_pipe.model.batches.microbatches import LazyBatch
from rpc_pipe.planning.specs import make_spec


class Batch(LazyBatch):
    rows, label, scattered = 8, "samples 0-7", True

    def read(self, inputs, targets, own=None):
        return (torch.ones(8, 2) if inputs else None), (torch.ones(8) if targets else None)


def test_a_newcomer_reads_the_batch_that_cuts_its_model():
    """Worker 0 had given that batch to all workers when the job began, and gives it to no newcomer."""
    alone = SimpleNamespace(worker=3, carrier=SimpleNamespace(workers={3}))
    reader = BatchReader(make_spec("1f1b", 4, 4, {"replicas": 2}), [alone], None, False)
    found = reader.cut(Batch(), None, lambda both: both, cuts_model=True)
    assert len(found.inputs) == 4 and found.rows == 8
    assert reader.cut(Batch(), None, lambda both: both).scatter is not None  # it reads no more batches
