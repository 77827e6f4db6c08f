"""Options and batches that cannot be: each is refused in a sentence that says what would be right."""

import traceback
from functools import partial
from pathlib import Path

import pytest
import torch
from refusals import failed, refused
from small_pipeline import SGD, X, Y, pipeline
from torch import nn
from torch.nn.functional import mse_loss
from training_options import pipeline_with

import rpc_pipe
from rpc_pipe import Pipeline, Training
from rpc_pipe.dependency import ConfigError, PipeError, WorkerFailure
from rpc_pipe.workers.compute.autograd_graph import refuse_unowned

PACKAGE = Path(rpc_pipe.__file__).parent
SLOWER = partial(torch.optim.lr_scheduler.StepLR, step_size=1)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda pipe: pipe.step(X), r"batch is a Tensor: must be \(inputs, targets\)"),
        (lambda pipe: pipe.step((X, Y, X)), "batch is a tuple of 3: must be"),
        (lambda pipe: pipe.step((X.numpy(), Y.numpy())), "found no tensor .*torch.as_tensor makes one"),
        (lambda pipe: pipe.step((X[:0], Y[:0])), "the batch has no rows: needs at least 1"),
        (lambda pipe: pipe.checkpoints.every(0, "x"), "steps 0: must be a whole number, at least 1"),
        (lambda pipe: pipe.checkpoints.save("x", keep=-1), "keep -1: must be a whole number, at least 1"),
        (lambda pipe: pipe.weights.save(""), "'': must be the path of a file or folder"),
        (lambda pipe: pipe.checkpoints.save(3), "3: must be the path of a file or folder"),
        (lambda pipe: pipe.weights.load_pretrained(None), "None: must be the path of a file or folder"),
        (lambda pipe: pipe.step((X.to_sparse(), Y)), "batch: "),
        (lambda pipe: pipe.step((X, {"y": Y, "names": ["a"] * len(X)})), r"batch\[1\]\['names'\]: "),
        (lambda pipe: pipe.step((X + torch.ones(1).requires_grad_(), Y)), r"batch\[0\]: requires a gradient"),
        (lambda pipe: pipe.step(microbatches=[(X, Y), (X, nn.Parameter(X[:, :1]))]), r"batch\[1\]\[1\]: requires"),
        (lambda pipe: pipe.step(((torch.ones(1, 6), torch.arange(3)), Y[:1])), r"batch\[0\]\[0\]: has one row"),
        (lambda pipe: pipe.step((X, torch.ones(1, 6).long())), r"batch\[1\]: has one row"),
        (lambda pipe: setattr(pipe, "learning_rate", float("nan")), "learning_rate nan: "),
        (lambda pipe: pipe.modify(3), "modify 3: "),
        (lambda pipe: pipe.step(), "batch: pass one, or else microbatches="),
        (lambda pipe: pipe.step((X, Y), microbatches=[(X, Y)]), "batch: pass one, "),
        (lambda pipe: pipe.step(microbatches=[]), "must be a list of at least one"),
        (lambda pipe: pipe.step(microbatches=[(X, Y), (X[:0], Y[:0])]), "microbatch 1 has no rows"),
        (lambda pipe: pipe.evaluate(microbatches=[(X, Y), X]), "batch is a Tensor: must be"),
    ],
)
def test_what_is_no_batch_or_no_number_is_refused_in_one_sentence(call, message, tmp_path, monkeypatch):
    """An encoder in front of the pipeline was not trained; packed sequences whose bounds counted as rows trained on
    another loss, unless the batch had "labels"."""
    monkeypatch.chdir(tmp_path)  # weights without a place are kept in the current folder
    with pytest.raises(ConfigError, match=message):
        call(pipeline())


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("num_workers", [1, 2])
def test_training_without_gradients_is_refused(mode, num_workers):
    """It trained under no_grad, where one process's backward raises; under inference_mode the loss was blamed."""
    pipe, calm = pipeline(num_workers=num_workers), pipeline(num_workers=num_workers)
    for _ in range(2):
        for name, call in {"step": lambda: pipe.step((X, Y)), "train": lambda: next(pipe.train([(X, Y)]))}.items():
            with mode(), refused(name):
                call()
        with mode():
            assert pipe.evaluate((X, Y)) == calm.evaluate((X, Y))
        assert pipe.step((X, Y)) == calm.step((X, Y))


