"""What of a batch goes into a model and what into its loss function, and where the loss is found."""

from __future__ import annotations

import copy
import dataclasses
from collections import UserDict
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import unsplit_models as models
from alone import SGD, assert_same_state, lm_batch, made, plain, rows_of
from in_turn import floats, ids
from refusals import refused
from torch import Tensor, nn
from training_options import pipeline_with

from rpc_pipe.data import Loader, tokens
from rpc_pipe.dependency import BatchError, ConfigError
from rpc_pipe.model.call_form import loss_of_output
from rpc_pipe.pipeline import Pipeline, Training


def test_a_dict_goes_in_by_name_and_the_loss_comes_from_inside():
    model = made(models.Tied)
    expected = copy.deepcopy(model)
    pipe = Pipeline(model, training=Training(SGD), num_workers=2, num_microbatches=2)
    batch = lm_batch()
    pieces = [((), rows_of(batch, rows)) for rows in (slice(0, 2), slice(2, 4))]
    assert pipe.step(batch) == plain(expected, [pieces])[0]
    assert_same_state(pipe, expected, exactly=False)
    logits = pipe.predict({"ids": batch["ids"], "mask": batch["mask"]})["logits"]
    torch.testing.assert_close(logits, expected(batch["ids"], batch["mask"])["logits"])
    assert pipe.evaluate(batch) == pytest.approx(expected(**batch)["loss"].item(), rel=1e-5)


def test_an_example_needs_no_labels():
    """The lines of docs/elsewhere.md for inference raised that the model returns no loss."""
    batch = lm_batch()
    inputs = {"ids": batch["ids"], "mask": batch["mask"]}
    by_example, again = (
        Pipeline(made(models.Tied), training=Training(SGD), num_workers=2, num_microbatches=2, **example)
        for example in ({"example": inputs}, {})
    )
    assert torch.equal(by_example.predict(inputs)["logits"], again.predict(inputs)["logits"])
    assert by_example.step(batch) == again.step(batch) and by_example.evaluate(batch) == again.evaluate(batch)


def test_a_loss_function_may_have_no_module():
    """Those of `exec` have none: there was a traceback of `startswith`."""
    exec("def loss(output, batch): return output['logits'].square().mean()", names := {"__builtins__": {}})
    pipe = Pipeline(made(models.Tied), names["loss"], training=Training(SGD), num_workers=2, num_microbatches=2)
    assert pipe.step({name: value for name, value in lm_batch().items() if name != "labels"}) > 0


def test_a_collators_batch_is_a_mapping_and_no_dict():
    """`DataCollatorWithPadding` of transformers makes them, and the first step said that they cannot travel."""
    pipe = Pipeline(made(models.Tied), training=Training(SGD), num_workers=2, num_microbatches=2)
    batch = UserDict(lm_batch())
    losses = [pipe.step(batch), *pipe.train([batch]), pipe.evaluate([batch, batch])]
    again = Pipeline(made(models.Tied), training=Training(SGD), num_workers=2, num_microbatches=2)
    assert losses == [again.step(lm_batch()), again.step(lm_batch()), again.evaluate(lm_batch())]


def test_packed_sequences_of_one_row_are_not_trained_on_by_every_microbatch():
    """`DataCollatorWithFlattening` adds bounds, which counted as rows: a loss by items was that of two batches."""
    batch = {"input_ids": ids(1, 6), "labels": ids(1, 6), "cu_seq_lens_q": torch.tensor([0, 2, 6])}

    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.blocks = nn.Embedding(11, 8), nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

        def forward(self, input_ids: Tensor, labels: Tensor, cu_seq_lens_q: Tensor) -> Tensor:
            x = self.words(input_ids)
            for block in self.blocks:
                x = block(x)
            return nn.functional.cross_entropy(x[0], labels[0] % 8) * len(cu_seq_lens_q)

    model = made(Packed)
    with Pipeline(model, training=Training(SGD), num_workers=2, num_microbatches=2) as pipe, refused("batch['labels']"):
        pipe.step(batch)
    with Pipeline(model, training=Training(SGD), num_workers=2, num_microbatches=1) as pipe:
        assert pipe.evaluate(batch) == model(**batch).item()


