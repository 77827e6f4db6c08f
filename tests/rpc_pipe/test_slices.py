"""Training on slices of sequences: losses and weights of whole sequences, and what is refused."""

import json
from functools import partial

import pytest
import torch
from processes import SMALL, TEXT, rpc_pipe
from refusals import failed, refused
from torch import nn
from torch.nn.functional import cross_entropy, dropout, scaled_dot_product_attention
from training_options import pipeline_with

from rpc_pipe.commands.main import main
from rpc_pipe.dependency import WorkerFailure
from rpc_pipe.model.partition import LayerPartition
from rpc_pipe.model.replay import observed_stage
from rpc_pipe.planning.specs import make_spec
from rpc_pipe.verifying.reference import Reference, Replica
from rpc_pipe.workers.compute.modules.randomness import Randomness
from rpc_pipe.workers.compute.sequences.sequence import state_dropped

WIDTH, SGD = 8, partial(torch.optim.SGD, lr=0.5)
GENERATOR = torch.Generator().manual_seed(0)
IDS, TARGETS = (torch.randint(20, (7, 13), generator=GENERATOR) for _ in range(2))
TARGETS[:2, -5:] = -100  # whole slices of a microbatch have no targets

BATCHES = """
import torch
from torch import nn

IDS = torch.randint(31, (9, 13), generator=torch.Generator().manual_seed(5))
LABELS = IDS.clone()
LABELS[:2, -9:] = -100
BATCH = {"input_ids": IDS, "labels": LABELS}
"""

STOCK = """
import transformers as hf

STILL = dict(resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, dropout=0)
SMALL = dict(vocab_size=31, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
             intermediate_size=32, max_position_embeddings=32)


def gpt2(layers=4):
    shape = dict(vocab_size=31, n_embd=16, n_layer=layers, n_head=2, n_positions=32)
    return hf.GPT2LMHeadModel(hf.GPT2Config(**shape, **STILL)), BATCH


def gpt2_on_longer_sequences_in_float64():
    # Its own loss would compute in float32. Its configuration says no type: a mask of float32
    # beside float64 was read as other numbers, of some lengths.
    ids, labels = torch.randint(31, (2, 8, 23), generator=torch.Generator().manual_seed(5))
    return gpt2(2)[0].double(), (ids, labels), lambda output, y: nn.functional.cross_entropy(output.logits.mT, y)


def opt():
    # It counts positions by a mask of tokens, so a mask of pairs alone is not enough.
    shape = dict(vocab_size=31, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, ffn_dim=32)
    return hf.OPTForCausalLM(hf.OPTConfig(**shape, max_position_embeddings=32, word_embed_proj_dim=16, **STILL)), BATCH


def llama_that_divides():
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**SMALL)).double()
    return model, {**BATCH, "num_items_in_batch": int((LABELS[:, 1:] >= 0).sum())}


def mistral():
    return hf.MistralForCausalLM(hf.MistralConfig(**SMALL, sliding_window=5)), BATCH


def mixtral():
    return hf.MixtralForCausalLM(hf.MixtralConfig(**SMALL, num_local_experts=4)), BATCH


def balanced():
    return hf.MixtralForCausalLM(hf.MixtralConfig(**SMALL, num_local_experts=4, output_router_logits=True)), BATCH
"""

