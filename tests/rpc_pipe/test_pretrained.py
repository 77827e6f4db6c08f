"""Weights of Hugging Face's folders: read by each worker for itself, and written as `from_pretrained` takes them."""

import json
import shutil
from functools import partial, partialmethod
from pathlib import Path

import pytest
import torch
from refusals import refused
from safetensors.torch import load_file
from training_options import pipeline_with

from rpc_pipe.checkpoints import folder as folders
from rpc_pipe.checkpoints.pretrained import save_whole
from rpc_pipe.dependency import ConfigError, StorageError

pytestmark = pytest.mark.filterwarnings("ignore")

CONFIG = {"n_layer": 3, "n_embd": 16, "n_head": 2, "vocab_size": 50, "n_positions": 16}
CONFIG |= {"bos_token_id": 0, "eos_token_id": 0}
IDS = torch.arange(32).reshape(4, 8)
BATCH = {"input_ids": IDS, "labels": IDS}


def hf(name):
    """Return a class of transformers, which is imported by the process that runs these tests alone."""
    return getattr(pytest.importorskip("transformers"), name)


def gpt2(**other):
    return hf("GPT2LMHeadModel")(hf("GPT2Config")(**{**CONFIG, **other}))


def pipeline(model, num_workers=3, example=BATCH, **options):
    options = {"optimizer": partial(torch.optim.AdamW, lr=1e-3), **options}
    return pipeline_with(model, num_workers=num_workers, num_microbatches=2, example=example, **options)


@pytest.fixture
def saved(tmp_path):
    torch.manual_seed(0)
    model = gpt2()
    model.save_pretrained(tmp_path / "gpt2", max_shard_size="10KB")
    return model, tmp_path / "gpt2"


def test_a_pipeline_begins_with_pretrained_weights_and_from_pretrained_takes_them_back(saved, tmp_path):
    model, folder = saved
    assert len(list(folder.glob("*.safetensors"))) > 2
    pipe = pipeline(gpt2)  # a function: its weights are made where they live
    assert pipe.weights.load_pretrained(folder) == ([], [])
    with torch.no_grad():
        expected = model.eval()(**BATCH).loss.item()
    assert pipe.evaluate(BATCH) == pytest.approx(expected, rel=1e-6)
    pipe.step(BATCH)
    for _ in range(2):  # again into the same folder
        pipe.weights.save_pretrained(tmp_path / "out")
    found = hf("AutoModelForCausalLM").from_pretrained(tmp_path / "out").state_dict()
    assert all(tensor.equal(found[name]) for name, tensor in pipe.weights.state_dict().items())
    pipeline(gpt2, 2).weights.save_pretrained(tmp_path / "out")
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == 2
    pipe.weights.save(tmp_path / "one.safetensors")  # as `run --save` does
    assert (other := pipeline(gpt2, 2)).weights.load_pretrained(tmp_path / "one.safetensors") == ([], [])
    assert other.evaluate(BATCH) == pipe.evaluate(BATCH)


def test_a_checkpoint_of_a_model_as_it_is_is_taken_up_by_another_cut(tmp_path):
    pipe = pipeline(gpt2)
    pipe.step(BATCH)
    pipe.checkpoints.save(tmp_path)
    other = pipeline(gpt2(), 2, schedule="zb-h1")
    other.checkpoints.load(tmp_path)
    assert [other.step(BATCH) for _ in range(2)] == [pipe.step(BATCH) for _ in range(2)]
    taken = hf("AutoModelForCausalLM").from_pretrained(pipe.checkpoints.save(tmp_path))
    assert taken.lm_head.weight.equal(pipe.weights.state_dict()["lm_head.weight"])


def test_a_model_that_is_cut_by_its_first_batch_is_resumed_there(tmp_path):
    batches = [BATCH] * 4
    undisturbed = pipeline(gpt2, example=None)
    losses = [undisturbed.step(batch) for batch in batches]
    pipe = pipeline(gpt2)
    pipe.step(BATCH), pipe.step(BATCH)
    pipe.checkpoints.save(tmp_path)
    for script in (lambda pipe: [pipe.step(batch) for batch in batches], lambda pipe: list(pipe.train(batches))):
        pipe = pipeline(gpt2, 2)
        pipe.checkpoints.resume(tmp_path)
        assert script(pipe)[1:] == losses[1:]
    with refused("example"):
        pipeline(gpt2, example=None).checkpoints.load(tmp_path)


