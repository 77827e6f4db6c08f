"""Checkpoints: gone on from with any number of workers, cut and schedule; damaged ones are told, and change nothing."""

import copy
import math
import os
import resource
import shutil
import signal
import sys
import threading
import time
from contextlib import contextmanager, nullcontext
from functools import partial

import pytest
import torch
from processes import rpc_pipe, start, unmerged
from refusals import refused
from safetensors.torch import load_file
from saved_training import BATCHES, DONE, LAYERS, bits, pipeline
from torch import nn

from rpc_pipe.checkpoints import folder as folders
from rpc_pipe.checkpoints import writing
from rpc_pipe.checkpoints.reading import Checkpoint
from rpc_pipe.dependency import ConfigError, StorageError


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A folder with a checkpoint after `DONE` steps on four workers, and what they did afterwards."""
    folder = tmp_path_factory.mktemp("checkpoints")
    pipe = pipeline(4)
    losses = [pipe.step(batch) for batch in BATCHES[:DONE]]
    before = torch.get_rng_state()
    path = pipe.checkpoints.save(folder, extra={"epoch": 2, "pair": (1, 0.5)})
    drawn = torch.rand(3)
    torch.set_rng_state(before)
    losses += [pipe.step(batch) for batch in BATCHES[DONE:]]
    return folder, path, losses, bits(pipe), drawn


@pytest.mark.parametrize("num_workers, schedule", [(2, "zb-h1"), (3, "zb-h2"), (1, "eager-1f1b"), (2, "interleaved")])
def test_training_goes_on_as_if_nothing_had_been(written, num_workers, schedule):
    folder, path, losses, weights, drawn = written
    pipe = pipeline(num_workers, schedule)
    restored = pipe.checkpoints.load(folder)
    assert (restored.path, restored.step, restored.extra) == (path, DONE, {"epoch": 2, "pair": (1, 0.5)})
    assert torch.equal(torch.rand(3), drawn)
    assert pipe.steps_done == DONE
    assert [pipe.step(batch) for batch in BATCHES[DONE:]] == losses[DONE:]
    assert bits(pipe) == weights


class Quantized(nn.Module):
    """Moves a row of its codebook towards what it is given, and adds it, so that buffers take part in training."""

    def __init__(self):
        super().__init__()
        self.register_buffer("codebook", torch.zeros(4, 16))

    def forward(self, x):
        if self.training:
            self.codebook = 0.9 * self.codebook + 0.1 * x.detach().mean(0)
        return x + self.codebook[0]


@pytest.mark.parametrize("options", [{"replicas": 2}, {"replicas": 2, "zero": 1}, {"schedule": "chimera"}])
def test_buffers_of_each_replica_go_on_where_they_were(tmp_path, caplog, options):
    """Those of the first were saved alone: after a restart statistics of the others, and weights that depend on their
    buffers, were not those of an undisturbed run."""
    layers = [*LAYERS[:3], Quantized, *LAYERS[4:]]
    undisturbed, resumed = (pipeline(4, layers=layers, **options) for _ in range(2))
    for batch in BATCHES[:DONE]:
        undisturbed.step(batch)
    undisturbed.checkpoints.save(tmp_path)
    resumed.checkpoints.load(tmp_path)
    assert not [record for record in caplog.records if record.name.endswith("facade")]
    for batch in BATCHES[DONE:]:
        assert resumed.step(batch) == undisturbed.step(batch)
    assert bits(resumed) == bits(undisturbed)
    assert resumed.evaluate(BATCHES[0]) == undisturbed.evaluate(BATCHES[0])
    caplog.clear()
    pipeline(2, layers=layers).checkpoints.load(tmp_path)
    (record,) = caplog.records
    assert record.args[1:] == (2, "3.codebook", 3, 1)


@pytest.mark.parametrize("schedule", ["chimera", "dualpipe", "gpipe"])
def test_schedules_that_sum_in_another_order_begin_with_the_same_bits(written, schedule):
    pipe, same = pipeline(2, schedule), pipeline(1)
    pipe.checkpoints.load(written[0])
    same.checkpoints.load(written[0])
    assert bits(pipe) == bits(same)
    assert pipe.evaluate(BATCHES[0]) == same.evaluate(BATCHES[0])


def test_a_scheduler_in_a_scheduler_has_its_milestones_again(tmp_path):
    """They were given back as a dict, and the step that passed from warm-up to MultiStepLR had no `elements`."""
    undisturbed, resumed = pipeline(1), pipeline(1)
    undisturbed.step(BATCHES[0])
    undisturbed.checkpoints.save(tmp_path)
    resumed.checkpoints.load(tmp_path)
    assert [resumed.step(b) for b in BATCHES[1:]] == [undisturbed.step(b) for b in BATCHES[1:]]


def tied():
    layers = [nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)]
    layers[2].weight = layers[0].weight
    return layers


@pytest.mark.parametrize("num_workers, schedule, layers", [(2, "1f1b", tied), (2, "chimera", lambda: LAYERS[:4])])
def test_gradients_kept_for_the_next_step_are_summed_as_without_a_stop(tmp_path, num_workers, schedule, layers):
    """The parts of a gradient that two stages or replicas had were added up when they were read, and what came next
    added to the sum: after a Ctrl-C between two steps of `accumulate=2`, a GPT-2 went on with other last bits."""
    wide = partial(pipeline, num_workers, schedule, lr_scheduler=None, accumulate=2, max_grad_norm=None)
    torch.manual_seed(1)
    made = layers()
    batches = [(x, torch.randn(8, 16) if schedule == "chimera" else y) for x, y in BATCHES]
    undisturbed, stopped, resumed = (wide(copy.deepcopy(made)) for _ in range(3))
    for batch in batches:
        undisturbed.step(batch)
    stopped.step(batches[0])
    stopped.checkpoints.save(tmp_path)
    resumed.checkpoints.load(tmp_path)
    for batch in batches[1:]:
        resumed.step(batch)
    assert bits(resumed) == bits(undisturbed)
    fewer = pipeline(1, layers=copy.deepcopy(made), accumulate=2, max_grad_norm=None, lr_scheduler=None)
    fewer.checkpoints.load(tmp_path)
    for batch in batches[1:]:
        fewer.step(batch)
    for name, tensor in fewer.weights.state_dict().items():
        torch.testing.assert_close(tensor, undisturbed.weights.state_dict()[name], rtol=1e-4, atol=1e-5)


def test_a_script_that_knows_nothing_of_checkpoints_ends_with_the_same_weights(tmp_path):
    def script(pipe, stop=99):
        told = []
        for step, batch in enumerate(BATCHES[:6], 1):
            told.append((pipe.step(batch), pipe.grad_norm, pipe.steps_done, pipe.evaluate(BATCHES[0])))
            pipe.weights.save(tmp_path / f"{step}.safetensors")
            if step == stop:
                break
        return told, bits(pipe)

    undisturbed, weights = script(pipeline(2))
    pipe = pipeline(3)
    pipe.checkpoints.every(2, tmp_path, keep=1)
    script(pipe, stop=5)
    pipe.close()
    first = (tmp_path / "1.safetensors").read_bytes()
    assert [path.name for path in folders.complete(tmp_path)] == ["step-00000004"]
    pipe = pipeline(1)
    pipe.checkpoints.resume(tmp_path)
    told, again = script(pipe)
    assert again == weights
    assert [(norm, step) for _, norm, step, _ in told[:3]] == [(None, 1), (None, 2), (None, 3)], (
        "the script's own count"
    )
    assert all(math.isnan(number) for loss, _, _, held_out in told[:3] for number in (loss, held_out))
    assert told[3:] == undisturbed[3:], "from the checkpoint on all is as it was, an evaluation just behind it too"
    assert (tmp_path / "1.safetensors").read_bytes() == first, "weights of then, not of the checkpoint"


def test_what_is_asked_while_steps_are_skipped_is_no_number(tmp_path):
    """The last loss of the run before came instead: "held out 3.515" of step 20 became 3.044 in the log."""
    pipe = pipeline(2)
    losses = [pipe.step(batch) for batch in BATCHES[:2]]
    held_out = pipe.evaluate(BATCHES[1])
    pipe.checkpoints.save(tmp_path)
    resumed = pipeline(2)
    resumed.checkpoints.resume(tmp_path)
    assert resumed.replaying and resumed.predict(BATCHES[0][0]) is None
    assert math.isnan(resumed.evaluate(BATCHES[1])) and math.isnan(resumed.step(BATCHES[0]))
    assert resumed.replaying and resumed.grad_norm is None and math.isnan(resumed.evaluate(iter(BATCHES[:2])))
    assert resumed.step(BATCHES[1]) == losses[1], "which the weights from here on have had"
    assert not resumed.replaying and resumed.evaluate(BATCHES[1]) == held_out


def test_a_script_that_trains_by_steps_goes_on_where_a_stream_was_written(tmp_path):
    """It was refused, as its calls had to be those of the run that wrote the checkpoint, in their order."""
    pipe = pipeline(2)
    undisturbed = list(pipe.train(BATCHES))
    written = pipeline(2)
    written.checkpoints.every(3, tmp_path, keep=1)
    next(stream := written.train(BATCHES)), next(stream), next(stream)
    stream.close()
    written.close()
    resumed = pipeline(2)
    resumed.checkpoints.resume(tmp_path)
    assert [resumed.step(batch) for batch in BATCHES][3:] == undisturbed[3:]
    assert bits(resumed) == bits(pipe)


def test_a_stream_skips_the_batches_that_it_has_behind_it(tmp_path):
    undisturbed = list(pipeline(2).train(BATCHES))
    pipe = pipeline(2)
    for step, _ in enumerate(pipe.train(BATCHES)):
        if step == 3:
            pipe.checkpoints.save(tmp_path)
            break
    pipe = pipeline(3)
    pipe.checkpoints.resume(tmp_path)
    told = list(pipe.train(BATCHES))
    assert told[3:] == undisturbed[3:] and all(map(math.isnan, told[:3]))


@pytest.mark.parametrize("streamed", [False, True])
def test_a_stop_ends_the_skipping_of_batches(tmp_path, streamed):
    """A skipped step looked at no request to stop."""
    pipe = pipeline(2)
    for batch in BATCHES[:5]:
        pipe.step(batch)
    pipe.checkpoints.save(tmp_path)
    resumed, read = pipeline(2), []
    resumed.checkpoints.resume(tmp_path)
    batches = (read.append(batch) or batch for batch in BATCHES)
    for _ in resumed.train(batches) if streamed else map(resumed.step, batches):
        if len(read) == 2:
            resumed.request_stop()
        if resumed.stopped and not streamed:
            break
    assert len(read) <= (5 if streamed else 3), "a stream reads ahead"
    assert resumed.stopped and resumed.steps_done == 5 and bits(resumed) == bits(pipe)
    with pytest.raises(KeyboardInterrupt):
        resumed.step(BATCHES[0])


def test_checkpoints_of_a_long_run_are_as_small_as_those_of_a_short_one(tmp_path):
    """They kept what every step and evaluation had returned."""
    pipe, sizes = pipeline(1), []
    for number in range(1, 40):
        pipe.step(BATCHES[0])
        pipe.evaluate(BATCHES[0])
        if number in (8, 39):  # the scheduler has passed its milestones
            path = pipe.checkpoints.save(tmp_path)
            sizes.append([file.stat().st_size for file in sorted(path.glob("*.safetensors"))])
    assert sizes[0] == sizes[1]


def test_only_the_newest_are_kept_and_one_step_may_be_saved_twice(tmp_path):
    pipe = pipeline(2)
    for batch in BATCHES[:4]:
        pipe.step(batch)
        pipe.checkpoints.save(tmp_path, keep=2)
    again = pipe.checkpoints.save(tmp_path, keep=2)
    assert [path.name for path in folders.complete(tmp_path)] == ["step-00000004", "step-00000004.1"]
    assert folders.newest(tmp_path) == again
    assert sorted(os.listdir(tmp_path)) == [".lock", "step-00000004", "step-00000004.1"]
    anew = pipeline(2)
    anew.step(BATCHES[0])
    written = anew.checkpoints.save(tmp_path, keep=1)
    assert folders.complete(tmp_path) == [written], "not those of a run before that came further"


@pytest.mark.parametrize(
    "options, says",
    [
        ({"layers": [*LAYERS[:-1], partial(nn.Linear, 16, 5)]}, "checkpoint"),
        ({"layers": [*LAYERS, partial(nn.Linear, 4, 4)]}, "checkpoint"),
        ({"layers": LAYERS[:-1]}, "checkpoint"),
        ({"layers": [partial(nn.Linear, 8, 16, dtype=torch.float64), *LAYERS[1:]]}, "checkpoint"),
        ({"optimizer": partial(torch.optim.SGD, lr=0.1), "lr_scheduler": None}, "optimizer"),
        ({"optimizer": partial(torch.optim.AdamW, lr=0.1), "lr_scheduler": None}, "optimizer"),
        ({"lr_scheduler": partial(torch.optim.lr_scheduler.StepLR, step_size=2)}, "lr_scheduler"),  # had its numbers
    ],
)  # fmt: skip
def test_a_checkpoint_of_something_else_is_refused(written, options, says):
    pipe = pipeline(2, **options)
    before = bits(pipe)
    with refused(says):
        pipe.checkpoints.load(written[0])
    assert bits(pipe) == before


def test_a_half_accumulated_update_is_not_completed_by_other_parts(tmp_path):
    """Gradients that were divided by 3 were added to ones divided by 2."""
    pipe, other = pipeline(1, accumulate=3), pipeline(2, accumulate=2)
    for step, batch in enumerate(BATCHES[:3]):
        pipe.step(batch)
        pipe.checkpoints.save(tmp_path)
        with refused("accumulate") if step < 2 else nullcontext():
            other.checkpoints.load(tmp_path)


@contextmanager
def full_disk(room=1000):
    """A context in which files cannot be larger than `room` bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.parametrize("room", [1000, 10])  # even for the sentence that tells of it