#: without transformers, which takes seconds to load
OWN = """
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.lstm = nn.LayerNorm(8), nn.LSTM(8, 8, batch_first=True)

    def forward(self, x):
        return x + self.lstm(self.norm(x))[0]


class Average(nn.Module):
    def __init__(self):
        super().__init__()
        self.rate = nn.Parameter(torch.tensor(0.3))

    def forward(self, x, state):  # a state that has no default
        averages = []
        for each in x.unbind(1):
            state = each if state is None else self.rate * each + (1 - self.rate) * state
            averages.append(state)
        return torch.stack(averages, 1), state


class Whole(nn.Module):
    # modules with states in a list, and beside it
    def __init__(self):
        super().__init__()
        self.embed, self.blocks = nn.Embedding(31, 8), nn.ModuleList(Block() for _ in range(2))
        self.gru, self.average, self.head = nn.GRU(8, 8, 2, batch_first=True), Average(), nn.Linear(8, 31)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.average(self.gru(x)[0], None)[0])


def whole():
    return Whole().double(), (IDS, LABELS), lambda x, y: nn.functional.cross_entropy(x.mT, y)


def lstm():
    layers = [nn.Embedding(31, 8), *(Block() for _ in range(4)), Average(), nn.Linear(8, 31)]
    return nn.Sequential(*layers).double(), (IDS, LABELS), lambda x, y: nn.functional.cross_entropy(x.mT, y)
"""


@pytest.fixture
def model(tmp_path):
    (tmp_path / "stock.py").write_text(BATCHES + STOCK)
    (tmp_path / "own.py").write_text(BATCHES + OWN)
    return lambda name: f"{tmp_path / ('own.py' if name in ('whole', 'lstm') else 'stock.py')}:{name}"


@pytest.mark.parametrize(
    ("name", "schedule", "slices", "most"),
    [
        ("gpt2", "zb-v", 2, 1e-5), ("lstm", "zb-v", 4, 1e-12),
        ("gpt2_on_longer_sequences_in_float64", "eager-1f1b", 4, 1e-12), ("opt", "gpipe", 2, 1e-5),
        ("whole", "zb-h1", 2, 1e-12), ("llama_that_divides", "1f1b", 3, 1e-6),
        ("mistral", "zb-h1", 3, 1e-5), ("mixtral", "1f1b", 2, 1e-5),
    ],
)  # fmt: skip
def test_models_train_as_on_whole_sequences(model, name, schedule, slices, most, capsys):
    typed = f"--schedule {schedule} --slices {slices} --microbatches 2 --steps 2 --transport local --json".split()
    assert main(["verify", model(name), *typed]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["verdict"] == "rounding" and f"slices ({slices})" in told["because"]
    assert told["max_rel_error"] < most
    assert all(held <= bound for held, bound in zip(told["held_slices"], told["bound"], strict=True))
    assert all(told["kept_bytes"])


def test_a_loss_that_balances_experts_is_refused(model, capsys):
    assert main(["verify", model("balanced"), *"--slices 4 --transport local".split()]) == 2
    assert "--slices 4: output_router_logits=True balances experts" in capsys.readouterr().err


def test_processes_too(model):
    typed = "--schedule zb-h1 --slices 7,5 --microbatches 3 --steps 2 --json --transport zmq".split()
    ran = rpc_pipe("verify", model("lstm"), *typed)
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout)["max_rel_error"] < 1e-5


LOADING = """
from functools import partial
import torch
from torch import nn
from rpc_pipe import Pipeline, Training
from rpc_pipe.data import Loader, tokens

layers = [nn.Embedding(31, 8), nn.LSTM(8, 8, batch_first=True), nn.Linear(8, 8), nn.Linear(8, 31)]
pipe = Pipeline(layers, lambda x, y: nn.functional.cross_entropy(x.mT, y), num_microbatches=2, slices=3,
                training=Training(partial(torch.optim.SGD, lr=0.1)))
for loss in pipe.train(Loader(tokens("tokens.u8", context=12), rows=4, epochs=1)):
    pass
"""


