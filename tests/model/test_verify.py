"""`rpc-pipe verify` of a model of the user's: the verdict, its JSON, and what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from processes import rpc_pipe
from refusals import refused
from torch import nn

from rpc_pipe.commands.main import main
from rpc_pipe.commands.run import command as run
from rpc_pipe.verifying.keyed import Keyed
from rpc_pipe.verifying.proof import seeded
from rpc_pipe.verifying.verdict import _difference, _precision

MODELS = """
import random
import sys
sys.path.insert(0, {folder!r})
import torch.utils.checkpoint
import unsplit_models as models
from codebook import Codebook
from torch import nn


def tied():
    ids = torch.randint(11, (5, 6))
    return models.Tied(dropout=0.2), {{"ids": ids, "labels": ids}}


def drawn():
    ids = torch.tensor([[random.randrange(11) for _ in range(6)] for _ in range(4)])
    return models.Tied(), {{"ids": ids, "labels": ids}}


def unet():
    return models.UNet(), {{"x": torch.randn(4, 2, 8, 8), "wanted": torch.randn(4, 2, 8, 8)}}, loss


def loss(output, batch):
    return (output - batch["wanted"]).square().sum(), batch["wanted"].numel()


def codebook():
    return Codebook(), (torch.randn(4, 4),)


def pair():
    return models.Nested(), (torch.randn(4, 6), torch.randn(4, 8)), nn.functional.mse_loss


def embedded():
    embed, head = nn.Embedding(11, 8, sparse=True), nn.Linear(8, 11, bias=False)
    head.weight, twice, ids = embed.weight, nn.Linear(8, 8), torch.randint(11, (5, 6))
    layers = [embed, twice, nn.Dropout(0.2), nn.Tanh(), nn.Linear(8, 8), twice, head]
    return layers, (ids, ids), lambda out, ids: nn.functional.cross_entropy(out.flatten(0, 1), ids.flatten())


def again():
    class Again(nn.Linear):
        def forward(self, x):
            return torch.utils.checkpoint.checkpoint(super().forward, x, use_reentrant=True)

    twice = Again(6, 6)
    layers = [nn.Linear(6, 6), twice, nn.Tanh(), nn.Linear(6, 6), twice, nn.Linear(6, 6)]
    return layers, (torch.randn(8, 6), torch.randn(8, 6)), nn.MSELoss()


def encoder_decoder():
    ids = torch.randint(11, (6, 4))
    return models.EncoderDecoder(), {{"source": ids, "target": ids.flip(1)}}, logits_loss


def logits_loss(output, batch):
    return nn.functional.cross_entropy(output["logits"].flatten(0, 1), batch["target"].flatten())


def remembered():
    class Remembered(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.blocks = nn.Linear(6, 8), nn.ModuleList(models.Block() for _ in range(4))

        def forward(self, x):
            x = self.stem(x)
            first = x.clone()
            for block in self.blocks:
                x = block(x + first if block is self.blocks[2] else x)
            return x

    return Remembered(), (torch.randn(8, 6), torch.randn(8, 8)), nn.functional.mse_loss


def layers():
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))), (torch.randn(4, 4), torch.randn(4, 4)), nn.MSELoss()


def draws():
    class Draws(models.Nested):
        def forward(self, x):  # rrelu draws for what is negative alone: nothing, here, before the dropout
            x = nn.functional.rrelu(super().forward(x).sigmoid(), training=self.training)
            return nn.functional.dropout(x, 0.5, self.training)

    return Draws(), (torch.randn(4, 6), torch.randn(4, 8)), nn.functional.mse_loss


def taught():
    class Taught(nn.Module):
        def __init__(self):
            super().__init__()
            self.teacher, self.student = models.Nested().requires_grad_(False), models.Nested()
            self.guess = nn.Linear(8, 8)

        def forward(self, x):
            with torch.no_grad():
                for weight, moved in zip(self.teacher.parameters(), self.student.parameters()):
                    weight.lerp_(moved, 0.1)
                wanted = self.teacher(x)
            return nn.functional.mse_loss(self.guess(self.student(x)), wanted)

    return Taught(), {{"x": torch.randn(8, 6)}}