def test_a_head_that_was_not_pretrained_is_named_or_left_as_it_is(tmp_path):
    config = hf("BertConfig")(
        num_hidden_layers=2, hidden_size=16, num_attention_heads=2, intermediate_size=16, vocab_size=50
    )
    hf("BertModel")(config).save_pretrained(tmp_path)
    example = {"input_ids": IDS, "labels": torch.tensor([0, 1, 0, 1])}
    pipe = pipeline(hf("BertForSequenceClassification")(config), 2, example)
    with refused(tmp_path.name):
        pipe.weights.load_pretrained(tmp_path)
    before = pipe.weights.state_dict()
    assert pipe.weights.load_pretrained(tmp_path, strict=False).missing == ["classifier.bias", "classifier.weight"]
    changed = {name for name, tensor in pipe.weights.state_dict().items() if not tensor.equal(before[name])}
    assert "bert.encoder.layer.0.attention.self.query.weight" in changed and "classifier.weight" not in changed


def wrong_shape(folder):
    gpt2(n_embd=8).save_pretrained(folder)


def cut_off(folder):
    path = sorted(folder.glob("*.safetensors"))[0]
    path.write_bytes(path.read_bytes()[:-8])


@pytest.mark.parametrize(
    "damage, says",
    [
        (wrong_shape, "model.safetensors"),
        (cut_off, "model-00001-of-00005.safetensors"),
        (lambda folder: sorted(folder.glob("*.safetensors"))[0].unlink(), "model-00001-of-00005.safetensors"),
        (lambda folder: (folder / "model.safetensors.index.json").write_text("{}"), "model.safetensors.index.json"),
        (lambda folder: (folder / "model.safetensors.index.json").unlink(), "gpt2"),
        (lambda folder: (folder / "model.safetensors.index.json").write_text(
            json.dumps({"weight_map": {"transformer.wte.weight": "../secret"}})), "secret"),
    ],
)  # fmt: skip
def test_a_folder_that_does_not_fit_is_named_and_changes_nothing(saved, damage, says):
    _, folder = saved
    if damage is wrong_shape:
        for path in folder.iterdir():
            path.unlink()
    damage(folder)
    pipe = pipeline(gpt2)
    before = pipe.weights.state_dict()
    with refused(says):
        pipe.weights.load_pretrained(folder)
    assert all(tensor.equal(before[name]) for name, tensor in pipe.weights.state_dict().items())


class Crash(Exception):
    """The end of a process."""


def read_weights(folder):
    """Return the tensors of a folder; `from_pretrained` looks for the same files in the same order."""
    if (folder / "model.safetensors").exists():
        return load_file(folder / "model.safetensors")
    found = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    return {name: load_file(folder / file)[name] for name, file in found.items()}


@pytest.mark.parametrize("before, after", [(None, 2), (2, 1)])
def test_a_crash_leaves_the_old_or_the_new_weights_whole(tmp_path, monkeypatch, before, after):
    """A folder with a `model.safetensors` was refused after training, and the weights were gone.

    Args:
        before: workers that wrote what is there; None: `save_pretrained` of transformers did.
    """
    for name in "HOME", "TMPDIR":
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.chdir(tmp_path)
    model = gpt2()
    (pipeline(model, before).weights if before else model).save_pretrained(first := tmp_path / "first")
    (first / "notes.txt").write_text("mine")
    old, out = read_weights(first), tmp_path / "out"
    pipe = pipeline(gpt2, after)
    pipe.step(BATCH)
    new, seen, done = pipe.weights.state_dict(), [], 0

    def counted(call, *arguments, **options):
        nonlocal done
        done += 1
        if done > len(seen):
            raise Crash
        return call(*arguments, **options)

    for name in ("replace", "rename", "unlink"):
        monkeypatch.setattr(
            Path, name, partialmethod(lambda path, c, *a, **o: counted(c, path, *a, **o), getattr(Path, name))
        )
    crashed = True
    while crashed:
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(first, out)
        done = 0
        try:
            pipe.weights.save_pretrained(out)
            crashed = False
        except (Crash, ConfigError):  # the other worker's is told by a sentence
            pass
        found = read_weights(out)
        seen.append([all(tensor.equal(whole[name]) for name, tensor in found.items()) for whole in (old, new)])
    assert seen[0] == [True, False] and seen == sorted(seen, reverse=True), "the old ones, and from a moment on the new"
    assert seen[-1] == [False, True] and (out / "notes.txt").exists()


