"""Checkpoints: gone on from with any number of workers, cut and schedule; damaged ones are told, and change nothing."""

import copy
import json
import math
import os
import re
import resource
import signal
import sys
import threading
import time
from functools import partial

import pytest
import torch
from processes import rpc_pipe, start
from torch import nn
from torch.optim import lr_scheduler

from rpc_pipe import Pipeline
from rpc_pipe.checkpoints import folder as folders
from rpc_pipe.checkpoints import writing
from rpc_pipe.checkpoints.options import follow
from rpc_pipe.checkpoints.reading import Checkpoint
from rpc_pipe.checkpoints.resumption import Resumption
from rpc_pipe.dependency import ConfigError, Damaged
from rpc_pipe.dependency.files import DAMAGED

LAYERS = [
    partial(nn.Linear, 8, 16),
    nn.Tanh,
    partial(nn.Linear, 16, 16),
    nn.Dropout,
    partial(nn.BatchNorm1d, 16),
    partial(nn.Linear, 16, 4),
]
torch.manual_seed(0)
BATCHES = [(torch.randn(8, 8), torch.randn(8, 4)) for _ in range(7)]
DONE = 3


def adamw(named):
    decay = [p for name, p in named if name.endswith("weight")]
    rest = [p for name, p in named if not name.endswith("weight")]
    return torch.optim.AdamW([{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}], lr=1e-2)


def warmed_up(optimizer):
    warmup = lr_scheduler.LinearLR(optimizer, total_iters=2)
    return lr_scheduler.SequentialLR(optimizer, [warmup, lr_scheduler.MultiStepLR(optimizer, [1, 3])], milestones=[2])


def pipeline(num_workers, schedule="1f1b", layers=LAYERS, optimizer=adamw, **options):
    return Pipeline(
        layers, nn.functional.mse_loss, optimizer=optimizer, num_workers=num_workers, schedule=schedule,
        num_microbatches=4, **{"lr_scheduler": warmed_up, "max_grad_norm": 0.5, **options},
    )  # fmt: skip