def test_a_worker_without_the_inputs_of_a_whole_model_is_told_that_it_needs_them():
    """As in torch.distributed.pipelining, one gave the inputs to the first worker alone: "microbatch 0 has no rows"."""
    whole = nn.Sequential(nn.Linear(4, 4))
    pipe = Pipeline(lambda: whole, nn.functional.cross_entropy, num_microbatches=2)
    with refused("batch"):
        pipe.evaluate((None, Y))


@pytest.mark.parametrize(
    "options, message",
    [
        ({"num_workers": 9}, "num_workers"),
        ({"split": 2}, "split"),
        ({"schedule_options": "window=2"}, "schedule_options"),
        ({"num_workers": 0}, "num_workers"),
        ({"seed": 2**63}, "seed"),
        ({"num_microbatches": 0}, "num_microbatches"),
        ({"stall_s": float("nan")}, "stall_s"),
        ({"num_microbatches": 4.0}, "num_microbatches"),
        ({"seed": None}, "seed"),
        ({"order": "best"}, "order"),
        ({"optimizer": torch.optim.SGD([nn.Parameter(X)], lr=0.5)}, "optimizer"),
        ({"optimizer": "adam"}, "optimizer"),
        ({"optimizer": lambda: SGD([nn.Parameter(X)])}, "optimizer"),
        ({"optimizer": None, "lr_scheduler": SLOWER}, "lr_scheduler"),
        ({"lr_scheduler": SLOWER(SGD([nn.Parameter(X)]))}, "lr_scheduler"),
        ({"loss": nn.CrossEntropyLoss}, "loss_fn"),
        ({"loss": 0.5}, "loss_fn"),
        ({"device": "gpu"}, "device"),
        ({"schedule": "1f2b"}, "schedule"),
        ({"schedule": "1F1B"}, "schedule"),
        ({"schedule": "Schedule1F1B"}, "schedule"),
        ({"schedule": "ZBVZeroBubble"}, "schedule"),
        ({"split": [1, 1]}, "split"),
        ({"schedule": int}, "schedule"),
        ({"device": "tpu"}, "device"),
        ({"schedule_options": {"windows": 3}}, "windows"),
        ({"schedule_options": {"window": "x"}}, "window"),
        ({"schedule": "gpipe", "schedule_options": {"b_order": "up"}}, "b_order"),
        ({"loss": None}, "loss_fn"),
    ],
)
def test_wrong_options_say_what_would_be_right(options, message):
    with refused(message):
        pipeline(**options)


class _Weighed(nn.Module):
    """A loss function with a parameter, or one that counts."""

    def __init__(self, counts=False):
        super().__init__()
        self.counts, self.calls = counts, 0
        self.weight = nn.Parameter(torch.ones(()), requires_grad=not counts)

    def forward(self, output, target):
        self.calls += self.counts
        return nn.functional.cross_entropy(output, target) * self.weight


def test_a_parameter_of_the_loss_function_is_not_left_untrained_silently():
    """Nor by an optimizer of the user's own: replicas had a part of its gradient each, and none clipped it."""
    loss_fn = _Weighed()
    pipe = pipeline(loss=lambda output, target: loss_fn(output, target))
    with refused("loss", WorkerFailure):
        pipe.step((X, Y))


def test_a_penalty_on_the_weights_of_all_stages_is_refused():
    """Where stages are threads, the other stage's update may have taken the gradient already, so nobody knew."""
    layers = [nn.Linear(4, 4), nn.Linear(4, 4)]
    penalty = sum(parameter.pow(2).sum() for layer in layers for parameter in layer.parameters())
    with refused("loss"):
        refuse_unowned(penalty, layers[1].parameters())


def test_an_optimizer_of_more_than_its_stage_is_refused():
    """In threads every stage made a step with it: loss parameters, or all weights, took as many as there are stages."""
    loss_fn, model = _Weighed(), nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)])
    for more in (loss_fn, model):
        with refused("optimizer"):
            pipeline(model, loss_fn, optimizer=lambda named: SGD([*{*(p for _, p in named), *more.parameters()}]))  # noqa: B023


def test_a_weight_of_the_loss_that_wants_a_gradient_is_refused():
    """The sum was divided by it as by a number, and the model learnt nothing of it."""

    def weighed(output, target):
        weight = output.sigmoid()[:, 0]
        return (nn.functional.cross_entropy(output, target, reduction="none") * weight).sum(), weight.sum()

    with refused("loss_fn", WorkerFailure):
        pipeline(loss=weighed).step((X, Y))
    assert pipeline(loss=weighed).evaluate((X, Y)) > 0