def asks():
    class Asks(models.Nested):
        def forward(self, x):
            x = super().forward(x)
            return (x * 2 if x.sum() > 0 else x).mean()

    return Asks(), torch.randn(4, 6)


def no_loss():
    return models.Nested(), torch.randn(4, 6)
"""


# Written by people who have a mixture of experts: the loss reads what the blocks have set.
AUXILIARY = """
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.aux = nn.Linear(6, 6), torch.zeros(())

    def forward(self, x):
        x = self.linear(x)
        self.aux = x.square().mean()
        return x.tanh()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def make():
    model = Model()
    return model, (torch.randn(8, 6), torch.randn(8, 6)), lambda out, y: (
        nn.functional.mse_loss(out, y) + sum(block.aux for block in model.blocks)
    )


def normed():
    layers = [nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)) for _ in range(4)]
    return nn.Sequential(*layers), (torch.randn(16, 6), torch.randn(16, 6)), nn.functional.mse_loss


def whole():
    class Whole(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.2)) for _ in range(4))

        def forward(self, x):
            for block in self.blocks:
                x = block(x)
            return x

    return Whole(), (torch.randn(16, 6), torch.randn(16, 6)), nn.functional.mse_loss


def counted():
    layers, batch, loss = normed()
    return layers, batch, lambda out, y: (nn.functional.mse_loss(out, y, reduction="sum"), y.numel())
"""


def test_the_reference_of_a_loss_that_reads_the_blocks_is_the_users_own_module(tmp_path, capsys):
    """The reference was a copy as well, in which nobody had set anything: 3.55 for 4.66 was called identical."""
    (tmp_path / "moe.py").write_text(AUXILIARY)
    code, found, _ = verified(capsys, f"{tmp_path}/moe.py:make", "--microbatches", "2", "--steps", "1")
    made = seeded(f"{tmp_path}/moe.py:make", 0)
    losses = [made.loss_fn(made.model(x), y) for x, y in zip(*(side.chunk(2) for side in made.batch), strict=True)]
    right = sum(losses).item() / 2
    # Refused, or right; silently wrong is what must not be called identical.
    assert code == 2 or (found["loss"] == pytest.approx(right, rel=1e-4)) == (code == 0), found


GPT2 = """
from torch import randint
from transformers import GPT2Config, GPT2LMHeadModel


def tied():
    return make(True)


def make(tied=False):
    config = GPT2Config(vocab_size=31, n_embd=16, n_layer=4, n_head=2, n_positions=16, tie_word_embeddings=tied)
    ids = randint(31, (8, 12))
    return GPT2LMHeadModel(config), {"input_ids": ids, "labels": ids}