def test_a_full_disk_is_told_and_the_checkpoints_before_it_stay(tmp_path, room):
    pipe = pipeline(2)
    pipe.step(BATCHES[0])
    before = pipe.checkpoints.save(tmp_path)
    unwritten = r"checkpoint .*: cannot be written: .*checkpoints before it are as they were"
    with full_disk(room), pytest.raises(StorageError, match=unwritten):
        pipe.checkpoints.save(tmp_path)
    assert sorted(os.listdir(tmp_path)) == [".lock", before.name]
    assert Checkpoint(tmp_path).step == 1
    pipe.step(BATCHES[1])
    assert pipe.checkpoints.save(tmp_path).name == "step-00000002"


def test_training_goes_on_without_checkpoints_while_a_disk_is_full(tmp_path, caplog):
    # With --checkpoint-every the run ended with exit code 2, and --max-restarts did not restart it.
    pipe = pipeline(2)
    pipe.checkpoints.every(1, tmp_path)
    pipe.step(BATCHES[0])
    pipe.checkpoints.settle()
    with full_disk():
        for batch in BATCHES[1:4]:
            pipe.step(batch)
        pipe.checkpoints.settle()
    assert [path.name for path in folders.named(tmp_path)] == ["step-00000001"]
    (said,) = [record.getMessage() for record in caplog.records]
    assert "cannot be written: File too large" in said and said.endswith("training goes on without it")
    pipe.step(BATCHES[4])
    pipe.close()
    assert [path.name for path in folders.named(tmp_path)] == ["step-00000001", "step-00000005"]