@pytest.mark.parametrize("numpy", [False, True])
@pytest.mark.parametrize("schedule", ["1f1b", "pipedream"])
def test_a_batch_in_memory_that_is_used_again_is_refused(schedule, numpy):
    """`train` reads ahead, and so trained on the second batch twice and never on the first."""
    x, y = X.clone(), Y.clone()

    def batches():
        for number in range(4):
            (x.numpy() if numpy else x)[:] = X * number
            yield (torch.from_numpy(x.numpy()) if numpy else x), y

    with refused("train"):
        list(pipeline(schedule=schedule).train(batches()))
    assert len(list(pipeline(schedule=schedule).train([(X, Y)] * 3))) == 3


def test_a_part_of_a_batch_is_no_batch_that_was_written():
    """Their first microbatches are the same memory; because they are described otherwise, this was refused."""
    batches = [(X[:4], Y[:4]), (X[:3], Y[:3]), (X[:1], Y[:1]), (X[:4], Y[:4])]
    pipe, alone = pipeline(), pipeline()
    assert list(pipe.train(batches)) == list(map(alone.step, batches))


def test_a_shorter_batch_in_memory_that_is_used_again_is_refused():
    """The last batch of a set has fewer rows, so that it was taken for another: what was trained on was written."""
    x = X.clone()

    def batches():
        for rows in (8, 8, 5):
            if rows < 8:
                x[:rows].neg_()
            yield x[:rows], Y[:rows]

    with refused("train"):
        list(pipeline().train(batches()))


def test_a_loss_function_that_counts_is_refused_with_replicas():
    assert pipeline(loss=_Weighed(counts=True)).step((X, Y)) > 0
    with refused("loss_fn", WorkerFailure):
        pipeline(loss=_Weighed(counts=True), schedule="chimera").step((X, Y))


class Centered(nn.Module):
    """Averages outputs and takes the average off, as DINO's loss does; what it writes down nobody reads."""

    def __init__(self, averages):
        super().__init__()
        self.averages, self.log = averages, []
        self.register_buffer("center", torch.zeros(()))

    def forward(self, output, target):
        found = nn.functional.cross_entropy(output - self.center, target)
        self.log.append(float(found.detach()))
        if self.averages:
            self.center = self.center * 0.9 + output.detach().mean() * 0.1
        return found


def test_a_loss_function_that_averages_is_refused_with_replicas_and_one_with_a_log_is_not():
    assert pipeline(loss=Centered(averages=False), schedule="chimera").step((X, Y)) > 0
    with refused("loss_fn", WorkerFailure):
        pipeline(loss=Centered(averages=True), schedule="chimera").step((X, Y))


@pytest.mark.parametrize("second", [{}, None, torch.ones(2)])
def test_what_a_loss_function_returns_besides_is_a_weight_or_refused(second):
    pipe = pipeline(loss=lambda output, target: (nn.functional.cross_entropy(output, target), second))
    with refused("loss_fn", WorkerFailure):
        pipe.step((X, Y))


@pytest.mark.parametrize(
    "loss_fn",
    [nn.MSELoss(reduction="sum"), partial(nn.functional.mse_loss, reduction="sum"), nn.L1Loss(reduction="none")],
)
def test_a_sum_is_not_taken_for_a_mean(loss_fn):
    """It counted by its microbatch's share of the rows: a quarter of what one process trains by."""
    with refused("loss_fn"):
        pipeline(loss=loss_fn)
    with refused("metric"):
        pipeline().evaluate((X, Y), metric=loss_fn)


@pytest.mark.parametrize(("left_out", "lines"), [([0, 1, 4], 1), ([], 0), ([0, 2, 5, 8], 0)])
def test_means_over_unequal_numbers_of_labels_get_one_line(left_out, lines, caplog):
    """A padded token of a row with few labels weighed more than in the whole batch, and nobody said so."""
    y = Y.index_fill(0, torch.tensor(left_out, dtype=torch.int64), -100)
    pipe = pipeline(num_workers=2, num_microbatches=4 if not left_out[3:] else 2)
    for _ in range(2):
        pipe.step((X, y))
    assert sum("-100" in line for line in caplog.messages) == lines