class LossLast(nn.Module):
    """Returns (logits, loss), as nanoGPT does."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        for block in self.blocks:
            x = block(x)
        return x, nn.functional.mse_loss(x, targets)


def test_parameters_that_no_forward_uses_get_one_line(caplog):
    model = made(LossLast)
    model.spare, model.frozen = nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False)
    pipe = Pipeline(model, training=Training(SGD), num_workers=2, num_microbatches=2)
    for _ in range(2):
        pipe.step((floats(4, 4), floats(4, 4)))
    assert [each.getMessage().partition(":")[0] for each in caplog.records] == ["parameters spare.weight, spare.bias"]


def test_the_only_number_in_a_tuple_is_the_loss_wherever_it_stands():
    model = made(LossLast)
    expected = model(x := floats(4, 4), y := floats(4, 4))[1].item()
    pipe = Pipeline(model, training=Training(SGD), num_workers=2, num_microbatches=2)
    assert pipe.step((x, y)) == pytest.approx(expected)


class Dividing(LossLast):
    """Divides the sum of its losses by a number that it is given, as Hugging Face's models do."""

    def forward(self, x: Tensor, labels: Tensor, num_items_in_batch: Any = None, **more: Any) -> Any:
        for block in self.blocks:
            x = block(x)
        losses = (x - labels).square()
        return {"loss": losses.mean() if num_items_in_batch is None else losses.sum() / num_items_in_batch}


@pytest.mark.parametrize("options", [{}, {"replicas": 2, "num_workers": 4}, {"schedule": "pipedream-2bw"}])
@pytest.mark.parametrize("is_tensor", [False, True])
def test_sums_that_the_model_divides_by_a_number_of_the_batch_are_added(options, is_tensor):
    """`num_items_in_batch`, as Trainer passes it: loss and gradients were divided by the microbatches once more."""
    model = made(Dividing)
    expected = copy.deepcopy(model)
    batch = {"x": floats(7, 4), "labels": floats(7, 4), "num_items_in_batch": torch.tensor(20) if is_tensor else 20}
    pipe = Pipeline(model, training=Training(SGD), **{"num_workers": 2, "num_microbatches": 3, **options})
    losses = [
        expected(x, y, 20)["loss"] for x, y in zip(*(batch[n].tensor_split(3) for n in ("x", "labels")), strict=True)
    ]
    for loss in losses:
        loss.backward()
    SGD(expected.parameters()).step()
    assert pipe.evaluate(batch) == sum(loss.item() for loss in losses)
    assert pipe.step(batch) == sum(loss.item() for loss in losses)
    assert_same_state(pipe, expected, exactly="replicas" not in options)
    mean = pipe.evaluate(batch, metric=lambda output, batch: batch["x"].square().mean())
    assert mean == pytest.approx(batch["x"].square().mean().item())


class Routed(Dividing):
    """Adds a mean to such a sum, as Mixtral adds the loss of its routers."""

    def forward(self, x: Tensor, labels: Tensor, num_items_in_batch: Any = None, **more: Any) -> Any:
        for block in self.blocks:
            x = block(x)
        losses, aux = (x - labels).square(), x.abs().mean()
        return {"loss": (losses.mean() if num_items_in_batch is None else losses.sum() / num_items_in_batch) + 3 * aux}


class Ignoring(Dividing):
    """Takes the number and returns a mean all the same."""

    def forward(self, x: Tensor, labels: Tensor, **more: Any) -> Any:
        return super().forward(x, labels)


FIRST = ["step", "evaluate", "no_grad", "metric"]
ALL = [({}, each) for each in FIRST]
ALL += [(options, each) for options in ({"replicas": 2, "num_workers": 4}, {"schedule": "zb-h1"}) for each in FIRST[:2]]