def test_a_worker_in_the_middle_reads_how_long_sequences_are(tmp_path):
    # It has neither the first layer nor the last, so of a loader's batch it read nothing, and could not cut it.
    (tmp_path / "tokens.u8").write_bytes(bytes(range(31)) * 5)
    (tmp_path / "train.py").write_text(LOADING)
    ran = rpc_pipe("run", "train.py", *"--workers 3 --transport zmq".split(), cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert "3 steps on 3 workers" in ran.stdout


class Attention(nn.Module):
    """Causal attention by the protocol: (x, state) -> (y, state)."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x, state=None):
        q, k, v = self.qkv(x).chunk(3, -1)
        if state is not None:
            k, v = torch.cat([state[0], k], 1), torch.cat([state[1], v], 1)
        mask = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril(k.shape[1] - q.shape[1])
        return x + scaled_dot_product_attention(q, k, v, attn_mask=mask), (k, v)


def layers(kind=Attention):
    torch.manual_seed(1)
    body = kind if kind is Attention else partial(kind, WIDTH, WIDTH, batch_first=True)
    built = [
        nn.Embedding(20, WIDTH),
        body(),
        nn.ReLU(inplace=True),
        body(),
        nn.Linear(WIDTH, WIDTH),
        nn.Linear(WIDTH, 20),
    ]
    return [layer.double() for layer in built]


def loss(output, target):
    return cross_entropy(output.mT, target)


def on_whole_sequences(kind, steps):
    """Return the losses, and the weights by name, of plain training."""
    module = nn.Sequential(*map(state_dropped, layers(kind)))
    optimizer, losses = SGD(module.parameters()), []
    for _ in range(steps):
        pieces = [(x, y, len(x) / 7) for x, y in zip(IDS.split([3, 2, 2]), TARGETS.split([3, 2, 2]), strict=True)]
        losses.append(0.0)
        for x, y, share in pieces:
            part = loss(module(x), y) * share
            part.backward()
            losses[-1] += part.item()
        optimizer.step()
        optimizer.zero_grad()
    return losses, dict(module.named_parameters())


class Dropping(Attention):
    """Drops out scores, rows and tokens as one dimension, and outputs, and adds noise."""

    keeps_on = False

    def forward(self, x, state=None):
        q, k, v = self.qkv(x).chunk(3, -1)
        if state is not None:
            k, v = torch.cat([state[0], k], 1), torch.cat([state[1], v], 1)
        mask = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril(k.shape[1] - q.shape[1])
        found = scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=0.3 * self.training)
        if self.training or self.keeps_on:
            found = dropout(found.flatten(0, 1), 0.4).view_as(x) + 0.1 * torch.randn_like(x)
        return x + dropout(found, 0.2, self.training), (k, v)


def dropping_layers():
    body = [layer for _ in range(3) for layer in (Dropping(), nn.LSTM(WIDTH, WIDTH, 2, batch_first=True, dropout=0.3))]
    built = [nn.Embedding(20, WIDTH), nn.Dropout1d(0.2), *body, nn.Linear(WIDTH, 20)]
    return [layer.double() for layer in built]


@pytest.mark.parametrize(("slices", "schedule_options"), [("4", {"recompute": "all"}), ("5,4,4", {})])
def test_slices_draw_the_same_numbers_with_any_cut(slices, schedule_options):
    """Each slice drew the whole sequence's numbers and dropped most: GPT-2 took 1.6 times as long as without slices."""
    found = []
    for workers in (1, 2):
        torch.manual_seed(3)
        options = {"schedule": "zb-h1", "schedule_options": schedule_options, "num_workers": workers}
        with pipeline(dropping_layers(), slices=slices, **options) as pipe:
            losses = [pipe.step((IDS, TARGETS)) for _ in range(2)]
            found.append((losses, pipe.weights.state_dict()))
    assert found[0][0] == found[1][0]
    assert all(found[0][1][name].equal(weight) for name, weight in found[1][1].items())


def test_draws_of_slices_are_not_compared_with_those_of_whole_sequences():
    with refused("slices"):
        by_whole_sequences(dropping_layers(), make_spec("gpipe", 1, 3, {}, "4"))
    drawing = dropping_layers()
    drawing[2].keeps_on = True
    with pipeline(drawing) as pipe, refused("slices", WorkerFailure):
        pipe.step((IDS, TARGETS))


def by_whole_sequences(built, spec, split=None, loss=loss, steps=2):
    """Return losses and weights of the reference of `rpc-pipe verify`, which runs whole sequences."""
    cut = LayerPartition(built, spec.num_stages, split)
    replicas = [Replica(nn.Sequential(*map(state_dropped, built)), loss)]
    for _ in range(1, spec.num_routes):
        replicas.append(Replica(nn.Sequential(*map(state_dropped, layers())), loss))
    reference = Reference(spec, replicas, cut, SGD, Randomness(0))
    return list(reference.train([(IDS, TARGETS)] * steps)), reference.state_dict()


def pipeline(model=None, loss=loss, **options):
    defaults = {"num_microbatches": 3, "num_workers": 2, "slices": 4}
    return pipeline_with(model or layers(), loss, optimizer=SGD, **(defaults | options))


@pytest.mark.parametrize(
    ("kind", "schedule", "recompute"),
    [
        (Attention, "1f1b", "all"), (Attention, "gpipe", "none"), (Attention, "zb-h1", "none"),
        (Attention, "zb-h1", "all"), (Attention, "v-half", "none"), (nn.LSTM, "interleaved", "none"),
        (nn.LSTM, "1f1b", "all"), (nn.LSTM, "zb-h1", "all"), (nn.GRU, "v-half", "none"),
    ],
)  # fmt: skip
def test_states_of_layers_give_the_gradients_of_whole_sequences(kind, schedule, recompute):
    losses, weights = on_whole_sequences(kind, 2)
    with pipeline(layers(kind), schedule=schedule, schedule_options={"recompute": recompute}) as pipe:
        found = [pipe.step((IDS, TARGETS)) for _ in range(2)]
        state = pipe.weights.state_dict()
        assert not any(shard.slices.num_bytes for actor in pipe.actors for shard in actor.shards.values())
    assert found == pytest.approx(losses, rel=1e-12)
    for name, weight in weights.items():
        torch.testing.assert_close(state[name], weight.detach(), rtol=1e-10, atol=1e-12)


def summed(output, target):
    return cross_entropy(output.mT, target, reduction="sum"), (target >= 0).sum()


@pytest.mark.parametrize(
    ("schedule", "schedule_options", "workers", "replicas", "slices", "loss"),
    [
        ("pipedream", {}, 2, 1, 4, summed), ("pipedream", {"vertical_sync": True}, 3, 1, "5,4,4", loss),
        ("pipedream-2bw", {}, 3, 1, 2, summed), ("pipedream-2bw", {}, 4, 2, 3, loss),
    ],
)  # fmt: skip
def test_slices_use_the_version_of_their_microbatch(schedule, schedule_options, workers, replicas, slices, loss):
    """Schedules that overlap steps refused slices, as each kind of shard had its forward and backward."""
    options = {"schedule": schedule, "schedule_options": schedule_options, "replicas": replicas}
    with pipeline(layers(), loss, num_workers=workers, slices=slices, **options) as pipe:
        losses = list(pipe.train([(IDS, TARGETS)] * 3))
        state, spec, split = pipe.weights.state_dict(), pipe.spec, [len(each) for each in pipe.partition.ranges]
        shards = [shard for actor in pipe.actors for shard in actor.shards.values()]
        assert not any(shard.slices.num_bytes or shard.num_held for shard in shards)
        assert all(not shard.versions._versions for shard in shards)
    expected_losses, expected = by_whole_sequences(layers(), spec, split, loss, steps=3)
    assert losses == pytest.approx(expected_losses, rel=1e-12)
    for name, weight in expected.items():
        torch.testing.assert_close(state[name], weight, rtol=1e-10, atol=1e-12)


def test_sums_that_are_divided_slice_by_slice_have_weights_of_tokens():
    """An update after each microbatch divides a slice's sum before the sums of later slices are known."""

    def weighed(output, target):
        total, count = summed(output, target)
        return total, count * (1 + target[:, 0].remainder(3).sum())

    with pipeline(loss=weighed, schedule="pipedream") as pipe, refused("slices", WorkerFailure):
        list(pipe.train([(IDS, TARGETS)]))


@pytest.mark.parametrize(("kind", "zero"), [(Attention, 0), (nn.LSTM, 1)])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
def test_replicas_train_on_slices(kind, zero, schedule):
    """They were refused together, as slices of one microbatch would have gone to several replicas."""
    losses, weights = on_whole_sequences(kind, 2)
    with pipeline(layers(kind), schedule=schedule, replicas=2, zero=zero, num_workers=4) as pipe:
        found = [pipe.step((IDS, TARGETS)) for _ in range(2)]
        assert pipe.predict(IDS).shape == (7, 13, 20)
        state = pipe.weights.state_dict()
    assert found == pytest.approx(losses, rel=1e-12)
    for name, weight in weights.items():
        torch.testing.assert_close(state[name], weight.detach(), rtol=1e-10, atol=1e-12)


def test_evaluation_and_prediction_are_of_whole_sequences():
    whole = nn.Sequential(*map(state_dropped, layers()))
    with pipeline() as pipe:
        assert torch.equal(pipe.predict(IDS), torch.cat([whole(x) for x in IDS.split([3, 2, 2])]).detach())
        before = pipe.evaluate((IDS, TARGETS))
        assert pipe.step((IDS, TARGETS)) == pytest.approx(before, rel=1e-12)
        assert pipe.evaluate((IDS, TARGETS)) < before


class Mixing(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)

    def forward(self, x):
        return self.conv(x.mT).mT


class Both(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH // 2, batch_first=True, bidirectional=True)

    def forward(self, x):
        return self.lstm(x)[0]


class Attending(nn.Module):
    def __init__(self):
        super().__init__()
        self.attend = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x):
        return self.attend(x, x, x, need_weights=False)[0]


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x):
        return self.norm(x.mT).mT


