"""The number of tokens in a batch: padding does not count where a mask or labels show it."""

import pytest
import torch
from torch import nn

from rpc_pipe import Pipeline
from rpc_pipe.model.batches.microbatches import TokenCount, count_tokens

IDS = torch.ones(2, 4, dtype=torch.long)
PADDED = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0]])
LABELS = torch.where(PADDED == 1, 7, -100)


@pytest.mark.parametrize(
    ("inputs", "target", "expected"),
    [
        (((), {"input_ids": IDS, "attention_mask": PADDED, "labels": IDS}), None, (4, False)),
        (((), {"input_ids": IDS, "labels": LABELS}), None, (4, False)),
        (IDS, LABELS, (4, False)),
        (IDS, IDS, (8, False)),
        (IDS, torch.zeros(2, dtype=torch.long), (8, True)),
        (IDS, None, (8, True)),
        (IDS.float(), LABELS, (0, False)),
        (((), {}), None, (0, False)),
    ],
)
def test_padding_does_not_count_where_it_is_shown(inputs, target, expected):
    """Tokens per second counted padding, so ragged rows looked faster than they were."""
    assert count_tokens([inputs], [target]) == TokenCount(*expected)


def test_rows_that_another_replica_reads_have_the_padding_of_the_rows_here():
    unread = IDS.to("meta")
    assert count_tokens([IDS, unread], [LABELS, unread]) == TokenCount(8, False)


def test_a_step_reports_the_tokens_that_count():
    model = [nn.Embedding(8, 4), nn.Linear(4, 8), nn.Flatten(0, 1)]
    reports = []
    with Pipeline(model, lambda y, t: nn.functional.cross_entropy(y, t.flatten()), num_microbatches=2) as pipe:
        pipe.on_step(reports.append)
        pipe.step((IDS, LABELS))
    assert reports[0].tokens_per_s == pytest.approx(4e3 / reports[0].step_ms)