"""


@pytest.mark.parametrize("name", ["make", "tied"])
def test_the_reference_keeps_no_cache_either(tmp_path, capsys, name):
    """One process copied keys and values into a cache; with other strides the backward of attention has other bits."""
    pytest.importorskip("transformers")
    (tmp_path / "gpt2.py").write_text(GPT2)
    code, found, text = verified(capsys, f"{tmp_path}/gpt2.py:{name}", "--workers", "2", "--steps", "2")
    assert (code, found["verdict"]) == (0, "identical"), text


@pytest.mark.parametrize("schedule", ["chimera", "mixpipe"])
def test_each_replica_has_statistics_of_its_own(tmp_path, capsys, schedule):
    """The reference had one set for both directions, and called exact training different."""
    (tmp_path / "bn.py").write_text(AUXILIARY)
    typed = [f"{tmp_path}/bn.py:normed", "--schedule", schedule, "--workers", "2", "--microbatches", "4"]
    code, found, text = verified(capsys, *typed)
    assert (code, found["verdict"]) == (0, "identical"), text


@pytest.mark.parametrize("model", ["whole", "normed", "counted"])
@pytest.mark.parametrize("schedule", ["pipedream", "pipedream-2bw", "avgpipe"])
def test_a_model_of_the_users_is_replayed_where_steps_overlap(tmp_path, capsys, schedule, model):
    """Refused: only the built-in models were compared with a replay of the versions that are declared."""
    (tmp_path / "own.py").write_text(AUXILIARY)
    typed = [f"{tmp_path}/own.py:{model}", "--schedule", schedule, "--workers", "2", "--microbatches", "4"]
    code, found, text = verified(capsys, *typed)
    assert (code, found["verdict"]) == (0, "identical"), text


def test_norms_are_compared_where_gradients_are_clipped(tmp_path, capsys):
    (tmp_path / "own.py").write_text(AUXILIARY)
    code, found, text = verified(capsys, f"{tmp_path}/own.py:whole", "--microbatches", "4", "--max-grad-norm", "0.01")
    assert (code, found["verdict"]) == (0, "identical"), text


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "my_models.py"
    path.write_text(MODELS.format(folder=str(Path(__file__).parent)))
    return path


def verified(capsys, *arguments: str) -> tuple[int, dict, str]:
    code = main(["verify", "--steps", "4", *arguments, "--transport", "local", "--json"])
    captured = capsys.readouterr()
    return code, json.loads(captured.out) if captured.out else {}, captured.err


def test_a_difference_of_imaginary_parts_is_one():
    """Complex tensors were compared by their real parts, with a warning of torch."""
    one = torch.tensor([1 + 1j])
    assert _difference(one, one.conj().resolve_conj()) == pytest.approx((2.0, 2**0.5)) and _precision(one.dtype) > 0


@pytest.mark.parametrize(
    ("name", "verdict", "options"),
    [
        ("tied", "identical", ["--workers", "3"]),
        ("tied", "identical", ["--workers", "4", "--replicas", "2", "--zero", "1", "--max-grad-norm", "0.1"]),
        ("embedded", "identical", ["--workers", "6", "--replicas", "2"]),
        ("embedded", "identical", ["--workers", "2", "--schedule", "zb-v"]),
        ("encoder_decoder", "identical", ["--workers", "3", "--schedule", "chimera"]),
        ("unet", "identical", ["--workers", "3", "--schedule", "zb-h1"]),
        # a copy of what is made of weights alone ran where it was taken, so that its gradient came first
        ("remembered", "identical", ["--workers", "4"]),
        ("pair", "identical", ["--workers", "2"]),
        ("draws", "identical", ["--workers", "2"]),
        ("layers", "identical", ["--workers", "2"]),
        # the reference moved the teacher once more: in the forward that counts for nothing
        ("taught", "identical", ["--workers", "2"]),
        ("again", "rounding", ["--workers", "2"]),
    ],
)
def test_a_model_of_the_users_trains_as_in_one_process(file, capsys, name, verdict, options):
    """The reference added all uses of a tied weight microbatch by microbatch, the stages each their own: rounding.

    Its microbatches also began elsewhere in memory, by which kernels go. What it cannot tell apart is computed again.
    """
    code, found, text = verified(capsys, f"{file}:{name}", "--microbatches", "3", *options)
    assert (code, found["verdict"], found["identical"]) == (0, verdict, verdict == "identical"), text
    assert found["max_rel_error"] < 1e-5 and found["steps"] == 4
    if verdict == "rounding":
        assert "within the rounding of floats" in text
        assert "several stages use 1.weight, 1.bias, whose uses one process does not tell apart" in found["because"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["{file}:asks"], "needs numbers that depend on parameters"),
        (["{file}:no_loss"], "returned a tensor of shape (2, 8) and no loss"),
        (["{file}:tied", "--workers", "90"], "--workers 90: 90 stages, and"),
        (["{file}:missing"], "has no function 'missing'"),
        (["{file}x:tied"], "must be gpt, conv, mlp, or path/to/file.py:make"),
        (["{file}:tied", "--blocks", "block"], "the model has no module of this name; the nearest is blocks"),
        (["{file}:tied", "--rows", "3"], "--rows 3: is of the built-in models"),
        (["--list-blocks"], "--list-blocks: is of a model of yours"),
    ],
)
def test_what_cannot_be_cut_is_refused_in_a_sentence(file, capsys, arguments, says):
    typed = [each.format(file=file) for each in arguments]
    code, found, text = verified(capsys, *typed, "--microbatches", "2")
    assert (code, found) == (2, {}) and " ".join(says.split()) in " ".join(text.split())
    assert "Traceback" not in text


def test_a_codebook_between_two_lists_becomes_a_block(file, capsys):
    """The refusal named the blocks to type, which nobody but the model's author could have known to be the remedy."""
    for blocks in ((), ("--blocks", "enc,dec,book")):
        code, found, text = verified(capsys, f"{file}:codebook", "--microbatches", "2", *blocks)
        assert (code, found["identical"]) == (0, True), text


