"""Text from a model in stages: the tokens that transformers generates on one process."""

import logging
from functools import partial

import pytest
import torch
from refusals import refused

from rpc_pipe import Pipeline, Training, generation
from rpc_pipe.dependency import F
from rpc_pipe.dependency.check import check_runs
from rpc_pipe.dependency.decoding import Decoding
from rpc_pipe.planning.specs import make_spec

transformers = pytest.importorskip("transformers")
PROMPTS = torch.randint(3, 97, (5, 9), generator=torch.Generator().manual_seed(3))
MASK = torch.ones_like(PROMPTS)
for row, missing in enumerate((0, 3, 6, 2, 5)):
    MASK[row, :missing] = PROMPTS[row, :missing] = 0
INPUTS = {"input_ids": PROMPTS, "attention_mask": MASK}
SIZES = {
    "vocab_size": 97, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "head_dim": 8,
    "num_hidden_layers": 4, "num_key_value_heads": 1, "max_position_embeddings": 64, "initializer_range": 0.3,
}  # fmt: skip
OPTIONS = {
    "GPT2": {"vocab_size": 97, "n_embd": 16, "n_layer": 4, "n_head": 2, "n_positions": 64, "initializer_range": 0.3},
    "OPT": {"vocab_size": 97, "hidden_size": 16, "word_embed_proj_dim": 16, "num_attention_heads": 2, "init_std": 0.3},
    "Llama": SIZES,
    "Qwen3": SIZES,
    "Mistral": {**SIZES, "sliding_window": 7},
    "Gemma3": {**SIZES, "sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"] * 2},
}


def model(family="Llama"):
    torch.manual_seed(0)
    config = getattr(transformers, "Gemma3TextConfig" if family == "Gemma3" else f"{family}Config")
    kind = getattr(transformers, "GPT2LMHeadModel" if family == "GPT2" else f"{family}ForCausalLM")
    return kind(config(**OPTIONS[family], pad_token_id=0, bos_token_id=2, eos_token_id=1)).eval()


def pipeline(num_workers=2, schedule="1f1b", family="Llama", **options):
    return Pipeline(model(family), num_microbatches=3, num_workers=num_workers, schedule=schedule, **options)


@pytest.mark.parametrize(
    ("family", "num_workers", "schedule"),
    [
        ("GPT2", 4, "1f1b"),
        ("Llama", 2, "zb-v"),
        ("Qwen3", 1, "1f1b"),
        ("Mistral", 2, "pipedream"),
        ("Gemma3", 3, "1f1b"),
        ("OPT", 2, "1f1b"),
    ],
)
def test_the_tokens_are_those_of_one_process_also_over_borders_of_rounds(family, num_workers, schedule, monkeypatch):
    """Prompts are ragged, windows slide, and rows end early: by a token that the first row has."""
    monkeypatch.setattr(generation, "_ROUNDS", 5)
    plain = model(family)
    end = plain.generate(**INPUTS, max_new_tokens=7, do_sample=False)[0, -1].item()
    how = {"do_sample": False, "eos_token_id": [end, 1], "repetition_penalty": 1.1}
    pipe = pipeline(num_workers, schedule, family)
    assert torch.equal(pipe.generate(INPUTS, 12, **how), plain.generate(**INPUTS, max_new_tokens=12, **how))


def test_draws_depend_on_the_seed_and_not_on_workers_and_tokens_are_told():
    how = {"do_sample": True, "temperature": 0.8, "top_k": 30, "top_p": 0.95}
    told = {row: [] for row in range(5)}

    def tell(rows, tokens):
        for row, token in zip(rows, tokens[:, 0].tolist(), strict=True):
            told[row].append(token)

    pipe = pipeline(1)
    texts = pipe.generate(INPUTS, 8, on_tokens=tell, **how)
    assert all(texts[row, 9:].tolist()[: len(own)] == own for row, own in told.items()) and len(told[0]) > 2
    assert torch.equal(texts, pipeline(4).generate(INPUTS, 8, **how))
    assert not torch.equal(texts, pipe.generate(INPUTS, 8, seed=1, **how))


def test_it_goes_between_steps_with_replicas_and_other_kinds_are_refused():
    pipe = pipeline(4, replicas=2)
    pipe.step({"input_ids": PROMPTS, "labels": PROMPTS})
    plain = model()
    plain.load_state_dict(pipe.weights.state_dict())
    want = plain.generate(**INPUTS, max_new_tokens=4, do_sample=False)
    assert torch.equal(pipe.generate(PROMPTS, 4, attention_mask=MASK, do_sample=False), want)
    alone = plain.generate(PROMPTS[:1], max_new_tokens=4, do_sample=False)  # a replica has no row
    assert torch.equal(pipe.generate(PROMPTS[:1], 4, do_sample=False), alone)
    refusals = {"num_beams": 2, "assistant_model": plain, "guidance_scale": 2.0, "return_dict_in_generate": True}
    for options in [*({name: value} for name, value in refusals.items()), {"max_new_tokens": 60}]:
        with refused("generate"):
            pipe.generate(INPUTS, **{"max_new_tokens": 4, **options})
    words = [[5, 6, 7]]
    for wrong in (PROMPTS[:, :0], PROMPTS[:0], PROMPTS + 90, -PROMPTS, PROMPTS.float(), words, "text"):
        with refused("generate"):
            pipe.generate(wrong, 4)
    assert torch.equal(pipe.generate(INPUTS, 4, do_sample=False), want), "it goes on"
    translates = transformers.T5Config(vocab_size=97, d_model=8, d_kv=4, d_ff=8, num_layers=2, num_heads=2)
    for other in (transformers.T5ForConditionalGeneration(translates), [torch.nn.Linear(4, 4)]):
        with refused("generate"):
            Pipeline(other, torch.nn.functional.mse_loss, num_microbatches=1, num_workers=1).generate(INPUTS, 4)