@pytest.mark.parametrize("kind", [Mixing, Both, Normed, Attending])
def test_what_mixes_a_sequence_otherwise_is_refused(kind):
    model = [nn.Embedding(20, WIDTH), nn.Tanh(), kind(), nn.Linear(WIDTH, 20)]
    with pipeline(model) as pipe, refused("slices", WorkerFailure):
        pipe.step((IDS, TARGETS))


@pytest.mark.parametrize("rate", [0.0, 0.3])
def test_the_check_of_slices_observes_the_whole_alone(rate, monkeypatch):
    """It observed each slice once more, in evaluation, though a model that draws nothing gives the same numbers."""

    class Dropped(Attention):
        def forward(self, x, state=None):
            found, state = super().forward(x, state)
            return dropout(found, rate, self.training), state

    class Stacked(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(20, WIDTH), nn.Linear(WIDTH, 20)
            self.blocks = nn.ModuleList(Dropped() for _ in range(2))

        def forward(self, ids):
            x = self.embed(ids)
            for block in self.blocks:
                x = block(x, None)[0]
            return self.head(x)

    seen, observe_forward = [], observed_stage.observe_forward

    def noted(skeleton, args, kwargs):
        seen.append((skeleton.module.training, args[0].shape[1]))
        return observe_forward(skeleton, args, kwargs)

    monkeypatch.setattr(observed_stage, "observe_forward", noted)
    with pipeline(Stacked(), num_microbatches=1) as pipe:
        pipe.step((IDS[:2, :12], TARGETS[2:4, :12]))
    in_evaluation = [length for training, length in seen if not training]
    assert [length for _, length in seen].count(12) == 2  # once on each stage
    assert bool(in_evaluation) == bool(rate)


def test_a_loss_that_shifts_inside_of_slices_is_refused():
    def shifting(output, target):
        return cross_entropy(output[:, :-1].mT, target[:, 1:])

    with pipeline(loss=shifting) as pipe, refused("slices", WorkerFailure):
        pipe.step((IDS, TARGETS.clamp(min=0)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"slices": 14}, "slices 14: a sequence of 13 has too few; take at most 13"),
        ({"slices": "40,1"}, "slices 40,1: a sequence of 13 has too few; take at most 2"),
        ({"slices": "8,0"}, "slices 8,0: must be a number from 1"),
        ({"schedule": "chimera"}, "slices: schedule chimera has several replicas of every stage; 1f1b"),
        ({"schedule": "avgpipe"}, "slices: schedule avgpipe has several replicas of every stage; 1f1b"),
    ],
)
def test_what_cannot_be_cut(options, message):
    with refused("slices"), pipeline(**options) as pipe:
        pipe.step((IDS, TARGETS))