@pytest.mark.parametrize("kind", [Routed, Ignoring])
@pytest.mark.parametrize(("options", "first"), ALL)
def test_a_mean_beside_such_a_sum_stays_a_mean(kind, options, first):
    """A router's loss counted once for each microbatch: 9.48 for 4.47 by six microbatches of a small Mixtral."""
    model = made(kind)
    expected = copy.deepcopy(model)
    x, labels, parts = floats(7, 4), floats(7, 4), 3
    pipe = Pipeline(model, training=Training(SGD), **{"num_workers": 2, "num_microbatches": parts, **options})
    total = 0.0
    for own_x, own_labels in zip(x.tensor_split(parts), labels.tensor_split(parts), strict=True):
        share = len(own_x) / len(x)
        loss = share * expected(own_x, own_labels, num_items_in_batch=20 * share)["loss"]
        loss.backward()
        total += loss.item()
    SGD(expected.parameters()).step()
    batch = {"x": x, "labels": labels, "num_items_in_batch": 20}
    if first == "no_grad":
        with torch.no_grad():
            pipe.evaluate(batch)
    elif first != "step":
        metric = (lambda output, batch: output["loss"]) if first == "metric" else None
        assert pipe.evaluate(batch, metric=metric) == pytest.approx(total)
    assert pipe.step(batch) == pytest.approx(total)
    assert_same_state(pipe, expected, exactly=False)


def test_a_loss_function_that_divides_by_the_number_is_no_share_of_its_loss():
    class Plain(LossLast):
        def forward(self, x: Tensor) -> Any:
            return self.blocks[1](self.blocks[0](x))

    model, batch = made(Plain), {"x": floats(7, 4), "labels": floats(7, 4), "num_items_in_batch": 20}
    pipe = Pipeline(model, lambda y, b: (y - b["labels"]).square().sum() / b["num_items_in_batch"], num_microbatches=3)
    assert pipe.evaluate(batch) == pytest.approx(((model(batch["x"]) - batch["labels"]).square().sum() / 20).item())


def test_a_number_of_the_batch_is_left_out_or_refused_where_it_is_not_one():
    """Trainer passes none to a model that says `accepts_loss_kwargs = False`."""
    model = made(Dividing)
    model.accepts_loss_kwargs = False
    batch = {"x": floats(6, 4), "labels": floats(6, 4), "num_items_in_batch": 20}
    pipe = Pipeline(model, num_workers=2, num_microbatches=3)
    assert pipe.evaluate(batch) == pytest.approx(model(batch["x"], batch["labels"])["loss"].item())
    pipe = Pipeline(made(Dividing), training=Training(SGD), num_workers=2, num_microbatches=3, schedule="pipedream")
    with pytest.raises(BatchError):
        pipe.step(batch)


@pytest.mark.parametrize(
    "output, at",
    [
        ((torch.ones(1), torch.zeros(())), 0),
        ((torch.ones(3), torch.zeros(())), 1),
        ((torch.zeros(()), torch.ones(())), 0),
    ],
)
def test_a_loss_that_stands_first_is_taken_first(output, at):
    assert loss_of_output(output) is output[at]


def test_what_is_left_over_is_the_loss_functions():
    model = made(models.Nested)

    def loss(output: Tensor, batch: Any) -> Tensor:
        return nn.functional.mse_loss(output, batch["wanted"])

    pipe = Pipeline(model, loss, training=Training(SGD), num_workers=2, num_microbatches=2)
    x, y = floats(4, 6), floats(4, 8)
    expected = nn.functional.mse_loss(model(x), y).item()
    assert pipe.step({"x": x, "wanted": y}) == pytest.approx(expected)
    pair = Pipeline(
        made(models.Nested), nn.functional.mse_loss, training=Training(SGD), num_workers=2, num_microbatches=2
    )
    assert pair.step((x, y)) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("batch", "says"),
    [
        (None, "batch"),
        ({"ids": ids(2, 5)}, "model"),
        ({"ids": ids(2, 5), "labels": ids(3, 5)}, "batch"),
        ({"ids": ids(2, 5), "word": ids(2, 5)}, "model"),
    ],
)
def test_batches_that_cannot_be_trained_on_are_refused_in_a_sentence(batch, says):
    pipe = Pipeline(made(models.Tied), training=Training(SGD), num_workers=2, num_microbatches=2)
    with refused(says):
        pipe.step(batch)


