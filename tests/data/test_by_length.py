"""Batches of rows of different lengths."""

from functools import partial

import pytest
import torch
from torch import nn

from rpc_pipe.data import batches_by_length
from rpc_pipe.dependency import BatchError, ConfigError
from rpc_pipe.pipeline import Pipeline, Training

WORDS, WIDTH = 11, 8
LENGTHS = [3, 9, 4, 4, 2, 7, 5, 3]
by_length = partial(batches_by_length, batch=8, most_tokens=16, num_stages=2)


def drawn():
    numbers = torch.Generator().manual_seed(3)
    return [torch.randint(WORDS, (length,), generator=numbers) for length in LENGTHS]


def layers():
    return nn.Sequential(nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WORDS))


class Predicts(nn.Module):
    """Predicts the next word, and divides the sum of its losses as Hugging Face's models do."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(layers())

    def forward(self, input_ids, attention_mask, labels, num_items_in_batch):
        assert attention_mask.shape == input_ids.shape
        for block in self.blocks:
            input_ids = block(input_ids)
        total = nn.functional.cross_entropy(input_ids[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
        return {"loss": total / num_items_in_batch}


def test_rows_are_padded_to_the_longest_of_their_microbatch_alone():
    (batch,) = by_length({"input_ids": row.tolist(), "labels": row} for row in drawn())
    masks = [microbatch["attention_mask"] for microbatch in batch]
    assert sorted(mask.sum(1).tolist() for mask in masks for mask in mask.split(1)) == sorted([n] for n in LENGTHS)
    assert all(mask.numel() <= 16 for mask in masks) and sum(mask.numel() for mask in masks) < 1.3 * sum(LENGTHS)
    for microbatch in batch:
        assert (microbatch["labels"] == -100).equal(microbatch["attention_mask"] == 0)
        assert microbatch["num_items_in_batch"] == sum(LENGTHS) - len(LENGTHS)


@pytest.mark.parametrize("order", ["given", "balanced"])
def test_each_token_weighs_as_in_the_whole_batch(order):
    """Means over microbatches would give rows of short microbatches the weight of long ones."""
    rows = drawn()
    model, whole = Predicts(), Predicts()
    count = sum(LENGTHS) - len(LENGTHS)
    losses = [whole(row[None], torch.ones(1, len(row)), row[None], count)["loss"] for row in rows]
    sum(losses).backward()
    batches = list(by_length([{"input_ids": row, "labels": row} for row in rows]))
    with Pipeline(
        model,
        training=Training(partial(torch.optim.SGD, lr=0.1)),
        num_microbatches=8,
        num_workers=2,
        microbatch_order=order,
    ) as pipe:
        assert list(pipe.train(batches)) == [pytest.approx(sum(losses).item())]
        for name, tensor in pipe.weights.state_dict().items():
            parameter = whole.get_parameter(name)
            torch.testing.assert_close(tensor, parameter.detach() - 0.1 * parameter.grad)


def test_a_loss_of_sum_and_weight_needs_no_count():
    def summed(output, target):
        total = nn.functional.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="sum")
        return total, (target != -100).sum()

    torch.manual_seed(0)
    pairs = [(row, row.flip(0)) for row in drawn()]
    model = layers()
    expected = sum(summed(model(x[None]), y[None])[0].item() for x, y in pairs) / sum(LENGTHS)
    with Pipeline(model, summed, num_microbatches=8, num_workers=2, microbatch_order="balanced") as pipe:
        (batch,) = by_length(pairs)
        assert pipe.evaluate(batch) == pytest.approx(expected)


def test_the_last_batch_may_be_smaller_and_classes_have_no_length():
    rows = [{"input_ids": row, "labels": number} for number, row in enumerate(drawn())]
    first, last = by_length(rows, batch=5)
    labels = sorted(torch.cat([microbatch["labels"] for microbatch in (*first, *last)]).tolist())
    assert labels == list(range(8)) and "num_items_in_batch" not in first[0]


def test_rows_are_what_a_tokenizer_gives():
    """A dict of lists ended in `new(): invalid data type 'str'`."""
    rows = drawn()
    by_name = {"input_ids": [row.tolist() for row in rows], "labels": [row.tolist() for row in rows]}
    (given,), (expected,) = by_length(by_name), by_length([{"input_ids": row, "labels": row} for row in rows])
    assert all(torch.equal(a[name], b[name]) for a, b in zip(given, expected, strict=True) for name in b)


def test_impossible_rows_are_refused():
    for row, error in (
        ({"a": [1, 2], "b": [1]}, BatchError),
        ({"a": 1}, BatchError),
        ({"a": [0] * 17}, ConfigError),
        ({"a": [1], "text": "word"}, BatchError),
        ("word", BatchError),
    ):
        with pytest.raises(error):
            next(by_length([row]))
    with pytest.raises(ConfigError):
        next(by_length([{"a": [1]}], most_tokens=0))
    with pytest.raises(BatchError):
        next(by_length({"a": [[1], [2]], "labels": [[1]]}))
