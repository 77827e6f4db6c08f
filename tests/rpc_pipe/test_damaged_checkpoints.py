"""Damaged checkpoints: they are named, change nothing, and a restart goes on from an older one."""

import json
import re

import pytest
from refusals import refused
from saved_training import BATCHES, DONE, bits, pipeline

from rpc_pipe.checkpoints.resume_options import follow
from rpc_pipe.dependency import Damaged


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The folder of a checkpoint after `DONE` steps on four workers."""
    pipe = pipeline(4)
    for batch in BATCHES[:DONE]:
        pipe.step(batch)
    return pipe.checkpoints.save(tmp_path_factory.mktemp("checkpoints"), extra={"epoch": 2, "pair": (1, 0.5)})


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
        (cut_off, "checkpoint"),
        (
            flipped,
            "model-00001-of-00004.safetensors",
        ),
        (one_bit, "checkpoint"),
        (another_step, "manifest.json"),
        (no_part, "checkpoint"),
        (
            lambda path: (path / "manifest.json").write_text('{"format": 1, "st'),
            "manifest.json",
        ),
        (
            lambda path: (path / "manifest.json").write_text("[]"),
            "manifest.json",
        ),
        (
            changed(lambda told: told.pop("stages")),
            "manifest.json",
        ),
        (
            changed(lambda told: told.update(step=float("inf"))),
            "manifest.json",
        ),
        (
            changed(lambda told: told.update(extra={"$tensor": [1, "load"]})),
            "manifest.json",
        ),
        (changed(lambda told: told["stages"]["0"].pop("optimizer")), "checkpoint"),
        (changed(wrong_form), "checkpoint"),
        (changed(lambda told: told.update(loss="much")), "checkpoint"),
        (changed(lambda told: told.update(loss=[])), "checkpoint"),
        (no_manifest, "checkpoint"),
    ],
)
def test_a_damaged_checkpoint_is_named_and_changes_nothing(saved, tmp_path, damage, says):
    path = copied(saved, tmp_path)
    damage(path)
    pipe = pipeline(3)
    before = bits(pipe)
    with refused(says):
        pipe.checkpoints.load(path)
    assert bits(pipe) == before
    assert pipe.steps_done == 0
    pipe.step(BATCHES[0])


def followed(folder, resume=None, steps=5):
    """Return what a job of some steps tells at its start, and its weights at its end; it writes a checkpoint a step."""
    pipe = pipeline(4)
    told = follow(pipe.checkpoints, 1, str(folder), None, resume)
    for batch in BATCHES[:steps]:
        pipe.step(batch)
    weights = bits(pipe)
    pipe.close()
    return told, weights


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The weights of a job that nothing happens to."""
    return followed(tmp_path_factory.mktemp("undisturbed"))[1]


@pytest.mark.parametrize("damage", [cut_off, flipped, one_bit, another_step, no_part, no_manifest])
def test_a_restart_goes_on_from_an_older_checkpoint_where_the_newest_is_damaged(tmp_path, damage, undisturbed):
    """It ended with exit code 2, or went on from an older one without a word where the manifest was gone."""
    followed(tmp_path, steps=3)
    damage(tmp_path / "step-00000003")
    told, weights = followed(tmp_path)
    assert re.fullmatch(
        r"damaged: .*step-00000003.*; goes on from .*step-00000002, after 2 steps instead; the .* steps 1 to 2 .*", told
    ), told
    assert weights == undisturbed


def test_a_restart_of_which_all_checkpoints_are_damaged_begins_as_it_did_at_first(tmp_path):
    _, undisturbed = followed(tmp_path, steps=1)
    no_part(tmp_path / "step-00000001")
    told, weights = followed(tmp_path, steps=1)
    assert re.fullmatch(r"damaged: .*step-00000001.* is missing; training starts at step 1 instead", told), told
    assert weights == undisturbed


def test_a_damaged_checkpoint_that_is_typed_is_no_other(saved, tmp_path):
    for step in 1, 2:
        (tmp_path / f"step-{step:08}").mkdir()
        copied(saved, tmp_path / f"step-{step:08}")
    cut_off(tmp_path / "step-00000002")
    pipe = pipeline(3)
    for typed in tmp_path / "step-00000002", tmp_path:
        with refused("checkpoint", Damaged):
            follow(pipe.checkpoints, None, str(tmp_path), None, str(typed))
    assert "step-00000001, after 3 steps instead" in follow(pipe.checkpoints, None, str(tmp_path), None, "auto")
    cut_off(tmp_path / "step-00000001")
    with refused("checkpoint", Damaged):
        follow(pipe.checkpoints, None, str(tmp_path), None, "auto")