def bits(pipe):
    return {name: tensor.numpy().tobytes() for name, tensor in pipe.state_dict().items()}


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A folder with a checkpoint after `DONE` steps on four workers, and what they did afterwards."""
    folder = tmp_path_factory.mktemp("checkpoints")
    pipe = pipeline(4)
    losses = [pipe.step(batch) for batch in BATCHES[:DONE]]
    before = torch.get_rng_state()
    path = pipe.save_checkpoint(folder, extra={"epoch": 2, "pair": (1, 0.5)})
    drawn = torch.rand(3)
    torch.set_rng_state(before)
    losses += [pipe.step(batch) for batch in BATCHES[DONE:]]
    return folder, path, losses, bits(pipe), drawn


@pytest.mark.parametrize("num_workers, schedule", [(2, "zb-h1"), (3, "zb-h2"), (1, "eager-1f1b"), (2, "interleaved")])
def test_training_goes_on_as_if_nothing_had_been(written, num_workers, schedule):
    folder, path, losses, weights, drawn = written
    pipe = pipeline(num_workers, schedule)
    restored = pipe.load_checkpoint(folder)
    assert (restored.path, restored.step, restored.extra) == (path, DONE, {"epoch": 2, "pair": (1, 0.5)})
    assert torch.equal(torch.rand(3), drawn)
    assert pipe.steps_done == DONE
    assert [pipe.step(batch) for batch in BATCHES[DONE:]] == losses[DONE:]
    assert bits(pipe) == weights


@pytest.mark.parametrize("schedule", ["chimera", "dualpipe", "gpipe"])
def test_schedules_that_sum_in_another_order_begin_with_the_same_bits(written, schedule):
    pipe, same = pipeline(2, schedule), pipeline(1)
    pipe.load_checkpoint(written[0])
    same.load_checkpoint(written[0])
    assert bits(pipe) == bits(same)
    assert pipe.evaluate(BATCHES[0]) == same.evaluate(BATCHES[0])


def test_a_scheduler_in_a_scheduler_has_its_milestones_again(tmp_path):
    """They were given back as a dict, and the step that passed from warm-up to MultiStepLR had no `elements`."""
    undisturbed, resumed = pipeline(1), pipeline(1)
    undisturbed.step(BATCHES[0])
    undisturbed.save_checkpoint(tmp_path)
    resumed.load_checkpoint(tmp_path)
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
    stopped.save_checkpoint(tmp_path)
    resumed.load_checkpoint(tmp_path)
    for batch in batches[1:]:
        resumed.step(batch)
    assert bits(resumed) == bits(undisturbed)
    fewer = pipeline(1, layers=copy.deepcopy(made), accumulate=2, max_grad_norm=None, lr_scheduler=None)
    fewer.load_checkpoint(tmp_path)
    for batch in batches[1:]:
        fewer.step(batch)
    for name, tensor in fewer.state_dict().items():
        torch.testing.assert_close(tensor, undisturbed.state_dict()[name], rtol=1e-4, atol=1e-5)


def test_a_script_that_knows_nothing_of_checkpoints_is_told_what_it_was_told(tmp_path):
    def script(pipe, stop=99):
        told = []
        for batch in BATCHES[:5]:
            told += [pipe.step(batch), pipe.grad_norm, pipe.steps_done, pipe.evaluate(BATCHES[0])]
            pipe.save(tmp_path / f"{len(told)}.safetensors")
            if len(told) == stop:
                break
        return told

    undisturbed = script(pipeline(2))
    pipe = pipeline(3)
    pipe.checkpoint_every(2, tmp_path, keep=1)
    script(pipe, stop=16)
    pipe.close()
    first = (tmp_path / "4.safetensors").read_bytes()
    assert [path.name for path in folders.complete(tmp_path)] == ["step-00000004"]
    pipe = pipeline(1)
    pipe.resume(tmp_path)
    assert script(pipe) == undisturbed
    assert (tmp_path / "4.safetensors").read_bytes() == first, "weights of then, not of the checkpoint"
    pipe = pipeline(2)
    pipe.resume(tmp_path)
    with pytest.warns(UserWarning, match="predict: call 0 of the script is behind the checkpoint"):
        pipe.predict(BATCHES[0][0])
    pipe.predict(BATCHES[0][0])
    with pytest.raises(ConfigError, match="call 1 of the script is step, and was evaluate"):
        list(pipe.train(BATCHES))


def test_a_stream_skips_the_batches_that_it_has_behind_it(tmp_path):
    undisturbed = list(pipeline(2).train(BATCHES))
    pipe = pipeline(2)
    for step, _ in enumerate(pipe.train(BATCHES)):
        if step == 3:
            pipe.save_checkpoint(tmp_path)
            break
    pipe = pipeline(3)
    pipe.resume(tmp_path)
    assert list(pipe.train(BATCHES)) == undisturbed


def test_only_the_newest_are_kept_and_one_step_may_be_saved_twice(tmp_path):
    pipe = pipeline(2)
    for batch in BATCHES[:4]:
        pipe.step(batch)
        pipe.save_checkpoint(tmp_path, keep=2)
    again = pipe.save_checkpoint(tmp_path, keep=2)
    assert [path.name for path in folders.complete(tmp_path)] == ["step-00000004", "step-00000004.1"]
    assert folders.newest(tmp_path) == again
    assert sorted(os.listdir(tmp_path)) == [".lock", "step-00000004", "step-00000004.1"]
    anew = pipeline(2)
    anew.step(BATCHES[0])
    written = anew.save_checkpoint(tmp_path, keep=1)
    assert folders.complete(tmp_path) == [written], "not those of a run before that came further"


def copied(path, tmp_path):
    for file in path.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def cut_off(path):
    file = path / "model-00002-of-00004.safetensors"
    file.write_bytes(file.read_bytes()[:-5])


def flipped(path):
    file = path / "model-00001-of-00004.safetensors"
    file.write_bytes(b"\xff" * 8 + file.read_bytes()[8:])


def no_manifest(path):
    (path / "manifest.json").unlink()


def no_part(path):
    (path / "optimizer-00003-of-00004.safetensors").unlink()


def one_bit(path):
    file = path / "model-00003-of-00004.safetensors"
    content = bytearray(file.read_bytes())
    content[-9] ^= 1
    file.write_bytes(content)


def another_step(path):
    manifest = (path / "manifest.json").read_text()
    (path / "manifest.json").write_text(re.sub(r'"step": \d', '"step": 7', manifest))


def changed(change):
    """Return what changes the manifest of a checkpoint."""

    def damage(path):
        manifest = json.loads((path / "manifest.json").read_text())
        manifest.pop("sum")  # as if it had been written so
        change(manifest)
        (path / "manifest.json").write_text(json.dumps(manifest))

    return damage


def wrong_form(manifest):
    for file in manifest["files"].values():
        file["tensors"] = dict.fromkeys(file["tensors"], 5)


@pytest.mark.parametrize(
    "damage, says",
    [
        (cut_off, "model-00002-of-00004.safetensors: has .* bytes of .*: it was cut off"),
        (flipped, r"model-00001-of-00004.safetensors: .*cannot be read"),
        (one_bit, r"model-00003-of-00004.safetensors: tensor \S+ is not what was written"),
        (another_step, "manifest.json: is damaged: it is not what was written"),
        (no_part, "optimizer-00003.* is missing"),
        (
            lambda path: (path / "manifest.json").write_text('{"format": 1, "st'),
            "manifest.json: cannot be read as JSON",
        ),
        (lambda path: (path / "manifest.json").write_text("[]"), "manifest.json: is not of format 1"),
        (changed(lambda told: told.pop("stages")), "manifest.json: is damaged: KeyError 'stages'"),
        (changed(lambda told: told.update(step=float("inf"))), "manifest.json: is damaged: OverflowError"),
        (changed(lambda told: told.update(extra={"$tensor": [1, "load"]})), "manifest.json: is damaged: TypeError"),
        (changed(lambda told: told["stages"]["0"].pop("optimizer")), "is damaged, or of another version: KeyError"),
        (changed(wrong_form), "is damaged, or of another version: TypeError"),
        (changed(lambda told: told.update(calls=17)), "is damaged.*: ValueError: 17 calls, but 16 rows of results"),
        (changed(lambda told: told.update(calls=-1)), "is damaged.*: ValueError: -1 calls, but 16 rows of results"),
        (changed(lambda told: told.update(calls="3")), "is damaged.*: TypeError"),
        (no_manifest, "holds no complete checkpoint"),
    ],
)
def test_a_damaged_checkpoint_is_named_and_changes_nothing(written, tmp_path, damage, says):
    path = copied(written[1], tmp_path)
    damage(path)
    pipe = pipeline(3)
    before = bits(pipe)
    with pytest.raises(ConfigError, match=says):
        pipe.load_checkpoint(path)
    assert bits(pipe) == before
    assert pipe.steps_done == 0
    pipe.step(BATCHES[0])


def followed(folder, resume=None, steps=5):
    """Return what a job of some steps tells at its start, and its weights at its end; it writes a checkpoint a step."""
    pipe = pipeline(4)
    told = follow(pipe, 1, str(folder), None, resume, anew=True)
    for batch in BATCHES[:steps]:
        pipe.step(batch)
    weights = bits(pipe)
    pipe.close()
    return told, weights


@pytest.mark.parametrize("damage", [cut_off, flipped, one_bit, another_step, no_part, no_manifest])
def test_a_restart_goes_on_from_an_older_checkpoint_where_the_newest_is_damaged(tmp_path, damage):
    """It ended with exit code 2, or went on from an older one without a word where the manifest was gone."""
    _, undisturbed = followed(tmp_path / "other")
    followed(tmp_path, steps=3)
    damage(tmp_path / "step-00000003")
    told, weights = followed(tmp_path)
    assert re.fullmatch(r"damaged: .*step-00000003.*; goes on from .*step-00000002, after 2 steps instead", told), told
    assert weights == undisturbed


def test_a_restart_of_which_all_checkpoints_are_damaged_begins_as_it_did_at_first(tmp_path):
    _, undisturbed = followed(tmp_path, steps=1)
    no_part(tmp_path / "step-00000001")
    told, weights = followed(tmp_path, steps=1)
    assert re.fullmatch(r"damaged: .*step-00000001.* is missing; training starts at step 0 instead", told), told
    assert weights == undisturbed


def test_a_damaged_checkpoint_that_is_typed_is_no_other(written, tmp_path):
    for step in 1, 2:
        (tmp_path / f"step-{step:08}").mkdir()
        copied(written[1], tmp_path / f"step-{step:08}")
    cut_off(tmp_path / "step-00000002")
    pipe = pipeline(3)
    for typed in tmp_path / "step-00000002", tmp_path:
        with pytest.raises(Damaged, match=r"step-00000002.*: it was cut off"):
            follow(pipe, None, str(tmp_path), None, str(typed), anew=False)
    assert "step-00000001, after 3 steps instead" in follow(pipe, None, str(tmp_path), None, "auto", anew=False)
    cut_off(tmp_path / "step-00000001")
    with pytest.raises(Damaged, match=r"step-00000002.*: it was cut off"):
        follow(pipe, None, str(tmp_path), None, "auto", anew=False)


@pytest.mark.parametrize(
    "options, says",
    [
        ({"layers": [*LAYERS[:-1], partial(nn.Linear, 16, 5)]}, r"5.weight is float32 .*\(4, 16\), and .*\(5, 16\)"),
        ({"layers": [*LAYERS, partial(nn.Linear, 4, 4)]}, "has no tensor 6.weight: it is of another model"),
        ({"layers": LAYERS[:-1]}, "has 5.bias, which this model does not have"),
        ({"layers": [partial(nn.Linear, 8, 16, dtype=torch.float64), *LAYERS[1:]]}, "0.weight is float32 .* float64"),
        ({"optimizer": partial(torch.optim.SGD, lr=0.1), "lr_scheduler": None}, "SGD: the checkpoint is of AdamW"),
        ({"optimizer": partial(torch.optim.AdamW, lr=0.1), "lr_scheduler": None}, "were in groups with other options"),
    ],
)  # fmt: skip
def test_a_checkpoint_of_something_else_is_refused(written, options, says):
    pipe = pipeline(2, **options)
    before = bits(pipe)
    with pytest.raises(ConfigError, match=says):
        pipe.load_checkpoint(written[0])
    assert bits(pipe) == before


@pytest.mark.parametrize("room", [1000, 10])  # even for the sentence that tells of it
def test_a_full_disk_is_told_and_the_checkpoints_before_it_stay(tmp_path, room):
    pipe = pipeline(2)
    pipe.step(BATCHES[0])
    before = pipe.save_checkpoint(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
    try:
        with pytest.raises(
            ConfigError, match=r"checkpoint .*: cannot be written: .*checkpoints before it are as they were"
        ):
            pipe.save_checkpoint(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    assert sorted(os.listdir(tmp_path)) == [".lock", before.name]
    assert Checkpoint(tmp_path).step == 1
    pipe.step(BATCHES[1])
    assert pipe.save_checkpoint(tmp_path).name == "step-00000002"


def test_storage_that_does_not_answer_is_told_in_time(tmp_path, monkeypatch):
    answer = threading.Event()
    write = writing.Snapshot.write
    monkeypatch.setattr(writing.Snapshot, "write", lambda self, place: (answer.wait(), write(self, place)))
    pipe = pipeline(2)
    pipe.step(BATCHES[0])
    pipe._keeper._deadline_s = 0.3
    with pytest.raises(ConfigError, match=r"checkpoint .*worker 0, 1 are not written after 0\.303 s; the storage"):
        pipe.save_checkpoint(tmp_path)
    assert not pipe.save_checkpoint(tmp_path, wait=False)
    answer.set()  # it is slow only
    pipe.close()
    assert [path.name for path in folders.complete(tmp_path)] == ["step-00000001"]


def test_a_checkpoint_that_fails_at_once_is_not_missed_by_a_slower_worker(tmp_path):
    """It was gone before another process looked for it, which then said that the folder was not shared."""

    class Failing:
        worker = num_bytes = 0

        def write(self, place):
            (place / "half").touch()
            raise ConfigError("no room")

    place = folders.begin(tmp_path, 1)
    failed = writing.Writing([Failing()], place, {}, None, None, 10.0)
    assert str(failed.finished()) == "no room"
    assert place.is_dir() and not os.listdir(place)
    failed.discard()
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize(
    "calls, columns",
    [
        ([], 1),
        ([("step", None)] * 2, 1),
        ([("step", 0.5), ("step", None)], 2),
        ([("evaluate", None), ("step", None)], 3),
    ],
)
def test_what_a_script_was_told_takes_a_few_bytes_a_call(calls, columns):
    told = Resumption()
    for number, (what, norm) in enumerate(calls):
        told.note(what, number / 3, norm=norm)
    kept = told.tensor()
    assert kept.shape == (16, columns) and kept.dtype == torch.float64
    again = Resumption(kept, told.about)
    kept = kept[: len(calls)]
    assert again.norm == told.norm
    again.replay()
    assert [(again.answer(what), again.norm) for what, _ in calls if again.behind] == [
        (number / 3, norm) for number, (_, norm) in enumerate(calls)
    ]
    assert not again.behind and again.tensor()[: len(calls)].equal(kept.nan_to_num()) == (not kept.isnan().any())
    assert Resumption(kept).count == len(calls), "checkpoints that do not say how many calls they hold have them all"


def test_what_a_script_was_told_has_few_sizes_in_a_long_run():
    """Each checkpoint had a size of its own, and safetensors kept 6 KB of worker 0's memory for each."""
    told, sizes = Resumption(), set()
    for number in range(2000):
        told.note("step", number / 3)
        sizes.add(told.tensor().nbytes)
    assert len(sizes) < 80 and max(sizes) < 1.15 * 8 * 2000


