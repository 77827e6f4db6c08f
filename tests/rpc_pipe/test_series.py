"""Which job wrote a checkpoint: `--resume auto` goes on with the job's own series, and names what differs."""

from functools import partial

import pytest
import torch
from saved_training import BATCHES, LAYERS, bits, pipeline
from torch import nn

from rpc_pipe.checkpoints import folder as folders
from rpc_pipe.checkpoints.resume_options import follow
from rpc_pipe.system import files


def job(folder, steps, *, resume=None, lr=0.1, layers=LAYERS, every=1, **options):
    """Run a script; return what it was told, its pipeline and the names of the checkpoints."""
    options = {"optimizer": partial(torch.optim.SGD, lr=lr), "lr_scheduler": None, **options}
    pipe = pipeline(2, layers=layers, **options)
    told = follow(pipe.checkpoints, every, str(folder), None, resume)
    for batch in BATCHES[:steps]:
        pipe.step(batch)
    pipe.checkpoints.settle()
    return told, pipe, [path.name for path in folders.complete(folder)]


@pytest.fixture(autouse=True)
def other_jobs(monkeypatch):
    """Each pipeline is of another job: this process would be a restart of the one before."""
    numbers = iter(range(100))
    monkeypatch.setattr(files, "starter", lambda: f"job {next(numbers)}")


def test_the_series_of_an_older_job_is_left_alone(tmp_path, caplog):
    """`--resume auto` took the older job's step 100, with its learning rate, and the script ended at once."""
    told, *_ = job(tmp_path, 4)
    assert not told
    told, _, names = job(tmp_path, 2, lr=0.2)
    assert "4 other checkpoints stay" in told and {"step-00000001.1", "step-00000002.1"} < set(names)
    told, pipe, names = job(tmp_path, 3, resume="auto", lr=0.2)
    assert "step-00000002.1, after 2 steps" in told and "learning rate" not in told + caplog.text
    assert bits(pipe) == bits(job(tmp_path / "undisturbed", 3, lr=0.2)[1])
    assert folders.newest(tmp_path).name == names[-2] == "step-00000003.1", "of the job that began last"


def test_what_a_script_says_otherwise_is_named(tmp_path, caplog):
    job(tmp_path, 2, lr=0.1)
    step = partial(torch.optim.lr_scheduler.StepLR, step_size=5)
    _, pipe, _ = job(tmp_path, 0, resume="auto", lr=0.01)
    assert "learning rate 0.1 in the checkpoint, which counts, and 0.01 in the script" in caplog.text
    assert pipe.learning_rate == 0.1
    pipe.step(tuple(tensor[:6] for tensor in BATCHES[0]))
    assert "6 rows, and had 8" in caplog.text
    job(tmp_path / "stepped", 2, lr_scheduler=step)
    job(tmp_path / "stepped", 0, resume="auto", lr_scheduler=partial(step, gamma=0.5))
    assert "learning-rate schedule StepLR(step_size=5) in the checkpoint, which counts" in caplog.text
    job(tmp_path / "stepped", 0, resume="auto")
    assert "learning-rate schedule StepLR(step_size=5) in the checkpoint, and none in the script" in caplog.text


def test_another_script_or_model_has_its_own_series(tmp_path, monkeypatch):
    job(tmp_path, 2)
    told, _, names = job(tmp_path, 1, resume="auto", layers=[*LAYERS[:-1], partial(nn.Linear, 16, 4, bias=False)])
    assert "training starts at step 1" in told and "step-00000001.1" in names
    monkeypatch.setattr("sys.argv", ["other.py"])
    told, *_ = job(tmp_path, 3, resume="auto", every=3)
    assert "training starts at step 1" in told and "3 other checkpoints stay" in told
    monkeypatch.undo()
    told, *_ = job(tmp_path, 0, resume="auto")
    assert "step-00000002, after 2 steps" in told


def test_a_job_that_has_written_nothing_yet_begins_again(tmp_path):
    job(tmp_path, 2)
    job(tmp_path, 1, every=5)
    assert "training starts at step 1" in job(tmp_path, 0, resume="auto")[0]


def test_checkpoints_of_a_version_that_noted_no_job_are_gone_on_from(tmp_path, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(folders, "job_of", lambda actor: actor.exchange("nothing", 0) and {})
        job(tmp_path, 2)
    (tmp_path / ".job.json").unlink()
    assert "after 2 steps" in job(tmp_path, 0, resume="auto")[0]


@pytest.mark.parametrize(
    "note", ["[]", '{"job": [1]}', '{"job": {"begun": "noon"}}', '{"job": {"begun": 1e999}}', '"x"']
)
def test_a_note_that_was_edited_is_no_note(note, tmp_path):
    begun = {"script": "s", "model": 1, "begun": 5}
    (tmp_path / ".job.json").write_text(note)
    assert folders.last_series(tmp_path, begun) == [] == folders.claim(tmp_path, ["this one"], begun)
    folders.release()