def test_a_folder_of_checkpoints_that_is_removed_in_a_run_is_told_and_made_again(tmp_path, caplog):
    # It was made without a word, and without the note of whose it is: a restart began at step 1.
    folder = tmp_path / "checkpoints"
    pipe = pipeline(2)
    pipe.checkpoints.claim(folder)
    pipe.checkpoints.every(1, folder)
    pipe.step(BATCHES[0])
    pipe.checkpoints.settle()
    shutil.rmtree(folder)
    pipe.step(BATCHES[1])
    pipe.checkpoints.settle()
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.endswith("has been removed with all that was in it; it is made again")
    assert [path.name for path in pipe.checkpoints.claim(folder)] == ["step-00000002"]


@pytest.mark.parametrize("where", ["a\0b", 5, ""])
def test_what_cannot_be_a_folder_is_told_at_once(where):
    """Worker 0 alone met it, and the others waited for what it had found until the deadline for stalls."""
    pipe = pipeline(2)
    with refused(repr(where)):
        pipe.checkpoints.claim(where)
    pipe.step(BATCHES[0])


def test_an_error_that_nobody_foresaw_is_told_to_all(tmp_path, monkeypatch):
    def fails(*_):
        raise RuntimeError("no such thing")

    monkeypatch.setattr(folders, "claim", fails)
    pipe = pipeline(2)
    with pytest.raises(RuntimeError, match="no such thing"):
        pipe.checkpoints.claim(tmp_path)