@pytest.mark.parametrize(
    "past", [torch.ones(2), torch.ones(2, 4), torch.full((1, 3), 7.0), torch.full((1, 3), math.nan)]
)
def test_a_past_that_nobody_had_is_refused(past):
    with pytest.raises(DAMAGED):
        Resumption(past)


KILLED = """
import sys
sys.path[:0] = {path!r}
from test_checkpoints import BATCHES, pipeline
pipe = pipeline(2)
pipe.step(BATCHES[0])
print("ready", flush=True)
while True:
    pipe.save_checkpoint({folder!r}, keep=2)
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
        assert pipe.load_checkpoint(tmp_path).step == 1


SCRIPT = """
import os, sys, torch
from functools import partial
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from rpc_pipe import Pipeline

data = TensorDataset(torch.randn(64, 8), torch.randn(64, 4))
layers = [partial(nn.Linear, 8, 16), nn.Tanh, nn.Dropout, partial(nn.Linear, 16, 4)]
pipe = Pipeline(layers, nn.functional.mse_loss, optimizer=partial(torch.optim.AdamW, lr=1e-2), num_microbatches=4)
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
        return done, [line for line in done.stdout.splitlines() if line.startswith("worker 0 | ")]

    _, undisturbed = run("--workers", 2, "--", 0)
    killed, _ = run("--workers", 2, "--checkpoint-every", 1, "--", 7)
    assert killed.returncode != 0
    kept = len(folders.complete(tmp_path / "checkpoints"))
    assert kept >= 4, killed.stderr
    resumed, told = run("--workers", 3, "--schedule", "zb-h1", "--resume", "auto", "--", 0)
    assert resumed.returncode == 0, resumed.stderr
    assert "goes on from checkpoints/step-" in resumed.stdout
    assert told == undisturbed


@pytest.mark.parametrize(
    "typed, says",
    [
        (["--resume", "nowhere"], "--resume nowhere: holds no complete checkpoint; auto starts at step 0"),
        (["--checkpoint-every", 0], "--checkpoint-every 0: must be at least 1"),
        (["--checkpoint-keep", 2], "--checkpoint-keep 2: without --checkpoint-every none is written"),
        (["--checkpoint-every", 2, "--checkpoint-folder", "/proc/x"], "--checkpoint-folder /proc/x: cannot be written"),
    ],
)  # fmt: skip
def test_what_is_typed_wrongly_is_told_before_anything_is_trained(typed, says):
    done = rpc_pipe("run", *typed)
    assert done.returncode == 2
    assert says in done.stderr