@pytest.mark.parametrize(
    ("model", "batch", "message"),
    [
        (
            [nn.Embedding(20, 4), nn.Linear(4, 4)],
            (IDS[:, 0], TARGETS[:, 0]),
            r"without a sequence dim.*found int64\[3\], int64\[3\]",
        ),
        (
            [nn.Linear(4, 4)] * 2,
            (torch.ones(7, 4), IDS[:, 0]),
            r"without a sequence dim.*found float32\[3, 4\], int64\[3\]",
        ),
        (
            None,
            (IDS, TARGETS[:, 1:]),
            r"needs tensors that agree in dim.* found int64\[3, 13\], int64\[3, 12\]",
        ),
    ],
)
def test_a_batch_without_sequences_is_refused(model, batch, message):
    """Features were cut as if they were a sequence, and the first layer failed in a worker."""
    with refused("slices"), pipeline(model, cross_entropy) as pipe:
        pipe.step(batch)


def test_layers_with_a_state_train_without_slices_too():
    """The layer behind them got (output, state), so the same list could not be trained whole, to compare with."""
    losses, weights = on_whole_sequences(Attention, 2)
    with pipeline(slices=1) as pipe:
        found = [pipe.step((IDS, TARGETS)) for _ in range(2)]
        state = pipe.weights.state_dict()
    assert found == losses and all(torch.equal(state[name], weight) for name, weight in weights.items())