def test_a_metric_takes_the_place_of_the_loss_where_the_output_is():
    model, batch = made(models.Tied), lm_batch()
    pipe = Pipeline(model, training=Training(SGD), num_workers=3, num_microbatches=2)

    def right(output: Any, batch: Any) -> tuple[Tensor, int]:
        return (output["logits"].argmax(-1) == batch["labels"]).sum(), batch["labels"].numel()

    expected = right(model(**batch), batch)
    assert pipe.evaluate(batch, metric=right) == expected[0].item() / expected[1]
    assert pipe.evaluate(batch, metric=lambda output, batch: 3.0) == 3.0
    assert pipe.evaluate(batch) == pytest.approx(model(**batch)["loss"].item(), rel=1e-5)
    plain = Pipeline(nn.Sequential(nn.Linear(2, 3), nn.Tanh()), nn.MSELoss(), num_microbatches=2, num_workers=2)
    assert plain.evaluate((floats(4, 2), floats(4, 3)), metric=lambda output, target: target.mean()) == pytest.approx(
        floats(4, 3).mean().item(), rel=1e-5
    )


@dataclasses.dataclass
class Answer:
    """What a model may return: no dict, no tuple."""

    logits: Tensor
    loss: Tensor | None = None


class TakesBatch(nn.Module):
    """Takes a batch as one nested dict, and things out of it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, batch: dict[str, Any], scale: float = 1.0) -> Answer:
        x, y = batch["inputs"].pop("x"), batch.pop("y", None)  # out of what is its own
        for layer in self.layers:
            x = layer(x).tanh() * scale
        return Answer(x, None if y is None else nn.functional.mse_loss(x, y))


def test_a_nested_dict_goes_in_whole_and_a_dataclass_comes_out():
    model = made(TakesBatch)
    batch = {"inputs": {"x": floats(4, 4)}, "y": floats(4, 4)}
    expected = model(copy.deepcopy(batch))
    pipe = Pipeline(copy.deepcopy(model), training=Training(SGD), num_workers=3, num_microbatches=1)
    assert pipe.step(batch) == expected.loss.item()
    pipe = Pipeline(copy.deepcopy(model), training=Training(SGD), num_workers=3, num_microbatches=2, example=batch)
    found = pipe.predict({"inputs": batch["inputs"]})
    assert isinstance(found, Answer) and found.loss is None
    torch.testing.assert_close(found.logits, expected.logits)
    with refused("predict"):
        pipe.predict(batch)


def test_a_loader_of_tokens_meets_a_causal_model_of_hugging_face(tmp_path):
    """Targets became `past_key_values`, and an AttributeError inside the model followed."""
    transformers = pytest.importorskip("transformers")
    np.save(tmp_path / "a.npy", np.arange(200, dtype=np.uint8) % 50)
    config = transformers.GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=50, n_positions=16)
    model = transformers.GPT2LMHeadModel(config)
    options = {"num_microbatches": 2, "num_workers": 2, "optimizer": partial(torch.optim.SGD, lr=0.1)}
    with (
        pipeline_with(model, **options) as pipe,
        pytest.raises(ConfigError, match=r"its second argument is (past|cache)"),
    ):
        next(pipe.train(Loader(tokens(tmp_path, 8), rows=4)))

    def next_tokens(output, targets):
        return nn.functional.cross_entropy(output.logits.flatten(0, 1), targets.flatten())

    with pipeline_with(model, next_tokens, **options) as pipe:
        inputs, targets = next(iter(Loader(tokens(tmp_path, 8), rows=4)))
        expected = next_tokens(model(inputs), targets).item()
        assert next(pipe.train(Loader(tokens(tmp_path, 8), rows=4))) == pytest.approx(expected, rel=0.1)