@pytest.mark.parametrize(("schedule", "groups"), [("1f1b", 8), ("1f1b", 3), ("zb-v", 8)])
def test_groups_keep_all_workers_busy(schedule, groups):
    """With as many groups as stages each worker computes in every slot but at the borders."""
    placed = make_spec(schedule, 4, 8)
    rounds = 20
    spec = Decoding(num_workers=4, num_microbatches=(rounds + 1) * groups, placed=placed, groups=groups)
    check_runs(spec, range(4))
    actions = (F(s, m) for s in range(spec.num_stages) for m in range(rounds * groups))
    ends, free = {}, [0] * 4
    for action in sorted(actions, key=spec.slot):
        worker = spec.worker(action)
        begin = max([free[worker], *(ends[need] for need in spec.needs(action))])
        ends[action] = free[worker] = begin + 1
    stages = spec.num_stages
    least = rounds * max(groups * stages // 4, stages)
    assert least <= max(free) <= least * 1.1 + stages


class Only(transformers.LogitsProcessor):
    """Leaves even tokens alone."""

    def __call__(self, input_ids, scores):
        return scores.masked_fill(torch.arange(scores.shape[1]) % 2 == 1, -torch.inf)


class Letters:
    """The tokenizer of a stranger: token n is the n-th letter."""

    def get_vocab(self):
        return {chr(97 + n): n for n in range(97)}

    def convert_tokens_to_string(self, tokens):
        return "".join(tokens)

    def __call__(self, text, add_special_tokens=False):
        return {"input_ids": [ord(letter) - 97 for letter in text]}

    def _convert_id_to_token(self, token):
        return chr(97 + token)


def test_it_takes_what_transformers_takes_or_says_so():
    pipe, plain, words = pipeline(2), model(), Letters()
    config = transformers.GenerationConfig(do_sample=False, pad_token_id=0, eos_token_id=[1, 90], max_new_tokens=9)
    told = []
    usual = {"do_sample": False, "max_new_tokens": 9}
    letter = chr(97 + int(plain.generate(PROMPTS, **usual)[1, 12]))
    stops = transformers.GenerationConfig(**usual, pad_token_id=0, stop_strings=[letter])
    for options in (
        {"generation_config": config},
        {"do_sample": False, "max_length": 15},
        {**usual, "logits_processor": [Only()], "pad_token_id": 3, "eos_token_id": [*range(4, 40, 2)]},
        {**usual, "min_new_tokens": 6, "no_repeat_ngram_size": 2, "bad_words_ids": [[5]], "use_cache": False},
        {**usual, "stop_strings": [letter], "tokenizer": words},
        {"generation_config": stops, "tokenizer": words},
        {**usual, "eos_token_id": torch.arange(4, 40)},
        {**usual, "prefix_allowed_tokens_fn": lambda row, ids: [10 + row, 20 + row, int(ids[-1])]},
    ):
        assert torch.equal(pipe.generate(INPUTS, **options), plain.generate(**INPUTS, **options)), options
    texts = pipe.generate(
        PROMPTS[:2], 4, do_sample=True, num_return_sequences=3, on_tokens=lambda *new: told.append(new)
    )
    assert len(texts) == 6 and sorted({row for rows, _ in told for row in rows}) == [*range(6)]
    for options in (
        {**usual, "streamer": told},
        {**usual, "stop_strings": ["a"]},
        {**usual, "temprature": 0.5},
        {**usual, "prompt_lookup_num_tokens": 3},
        {**usual, "cache_implementation": "static"},
        {"max_new_tokens": 0},
        {"max_new_tokens": 2.5},
        {"generation_config": transformers.GenerationConfig(max_new_tokens=2.5, pad_token_id=0)},
        {**usual, "attention_mask": MASK[:, :4]},
        {**usual, "on_tokens": 3},
    ):
        with refused("generate"):
            pipe.generate(INPUTS, **options)


def test_positions_that_depend_on_the_longest_row_of_a_batch():
    """A shorter group was scaled otherwise, in silence; prompts beyond the short scale ended in an error of torch."""
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [3.0] * 4}
    torch.manual_seed(0)
    scale = {"original_max_position_embeddings": 7}
    config = transformers.Phi3Config(**SIZES, **scale, rope_parameters={**rope, **scale}, pad_token_id=0)
    plain = transformers.Phi3ForCausalLM(config).eval()
    pipe = Pipeline(plain, num_microbatches=3, num_workers=2)
    want = plain.generate(PROMPTS[:1], max_new_tokens=6, do_sample=False)
    assert torch.equal(pipe.generate(PROMPTS[:1], 6, do_sample=False), want)
    with refused("generate"):
        pipe.generate(INPUTS, 6)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of transformers, by peft
