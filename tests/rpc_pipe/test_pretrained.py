"""Weights of Hugging Face's folders: read by each worker for itself, and written as `from_pretrained` takes them."""

import json
from functools import partial

import pytest
import torch

from rpc_pipe import Pipeline
from rpc_pipe.dependency import ConfigError

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")

CONFIG = transformers.GPT2Config(
    n_layer=4, n_embd=16, n_head=2, vocab_size=50, n_positions=16, bos_token_id=0, eos_token_id=0
)
IDS = torch.arange(32).reshape(4, 8)
BATCH = {"input_ids": IDS, "labels": IDS}


def gpt2():
    return transformers.GPT2LMHeadModel(CONFIG)


def pipeline(model, num_workers=3, example=BATCH, **options):
    adamw = partial(torch.optim.AdamW, lr=1e-3)
    return Pipeline(model, num_workers=num_workers, num_microbatches=2, optimizer=adamw, example=example, **options)


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
    found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    assert all(tensor.equal(found[name]) for name, tensor in pipe.weights.state_dict().items())
    pipeline(gpt2, 2).save_pretrained(tmp_path / "out")
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == 2


def test_a_checkpoint_of_a_model_as_it_is_is_taken_up_by_another_cut(tmp_path):
    pipe = pipeline(gpt2)
    pipe.step(BATCH)
    pipe.checkpoints.save(tmp_path)
    other = pipeline(gpt2(), 2, schedule="zb-h1")
    other.checkpoints.load(tmp_path)
    assert [other.step(BATCH) for _ in range(2)] == [pipe.step(BATCH) for _ in range(2)]
    taken = transformers.AutoModelForCausalLM.from_pretrained(pipe.checkpoints.save(tmp_path))
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
    with pytest.raises(ConfigError, match=r"cut by the first batch: .* pass example="):
        pipeline(gpt2, example=None).checkpoints.load(tmp_path)


def test_a_head_that_was_not_pretrained_is_named_or_left_as_it_is(tmp_path):
    config = transformers.BertConfig(
        num_hidden_layers=2, hidden_size=16, num_attention_heads=2, intermediate_size=16, vocab_size=50
    )
    transformers.BertModel(config).save_pretrained(tmp_path)
    example = {"input_ids": IDS, "labels": torch.tensor([0, 1, 0, 1])}
    pipe = pipeline(transformers.BertForSequenceClassification(config), 2, example)
    with pytest.raises(ConfigError, match=r"no tensor for classifier.bias, classifier.weight; strict=False leaves out"):
        pipe.weights.load_pretrained(tmp_path)
    before = pipe.weights.state_dict()
    assert pipe.weights.load_pretrained(tmp_path, strict=False).missing == ["classifier.bias", "classifier.weight"]
    changed = {name for name, tensor in pipe.weights.state_dict().items() if not tensor.equal(before[name])}
    assert "bert.encoder.layer.0.attention.self.query.weight" in changed and "classifier.weight" not in changed


def wrong_shape(folder):
    transformers.GPT2LMHeadModel(
        transformers.GPT2Config(**{**CONFIG.to_dict(), "n_embd": 8, "dtype": None})
    ).save_pretrained(folder)


def cut_off(folder):
    path = sorted(folder.glob("*.safetensors"))[0]
    path.write_bytes(path.read_bytes()[:-8])


@pytest.mark.parametrize(
    "damage, says",
    [
        (wrong_shape, "has shape .*, and .* in this model"),
        (cut_off, "safetensors: cannot be read"),
        (lambda folder: sorted(folder.glob("*.safetensors"))[0].unlink(), "is missing, and the index names it"),
        (lambda folder: (folder / "model.safetensors.index.json").write_text("{}"), "it has no weight_map"),
        (lambda folder: (folder / "model.safetensors.index.json").unlink(), "has neither"),
        (lambda folder: (folder / "model.safetensors.index.json").write_text(
            json.dumps({"weight_map": {"transformer.wte.weight": "../secret"}})), "secret: is missing"),
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
    with pytest.raises(ConfigError, match=says):
        pipe.weights.load_pretrained(folder)
    assert all(tensor.equal(before[name]) for name, tensor in pipe.weights.state_dict().items())


def test_weights_that_would_be_read_instead_are_told(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"has a model.safetensors, which may be read instead; choose another folder"):
        pipeline(gpt2, 1).save_pretrained(tmp_path)


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
        assert len(trained) > 7 and all(tensor.equal(found[prefix + name]) for name, tensor in trained.items())