def test_storage_that_does_not_answer_is_told_in_time(tmp_path, monkeypatch):
    answer = threading.Event()
    write = writing.Snapshot.write
    monkeypatch.setattr(writing.Snapshot, "write", lambda self, place: (answer.wait(), write(self, place)))
    pipe = pipeline(2)
    pipe.step(BATCHES[0])
    pipe._session.stall_s = 0.3
    with refused("checkpoint"):
        pipe.checkpoints.save(tmp_path)
    pipe._session.stall_s = 60
    assert not pipe.checkpoints.save(tmp_path, wait=False)
    answer.set()  # it is slow only
    pipe.close()
    assert [path.name for path in folders.complete(tmp_path)] == ["step-00000001"]


def test_a_checkpoint_that_fails_at_once_is_not_missed_by_a_slower_worker(tmp_path):
    """It was gone before another process looked for it, which then said that the folder was not shared."""

    class Failing:
        is_first, num_bytes, epoch = True, 0, 0

        def write(self, place):
            (place / "half").touch()
            raise ConfigError("no room")

    place = folders.begin(tmp_path, 1)
    failed = writing.Writing([Failing()], place, {}, None, None, 10.0)
    assert str(failed.finished()) == "no room"
    assert place.is_dir() and not os.listdir(place)
    failed.discard()
    assert not os.listdir(tmp_path)