@pytest.mark.parametrize("why", ["a file", "no right", "no path"])
def test_trained_weights_are_kept_somewhere_whatever_a_save_meets(tmp_path, monkeypatch, why):
    """The script ended, and with it the only copy."""
    monkeypatch.chdir(tmp_path)
    where = "" if why == "no path" else tmp_path / why
    if why == "a file":
        where.write_text("")
    if why == "no right":
        real = folders.begin
        monkeypatch.setattr(folders, "begin", lambda place, step: real(_allowed(place, where), step))
    pipe = pipeline(gpt2)
    pipe.step(BATCH)
    with pytest.raises(StorageError) as raised:
        pipe.weights.save_pretrained(where)
    assert Path(raised.value.kept).parent == tmp_path and raised.value.kept in str(raised.value)
    taken = hf("AutoModelForCausalLM").from_pretrained(raised.value.kept).state_dict()
    assert all(tensor.equal(taken[name]) for name, tensor in pipe.weights.state_dict().items())
    (tmp_path / "folder").mkdir()
    with pytest.raises(StorageError) as raised:
        pipe.weights.save(tmp_path / "folder")
    assert load_file(raised.value.kept).keys() == pipe.weights.state_dict().keys()


def test_the_folder_of_saved_weights_is_made(tmp_path):
    """`save_pretrained`, checkpoints and `run --save` made it, and `weights.save` alone failed after the training."""
    save_whole({"a": torch.ones(2)}, tmp_path / "new" / "w.safetensors")
    assert load_file(tmp_path / "new" / "w.safetensors").keys() == {"a"}


def _allowed(place, where):
    if place == where:
        raise StorageError("cannot be written")
    return place


def test_what_is_written_is_what_transformers_writes(tmp_path, caplog):
    """There was no generation_config.json, no architecture and no type, and tied weights were there twice."""
    torch.manual_seed(0)
    model = gpt2().bfloat16()
    model.generation_config.update(max_new_tokens=7, repetition_penalty=1.5)
    model.save_pretrained(tmp_path / "theirs")
    for made, workers in (model, 1), (model, 2):
        out = tmp_path / f"ours{workers}"
        pipeline(made, workers).weights.save_pretrained(out)
        names = [name for path in out.glob("*.safetensors") for name in load_file(path)]
        assert sorted(names) == sorted(load_file(tmp_path / "theirs" / "model.safetensors"))
        for name in "config.json", "generation_config.json":
            theirs, ours = (json.loads((folder / name).read_text()) for folder in (tmp_path / "theirs", out))
            assert theirs == ours
        taken, told = hf("GPT2LMHeadModel").from_pretrained(out, output_loading_info=True)
        assert not any(told.values())
        assert taken.generate(IDS[:1, :4]).equal(model.eval().generate(IDS[:1, :4]))


@pytest.mark.parametrize("made_by", ["peft", "transformers"])
def test_an_adapter_is_taken_back_by_peft(tmp_path, made_by):
    """Base weights were written under peft's names, without a configuration: neither peft nor the model's class read
    them."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["c_attn"], modules_to_save=["lm_head"], init_lora_weights=False)

    def adapted():
        torch.manual_seed(0)
        model = gpt2()
        if made_by == "peft":
            model = peft.get_peft_model(model, config)
            model.add_adapter("other", peft.LoraConfig(r=3, target_modules=["c_proj"], init_lora_weights=False))
        else:
            model.add_adapter(config)
        return model

    for number, model in enumerate((adapted(), adapted)):
        out = tmp_path / str(number)
        pipe = pipeline(model)
        pipe.step(BATCH)
        pipe.weights.save_pretrained(out)
        written = {path.name for path in out.iterdir() if path.is_file()}
        assert written >= {"adapter_config.json", "adapter_model.safetensors"}
        assert not any(name.startswith("model") for name in written)
        torch.manual_seed(0)
        taken = peft.PeftModel.from_pretrained(gpt2(), out)
        with torch.no_grad():
            loss = taken.eval()(**BATCH).loss.item()
        # Of a function the base has weights of its own.
        assert number == 1 or loss == pytest.approx(pipe.evaluate(BATCH), rel=1e-6)
        if made_by == "peft":
            taken.load_adapter(out / "other", "other")
        prefix, found = "" if made_by == "peft" else "base_model.model.", taken.state_dict()
        trained = {name: tensor for name, tensor in pipe.weights.state_dict().items() if "lora_" in name}
        assert len(trained) > 5 and all(tensor.equal(found[prefix + name]) for name, tensor in trained.items())


def test_prompts_are_trained_and_refused_where_they_are_written(tmp_path):
    """peft writes other tensors than a model with prompts holds: such models were refused before they were trained."""
    peft = pytest.importorskip("peft")
    made = peft.get_peft_model(gpt2(), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))
    pipe = pipeline(made)
    before = pipe.weights.state_dict()["prompt_encoder.default.embedding.weight"].clone()
    pipe.step(BATCH)
    assert not before.equal(pipe.weights.state_dict()["prompt_encoder.default.embedding.weight"])
    with refused("adapter"):
        pipe.weights.save_pretrained(tmp_path)