def test_adapters_that_learn_prompts_are_refused():
    """Tokens were those of the model without its adapter, as peft puts prompts in while its own `generate` runs."""
    peft = pytest.importorskip("peft")
    tuned = peft.get_peft_model(model(), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))
    with refused("generate"):
        Pipeline(tuned, num_microbatches=3, num_workers=1).generate(INPUTS, 4)


class Louder(transformers.LlamaForCausalLM):
    """Doubles a block while transformers decodes, as peft chooses the adapter of each row."""

    def generate(self, *arguments, **options):
        hook = self.model.layers[1].register_forward_hook(lambda module, given, output: 2 * output)
        try:
            return super().generate(*arguments, **options)
        finally:
            hook.remove()


def test_a_generate_that_changes_the_model_while_it_decodes_is_refused():
    """Tokens were those of the model as it was before and after: rounds run when that `generate` has returned."""
    with refused("generate"):
        Pipeline(Louder(transformers.LlamaConfig(**SIZES, pad_token_id=0)), num_microbatches=3).generate(INPUTS, 2)


class Loops(transformers.LlamaForCausalLM):
    """Decodes by a loop of its own."""

    @torch.no_grad()
    def generate(self, input_ids, **options):
        return torch.cat([input_ids, self(input_ids).logits[:, -1:].argmax(-1)], 1)


def test_the_models_own_settings_hold_and_its_own_decoding_is_refused():
    """The `generation_config.json` of a checkpoint may say how long texts are. A warning of transformers comes once."""
    pipe, plain = pipeline(2), model()
    for each in pipe, plain:
        settings = plain.generation_config if each is plain else each.partition.config.generation
        settings.update(max_length=14, repetition_penalty=1.3, min_length=2, do_sample=False)
    assert torch.equal(pipe.generate(INPUTS), plain.generate(**INPUTS))
    told = []
    log = transformers.logging.get_logger("transformers.generation")
    handler = logging.Handler()
    handler.emit = told.append
    log.addHandler(handler)
    pipe.generate(INPUTS, 3, min_new_tokens=2)
    log.removeHandler(handler)
    assert len(told) == 1, told
    other = Loops(transformers.LlamaConfig(**SIZES, pad_token_id=0))
    with refused("generate"):
        Pipeline(other, num_microbatches=3, num_workers=2).generate(INPUTS, 2)


class Upside(transformers.LlamaForCausalLM):
    """Turns its logits around in place."""

    def forward(self, *arguments, **options):
        output = super().forward(*arguments, **options)
        output.logits.neg_()
        return output


@pytest.mark.parametrize("of", ["model", "head", "hook"])
def test_logits_may_be_more_than_the_result_of_the_head(of):
    """A stage ends with its head where the result of that has been the logits before; here it has not."""

    def made():
        torch.manual_seed(0)
        config = transformers.LlamaConfig(**SIZES, pad_token_id=0, eos_token_id=None)
        whole = (Upside if of == "model" else transformers.LlamaForCausalLM)(config).eval()
        if of == "head":
            whole.lm_head.register_forward_hook(lambda module, given, output: -output)
        if of == "hook":
            whole.register_forward_hook(lambda module, given, output: (output.logits.neg_(), None)[1])
        return whole

    want = made().generate(**INPUTS, max_new_tokens=5, do_sample=False)
    pipe = Pipeline(made(), num_microbatches=3, num_workers=2)
    assert torch.equal(pipe.generate(INPUTS, 5, do_sample=False), want)


def test_training_does_not_notice_texts_between_its_steps():
    """Dropout is off in texts alone, and draws of texts move no generator of the training's."""

    def trained(told=None):
        torch.manual_seed(0)
        config = transformers.LlamaConfig(**SIZES | {"num_hidden_layers": 2}, pad_token_id=0, attention_dropout=0.3)
        training = Training(partial(torch.optim.SGD, lr=0.1))
        made = transformers.LlamaForCausalLM(config)
        with Pipeline(made, training=training, num_microbatches=2, num_workers=1) as pipe:
            if told is not None:
                pipe.on_step(lambda report: told.append(pipe.generate(INPUTS, 2, do_sample=True)))
            losses = [pipe.step({"input_ids": PROMPTS[:4], "labels": PROMPTS[:4]}) for _ in range(2)]
        return losses, torch.rand(1).item()

    told = []
    assert trained(told) == trained() and len(told) == 2