KILLED = """
import sys
sys.path[:0] = {path!r}
from saved_training import BATCHES, pipeline
pipe = pipeline(2)
pipe.step(BATCHES[0])
print("ready", flush=True)
while True:
    pipe.checkpoints.save({folder!r}, keep=2)
"""


def test_a_kill_while_saving_leaves_the_checkpoint_before_it(tmp_path):
    code = KILLED.format(path=sys.path, folder=str(tmp_path))
    pipe = pipeline(1)
    for moment in range(3):
        killed = start("-c", code)
        killed.stdout.readline()
        while folders.newest(tmp_path) is None:
            time.sleep(0.01)
        time.sleep(0.013 * moment)
        killed.kill()
        killed.communicate()
        assert pipe.checkpoints.load(tmp_path).step == 1


SCRIPT = """
import os, sys, torch
from functools import partial
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from rpc_pipe import Pipeline, Training

data = TensorDataset(torch.randn(64, 8), torch.randn(64, 4))
layers = [partial(nn.Linear, 8, 16), nn.Tanh, nn.Dropout, partial(nn.Linear, 16, 4)]
pipe = Pipeline(layers, nn.functional.mse_loss, training=Training(partial(torch.optim.AdamW, lr=1e-2)),
                num_microbatches=4)
for epoch in range(2):
    for batch in DataLoader(data, batch_size=16, shuffle=True):
        loss = pipe.step(batch)
        if pipe.steps_done == int(sys.argv[1]) and pipe.worker == 1:
            os.kill(os.getpid(), 9)
    print(f"{epoch} {loss:.7f} {pipe.evaluate(data.tensors):.7f}")
"""


def test_an_ordinary_script_that_was_killed_goes_on_with_other_workers(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)

    def run(*typed):
        done = rpc_pipe("run", script, *typed, cwd=tmp_path)
        return done, [line for line in unmerged(done.stdout).splitlines() if line.startswith("worker 0 | ")]

    _, undisturbed = run("--workers", 2, "--save", "undisturbed.safetensors", "--", 0)
    killed, _ = run("--workers", 2, "--checkpoint-every", 1, "--", 7)
    assert killed.returncode != 0
    kept = len(folders.complete(tmp_path / "checkpoints"))
    assert kept >= 4, killed.stderr
    again = "--workers", 3, "--schedule", "zb-h1", "--resume", "auto", "--save", "resumed.safetensors"
    resumed, told = run(*again, "--", 0)
    assert resumed.returncode == 0, resumed.stderr
    assert "goes on from checkpoints/step-" in resumed.stdout
    assert told[-1] == undisturbed[-1]
    weights = [load_file(tmp_path / f"{name}.safetensors") for name in ("undisturbed", "resumed")]
    assert all(torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items())


@pytest.mark.parametrize(
    "typed, says",
    [
        (["--resume", "nowhere"], "--resume nowhere: holds no complete checkpoint; auto starts at step 1"),
        (["--checkpoint-every", 0], "--checkpoint-every 0: must be at least 1"),
        (["--checkpoint-keep", 2], "--checkpoint-keep 2: without --checkpoint-every none is written"),
        (["--checkpoint-every", 2, "--checkpoint-folder", "/proc/x"], "--checkpoint-folder /proc/x: cannot be written"),
    ],
)  # fmt: skip
def test_what_is_typed_wrongly_is_told_before_anything_is_trained(typed, says):
    done = rpc_pipe("run", *typed)
    assert done.returncode == 2
    assert says in done.stderr