def summed(output, target):
    return cross_entropy(output.mT, target, reduction="sum"), (target != -100).sum()


@pytest.mark.parametrize("options", [{"schedule": "zb-v", "check": "always"}, {"slices": 13}, {"order": "fixed"}])
def test_sums_and_what_a_pipeline_is_told_besides(options):
    whole = nn.Sequential(*map(state_dropped, layers()))
    expected = cross_entropy(whole(IDS).mT, TARGETS).item()
    with pipeline(loss=summed, **options) as pipe:
        assert next(pipe.train([(IDS, TARGETS)] * 2)) == pytest.approx(expected, rel=1e-12)


class Failing(nn.Module):
    num_calls = 0

    def forward(self, x):
        Failing.num_calls += 1  # not of the layer, whose state an undone step puts back
        if Failing.num_calls == 9:
            raise RuntimeError("once")
        return x


def test_a_step_that_fails_is_undone():
    losses, _ = on_whole_sequences(Attention, 2)
    model = layers()
    model.insert(3, Failing())
    with pipeline(model) as pipe:
        with failed(RuntimeError):
            pipe.step((IDS, TARGETS))
        assert [pipe.step((IDS, TARGETS)) for _ in range(2)] == pytest.approx(losses, rel=1e-12)


def test_the_built_in_gpt_trains_on_slices(capsys):
    """Its attention and its positions had no state, so that both commands refused the option that README recommends."""
    for typed in ("--slices 4", "--slices 8,4,4 --schedule zb-h1 --replicas 2"):
        assert (
            main(["verify", "gpt", *typed.split(), *"--microbatches 4 --steps 2 --transport local --json".split()]) == 0
        )
        told = json.loads(capsys.readouterr().out)
        assert told["verdict"] == "rounding" and told["max_rel_error"] < 1e-5
    losses = []
    for typed in ((), ("--slices", "4")):
        ran = rpc_pipe("run", *SMALL, *TEXT, *"--steps 2 --workers 2 --transport local --json".split(), *typed)
        assert ran.returncode == 0, ran.stderr
        losses.append(json.loads(ran.stdout)["loss"])
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