def test_blocks_and_every_cut_are_listed(file, capsys):
    code, found, _ = verified(capsys, f"{file}:unet", "--list-blocks")
    assert code == 0
    names = [block["name"] for block in found["blocks"]]
    assert names == ["downs.0", "downs.1", "downs.2", "ups.0", "ups.1", "ups.2"]
    assert [len(block["payload"]) for block in found["blocks"][:-1]] == [1, 2, 3, 3, 2]
    assert found["blocks"][0]["payload_bytes"] == 4 * 4 * 8 * 8 * 4


def test_layers_of_a_list_are_listed(tmp_path, capsys):
    """It was refused: they can be cut between any two. What that costs was not said."""
    make = "import torch\nfrom torch.nn import Linear, Tanh, MSELoss\ndef make():\n"
    make += "    return [Linear(4, {}), Tanh(), Linear(8, 4)], (torch.ones(2, 4), torch.ones(2, 4)), MSELoss()\n"
    (tmp_path / "right.py").write_text(make.format(8))
    code, found, _ = verified(capsys, f"{tmp_path}/right.py:make", "--list-blocks")
    assert code == 0 and [block["parameters"] for block in found["blocks"]] == [40, 0, 36]
    assert [block["payload_bytes"] for block in found["blocks"][:-1]] == [2 * 8 * 4] * 2
    (tmp_path / "wrong.py").write_text(make.format(5))
    code, _, text = verified(capsys, f"{tmp_path}/wrong.py:make", "--list-blocks")
    assert code == 2 and "layer 2 (Linear) raised RuntimeError: " in text and "mat1 and mat2" in text


def test_run_and_compare_take_the_same_model(file, capsys):
    assert main(["compare", "--model", f"{file}:pair", "--workers", "2", "--microbatches", "2", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {row["schedule"] for row in rows} >= {"1f1b", "zb-h1"} and any(row["makespan"] for row in rows)
    with refused("--model"):
        run({"model": "gpt"}, [])
    with refused("--model"):
        run({"model": "m.py:make", "script": "mine.py"}, [])


def test_a_model_of_the_users_is_trained_by_run(file):
    """Only torch's generator was alike in all processes: batches that others drew differed, and ended the run."""
    typed = ["run", "--model", f"{file}:drawn", "--steps", "2", "--microbatches", "2", "--transport", "local", "--json"]
    typed += ["--seed", "5"]
    made = seeded(f"{file}:drawn", 5)
    loss = made.model(**made.batch)["loss"].item()
    done = rpc_pipe(*typed)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["steps"] == 2 and "step 2 of 2: loss" in done.stderr
    assert "replaces" not in done.stderr, "there is no script that says anything else"
    assert float(re.search(r"step 1 of 2: loss (\S+)", done.stderr)[1]) == pytest.approx(loss, abs=1e-3)


def test_the_one_process_to_compare_with_evaluates_by_the_same_kernels():
    """Under a mode torch leaves the fast path of attention, which the blocks of a pipeline take: bits differed."""
    torch.manual_seed(0)
    model = nn.ModuleList([nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)]).eval()
    x = torch.randn(64, 5, 8)
    with torch.no_grad():
        expected = model[0](x)
        with Keyed(model, ["0"], lambda position, number: None):
            assert torch.equal(model[0](x), expected)