@pytest.mark.parametrize(("second", "lines"), [("accuracy", 1), ("rows", 0), ("one", 0)])
def test_a_metric_beside_the_loss_is_told_from_a_weight(second, lines, caplog):
    """A loop that returns (loss, accuracy) trained on the mean of losses divided by the accuracy, in silence."""

    def loss(output, target):
        metrics = {"accuracy": (output.argmax(-1) == target).float().mean(), "rows": len(target), "one": 1}
        return nn.functional.cross_entropy(output, target), metrics[second]

    pipe = pipeline(loss=loss, num_workers=2, num_microbatches=2)
    for _ in range(2):
        pipe.step((X, Y))
    assert sum("(sum, weight)" in line for line in caplog.messages) == lines


def test_a_metric_of_all_rows_is_not_taken_for_a_mean():
    """A macro accuracy of three microbatches was averaged: 0.29 for 0.20."""
    metric = pytest.importorskip("torchmetrics.classification").MulticlassF1Score(3)
    with refused("metric"):
        pipeline().evaluate((X, Y), metric=metric)


def test_a_list_with_something_for_each_row_is_refused():
    """It went whole to every microbatch, and all of them computed by what was of the first rows."""

    def named(output, target):
        numbers, names = target
        return nn.functional.cross_entropy(
            output * torch.tensor([len(n) for n, _ in zip(names, output, strict=False)])[:, None], numbers
        )

    pipe, names = pipeline(loss=named), ["a" * i for i in range(10)]
    for rows in (names, tuple(names)):
        with refused("batch[1][1]"):
            pipe.step((X, (Y, rows)))
    pipe.step(microbatches=[(X[:5], (Y[:5], names[:5])), (X[5:], (Y[5:], names[5:]))])
    few = pipeline(loss=lambda output, target: nn.functional.cross_entropy(output, target[0]))
    few.step((X, (Y, names[:3], [None] * 10, {name: 1 for name in names})))


def test_training_is_given_as_what_it_is():
    with refused("training"):
        Pipeline([nn.Linear(4, 4)], mse_loss, num_microbatches=2, training=SGD)


@pytest.mark.parametrize(
    ("loss", "sentence"),
    [
        (lambda output, target: 0.5, "loss_fn returned a float: it must return a number as a tensor, or "),
        (lambda output, target: output.detach().sum(), "loss: depends on no parameter that requires a gradient"),
    ],
    ids=["float", "detached"],
)
def test_what_is_refused_in_a_step_is_a_sentence_without_our_traceback(loss, sentence):
    """The sentence was followed by a traceback in which every line was of this package."""
    layers = [nn.Linear(4, 4), nn.Linear(4, 2)]
    pipe = Pipeline(layers, loss, num_microbatches=2, num_workers=2, training=Training(torch.optim.SGD))
    with pytest.raises(WorkerFailure) as raised:
        pipe.step((torch.randn(8, 4), torch.zeros(8)))
    first, *others = str(raised.value).splitlines()
    assert first.startswith(f"worker 1 failed (running 1F0, step 1): {sentence}")
    assert others == ["stage 1, microbatch 0, given float32[4, 4]"]
    assert isinstance(raised.value.__cause__, ConfigError)  # which a launcher tells alone, with exit code 2
    pipe.close()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"optimizer": partial(torch.optim.SGD, lrr=0.1)}, "optimizer"),
        ({"optimizer": partial(torch.optim.SGD, lr=-1.0)}, "optimizer"),
        ({"optimizer": lambda parameters: None}, "optimizer"),
        ({"lr_scheduler": torch.optim.lr_scheduler.StepLR}, "lr_scheduler"),
        ({"lr_scheduler": lambda optimizer: None}, "lr_scheduler"),
    ],
)
def test_a_factory_that_makes_nothing_of_use_is_named(more, message):
    """These were torch's errors, which say neither optimizer nor lr_scheduler, or an AttributeError of ours."""
    with refused(message):
        pipeline_with([nn.Linear(4, 2)], nn.functional.mse_loss, num_microbatches=2, **{"optimizer": SGD, **more})


def test_a_class_in_place_of_a_layer_is_told_without_a_line_of_ours():
    with refused("model"):
        Pipeline([nn.Linear], nn.functional.mse_loss, num_microbatches=2, training=Training(SGD))


def test_fewer_rows_than_microbatches_are_told_once(caplog):
    """A user who typed 16 got 8, and another bubble, silently."""
    pipe = Pipeline([nn.Linear(4, 4), nn.Linear(4, 4)], nn.functional.mse_loss, num_workers=2, num_microbatches=16)
    batch = torch.ones(8, 4), torch.ones(8, 4)
    pipe.evaluate(batch)  # has no bubble worth a line
    for _ in range(2):
        pipe.step(batch)
    told = [each for each in caplog.messages if "rows" in each]
    assert told == ["num_microbatches=16: a batch of 8 rows makes 8: its bubble is larger"]


def _own_frames(error):
    """Return how many frames of ours are shown of an error and of its causes."""
    return sum(line.startswith(f'  File "{PACKAGE}') for line in traceback.format_exception(error))


def test_a_refusal_is_shown_without_our_frames_and_a_layers_error_with_its_own():
    """Five to twelve frames of ours stood above each sentence in `python train.py`."""
    pipe = pipeline(loss=lambda output, target: 1.0)
    for call in (
        lambda: pipe.step(X),
        lambda: next(pipe.train([X])),
        lambda: pipe.step((X, Y)),
        lambda: pipeline(order=1),
    ):
        with pytest.raises((ConfigError, WorkerFailure)) as raised:
            call()
        assert 1 <= _own_frames(raised.value) <= 2  # where it leaves the public method, which in `train` are two
    with pytest.raises(WorkerFailure) as raised:
        pipe.predict(X[:, :1])
    assert _own_frames(raised.value) == 1 and isinstance(raised.value.__cause__, RuntimeError)


def test_a_loss_functions_error_is_called_that_and_shown_once():
    """A mistake in `loss_fn` came with 70 lines, the traceback twice, and without a word of where it was made."""

    def mistaken(output, target):
        raise ArithmeticError("my own mistake")

    pipe = pipeline(loss=mistaken)
    with failed(ArithmeticError) as raised:
        pipe.step((X, Y))
    shown = "".join(traceback.format_exception(raised.value))
    assert shown.count("in mistaken") == 1 and shown.count("\n") < 30, shown
    assert "in mistaken" in raised.value.remote_traceback  # what a launcher or another process shows


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: Pipeline({}, mse_loss, num_microbatches=2), "model: is a dict; must be a module, layers"),
        (lambda: Pipeline([nn.Linear(2, 2)], mse_loss, plan=[]), "plan []: must be a plan of rpc-pipe plan, its file"),
        (lambda: Pipeline([nn.Linear(2, 2)], mse_loss, microbatches=2), "unexpected keyword argument 'microbatches'"),
    ],
)
def test_values_of_a_wrong_type_get_a_sentence(call, sentence):
    """Each was a bare TypeError of Python's, such as 'int' object is not callable."""
    with pytest.raises(ConfigError) as raised:
        call()
    assert sentence in str(raised.value)


def test_training_without_an_optimizer_is_said_once(caplog):
    """A hundred steps returned losses, `save` wrote the first weights, and nothing said that nothing was trained."""
    forgotten = Pipeline([nn.Linear(4, 2)], mse_loss, num_microbatches=2)
    for _ in range(2):
        forgotten.step((X, torch.zeros(len(X), 2)))
    assert [text.partition(":")[0] for text in caplog.messages] == ["step trains nothing, as there is no optimizer"]
    caplog.clear()
    meant = Pipeline([nn.Linear(4, 2)], mse_loss, num_microbatches=2, training=Training(None))
    meant.step((X, torch.zeros(len(X), 2)))
    assert caplog.messages == []


def test_the_learning_rate_can_be_read_and_set():
    pipe = Pipeline(
        [nn.Linear(4, 4), nn.Linear(4, 2)], mse_loss, num_microbatches=2, num_workers=2,
        training=Training(partial(torch.optim.SGD, lr=0.5)),
    )  # fmt: skip
    before = [p.detach().clone() for p in pipe.weights.state_dict().values()]
    assert pipe.learning_rate == 0.5
    pipe.learning_rate = 0.0
    pipe.step((X, torch.zeros(len(X), 2)))
    assert pipe.learning_rate == 0.0 and all(map(torch.equal, before, pipe.weights.state_dict().values()))


def test_a_hook_that_calls_the_pipeline_is_refused_by_threads_too():
    """A worker's thread waited for itself, for ever; a process refused it."""
    pipe = Pipeline([nn.Linear(4, 4), nn.Linear(4, 2)], mse_loss, num_microbatches=2, num_workers=2)
    batch = X, torch.zeros(len(X), 2)
    with refused("pipeline", PipeError):
        pipe.gather("value", lambda actor: pipe.evaluate(batch))
    pipe.evaluate(batch)
