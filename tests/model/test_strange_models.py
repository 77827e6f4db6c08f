"""What people write that no test had: each was refused, differed in silence or never ended."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from in_turn import assert_same, floats, in_turn, stages_of, uncut
from refusals import refused
from test_whole import SGD, made, plain
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from rpc_pipe import Training
from rpc_pipe.model.observed_model import observe
from rpc_pipe.model.sharding import cut
from rpc_pipe.pipeline import Pipeline


def linears(count: int = 4) -> list[nn.Linear]:
    return [nn.Linear(8, 8) for _ in range(count)]


class Listed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(linears())

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x


class Dicts(nn.Module):
    """Blocks in a dict, parameters in a list and in a dict: the search for blocks went in a circle."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(8)) for _ in range(4)])
        self.biases = nn.ParameterDict({"last": nn.Parameter(torch.zeros(8))})
        self.layers = nn.ModuleDict({f"number{i}": layer for i, layer in enumerate(linears())})

    def forward(self, x: Tensor) -> Tensor:
        for scale, layer in zip(self.scales, self.layers.values(), strict=True):
            x = layer(x * scale).relu()
        return x + self.biases["last"]


class Recurrent(nn.Module):
    """Recurrent layers, which change shapes in place."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.GRU(8, 4, batch_first=True, bidirectional=True) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x, _ = layer(x)
        return x


class Normed(Listed):
    """Weights computed by every forward, which no deep copy takes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.utils.weight_norm(layer) for layer in self.layers])


class Generated(Listed):
    """Blocks that are called with weights that another module has made."""

    def __init__(self) -> None:
        super().__init__()
        self.made = nn.Linear(3, 64)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.made(torch.ones(3)).view(8, 8)
        for layer in self.layers:
            x = torch.func.functional_call(layer, {"weight": layer.weight + weight}, (x,)).tanh()
        return x


class InPlaceOnViews(Listed):
    """What a linear layer makes of three dimensions is a view, which is then written."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            y = layer(x)
            y += x
            x = y.tanh()
        return x


class Hooked(Listed):
    """Hooks of every kind on blocks; that of the second is where a stage ends."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[0].register_forward_pre_hook(lambda module, args: (args[0] + 1,))
        self.layers[1].register_full_backward_hook(lambda module, into, out: (into[0] / 2,))
        self.layers[2].register_full_backward_pre_hook(lambda module, out: (out[0] / 4,))
        self.layers[3].register_forward_hook(lambda module, args, output: output * 2)


class WithConstants(nn.Module):
    """Its blocks return numbers that they make, and use those that others have made."""

    class Block(nn.Linear):
        def forward(self, x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
            return super().forward(x).tanh() * scale, torch.tensor([0.5])

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([self.Block(8, 8) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        scale = torch.tensor(1.5)
        for block in self.blocks:
            x, scale = block(x, scale)
        return x + scale


class HeldTwice(Listed):
    """Its blocks compute by weights that they hold in a plain list or dict besides."""

    class Block(nn.Linear):
        def __init__(self, dicts: bool) -> None:
            super().__init__(8, 8)
            self.plain = {"both": [self.weight, self.bias]} if dicts else [self.weight, self.bias]

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.linear(x, *(self.plain["both"] if isinstance(self.plain, dict) else self.plain))

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([self.Block(number % 2 == 1) for number in range(4)])


class Heard(Listed):
    """A model of speech: its loss had no shape without numbers, and each such model was refused."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        spoken = super().forward(x).log_softmax(-1).transpose(0, 1)
        labels = torch.tensor([[1, 2, 2], [3, 0, 0]])
        lengths = (labels != 0).sum(-1)
        heard = torch.full((len(labels),), len(spoken))
        return {"loss": nn.functional.ctc_loss(spoken, labels[labels != 0], heard, lengths)}


#: (model, shape of its input, how the names begin of what is summed by stage first)
CASES = {
    "dicts": (Dicts, (2, 8), ()),
    "recurrent": (Recurrent, (2, 5, 8), ()),
    "weights that forwards compute": (Normed, (2, 8), ()),
    "weights that a module makes": (Generated, (2, 8), ("made",)),
    "views in place": (InPlaceOnViews, (2, 3, 8), ()),
    "hooks of blocks": (Hooked, (2, 8), ()),
    "constants of blocks": (WithConstants, (2, 8), ()),
    "weights in plain lists": (HeldTwice, (2, 8), ()),
    "speech": (Heard, (2, 9, 8), ()),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm")
@pytest.mark.parametrize("case", CASES)
def test_strange_models_are_as_uncut(case):
    make, shape, summed = CASES[case]
    torch.manual_seed(0)
    model = make()
    x = floats(*shape)
    observed = observe(model, [x])
    outcomes = [in_turn(stages_of(observed, count), x) for count in (1, 2, observed.num_blocks)]
    expected = uncut(model, x)
    names = {name for name in expected.grads if name.startswith(summed)} if summed else ()
    for outcome in outcomes:
        assert_same(outcome, expected, names)


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*linears())

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint_sequential(self.layers, 2, x, use_reentrant=False)


def test_a_checkpoint_around_blocks_of_two_stages_is_refused():
    """Its backward computed blocks of the other stage, which have no numbers."""
    observed = observe(Checkpointed(), [floats(2, 8)])
    observed.check(cut(4, 2))
    with refused("model"):
        observed.check(cut(4, 4))


class CheckpointedInside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*linears())

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.pair, self.layers[:2](x), use_reentrant=False)

    def pair(self, x: Tensor) -> Tensor:
        return checkpoint(self.layers[3], self.layers[2](x), use_reentrant=False)


def test_a_checkpoint_inside_another_does_not_hide_it():
    """The second block of the outer one was in a call of its own, so the outer one was cut: gradients were wrong."""
    with refused("model"):
        observe(CheckpointedInside(), [floats(2, 8)]).check(cut(4, 4))


def hooked_whole() -> nn.Module:
    model = Listed()
    model.register_full_backward_hook(lambda module, into, out: None)
    return model


def scripted() -> nn.Module:
    model = Listed()
    model.layers[0] = torch.jit.script(model.layers[0])
    return model


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (hooked_whole, "a backward hook of Listed sees several stages"),
        (lambda: nn.ModuleList([nn.LazyLinear(8)]), "weight of 0 .LazyLinear. has no shape"),
        (scripted, "layers.0 was made by torch.jit, whose weights stay"),
    ],
)
@pytest.mark.filterwarnings("ignore:Lazy modules")
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated")
def test_what_no_stage_can_do_is_refused(make, says):
    with refused("model"):
        observe(make(), [floats(2, 8)])


class Uncalled(Listed):
    """Uses the weights of modules that it does not call, as attention does, in a list or in a block."""

    def __init__(self, *, in_block: bool) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 8)
        if in_block:
            self.layers = nn.ModuleList([nn.MultiheadAttention(8, 2)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for layer in self.layers:
            if isinstance(layer, nn.Linear):
                x = nn.functional.linear(x, layer.weight, layer.bias).tanh()
            else:
                x = layer(x, x, x)[0]
        return x


@pytest.mark.parametrize(("in_block", "num_workers"), [(False, 1), (True, 2)])
def test_modules_that_are_not_called_are_no_blocks(in_block, num_workers):
    """A stage looked for a module of the model's class, and a cut was wanted inside of attention."""
    model, x, loss_fn = made(partial(Uncalled, in_block=in_block)), floats(6, 8), nn.functional.mse_loss
    alone = copy.deepcopy(model)
    pipe = Pipeline(model, loss_fn, training=Training(SGD), num_workers=num_workers, num_microbatches=2)
    pieces = [((piece, piece), {}) for piece in x.chunk(2)]
    expected = plain(lambda a, b: loss_fn(alone(a), b), [pieces] * 2, lambda loss: loss, list(alone.parameters()))
    assert [pipe.step((x, x)) for _ in range(2)] == expected


class Shares(Listed):
    """Its blocks write into the dict that they are given and return it; the model goes on with its own."""

    class Block(nn.Linear):
        def forward(self, state: dict[str, Tensor]) -> dict[str, Tensor]:  # type: ignore[override]
            state["x"] = super().forward(state["x"])
            return state

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([self.Block(8, 8) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        state = {"x": x}
        for layer in self.layers:
            layer(state)
        return state["x"]


def test_what_a_block_writes_into_a_dict_that_it_got_travels():
    """The later stages took the earlier contents, and trained something else in silence."""
    model, x, loss_fn = made(Shares), floats(6, 8), nn.functional.mse_loss
    alone = copy.deepcopy(model)
    pipe = Pipeline(model, loss_fn, training=Training(SGD), num_workers=2, num_microbatches=2)
    pieces = [((piece, piece), {}) for piece in x.chunk(2)]
    expected = plain(lambda a, b: loss_fn(alone(a), b), [pieces] * 2, lambda loss: loss, list(alone.parameters()))
    assert [pipe.step((x, x)) for _ in range(2)] == expected


class AsksItself(Listed):
    """A penalty on the gradient, in the model's own forward."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        y = super().forward(x)
        return y + torch.autograd.grad(y.sum(), x, create_graph=True)[0]


def test_a_backward_of_the_models_own_through_its_blocks_is_named():
    """The sentence told of an operation that Python does not see."""
    with refused("model"):
        observe(AsksItself(), [floats(2, 8)])


class CheckpointedBlocks(Listed):
    """Each block in a checkpoint of its own."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False).tanh()
        return x


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_a_checkpoint_of_each_block_is_not_refused(schedule):
    """What is saved for a split backward was seen as the model's own operation."""
    model = made(CheckpointedBlocks)
    alone, x, y = copy.deepcopy(model), floats(6, 8), floats(6, 8)
    loss_fn = nn.functional.mse_loss
    pipe = Pipeline(model, loss_fn, training=Training(SGD), schedule=schedule, num_workers=2, num_microbatches=3)
    pieces = [(pair, {}) for pair in zip(x.chunk(3), y.chunk(3), strict=True)]
    expected = plain(lambda a, b: loss_fn(alone(a), b), [pieces] * 2, lambda loss: loss, list(alone.parameters()))
    assert [pipe.step((x, y)) for _ in range(2)] == expected
    assert all(torch.equal(tensor, alone.state_dict()[name]) for name, tensor in pipe.weights.state_dict().items())


class Turns(nn.Module):
    """Goes another way behind a block that has moved its weight, and exchanges a buffer around the blocks."""

    class Block(nn.Linear):
        def __init__(self, how: str) -> None:
            super().__init__(8, 8)
            self.book = nn.Parameter(torch.ones(8), requires_grad=False)
            self.scale, self.how = nn.Parameter(torch.ones(8)), how

        def forward(self, x: Tensor) -> Tensor:
            if self.how == "follows":
                with torch.no_grad():
                    self.book.lerp_(self.scale, 0.5)
                return super().forward(x) * self.scale + self.book
            if self.how == "exchanges":
                y = super().forward(x) * self.book
                self.book.data = self.book.data * 0.9
                return y
            self.book.data.mul_(0.9)
            return super().forward(x) * self.book

    def __init__(self, how: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([self.Block(how) for _ in range(4)])
        self.register_buffer("shift", torch.zeros(8))

    def forward(self, x: Tensor, turned: Tensor) -> dict[str, Tensor]:
        self.shift = self.shift + 0.1
        for block in self.blocks:
            x = block(x) + self.shift
            x = x.tanh() if turned.any() else x.relu()
        return {"loss": x.square().mean()}


@pytest.mark.parametrize("how", ["writes", "exchanges", "follows"])
def test_a_forward_that_is_run_again_has_written_its_weights_once(how):
    """It was begun as another had been observed, and had moved a weight and exchanged a buffer once more by then; and
    backward read what a weight had been before, where that had been given other memory. One that follows another from
    where that begins, as a teacher does, was not known to be written: the first forward leaves it as it is."""
    model, x = made(partial(Turns, how)), floats(2, 8)
    alone = copy.deepcopy(model)
    pieces = [((x, torch.tensor([turned, turned])), {}) for turned in (False, True, False, True)]
    pipe = Pipeline(model, training=Training(SGD), schedule="naive", num_workers=2, num_microbatches=4)
    given = [[{"x": x, "turned": turned} for (x, turned), _ in pieces]] * 2
    assert [pipe.step(microbatches=each) for each in given] == plain(
        alone, [pieces] * 2, parameters=[p for p in alone.parameters() if p.requires_grad]
    )
    assert all(torch.equal(tensor, alone.state_dict()[name]) for name, tensor in pipe.weights.state_dict().items())


class Biased(Listed):
    """FlexAttention whose scores get a bias that the first stage has, in a function."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(floats(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            q = layer(x).view(-1, 4, 2, 4).transpose(1, 2)
            x = x + flex_attention(q, q, q, lambda score, b, h, i, j: score * self.bias[j]).transpose(1, 2).flatten(2)
        return x


class Chooses(Listed):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)))


@pytest.mark.filterwarnings("ignore")
def test_attention_by_a_function_is_followed_through_stages(monkeypatch):
    """Told was that "there was no rule registered for HigherOrderOperator flex_attention"."""
    monkeypatch.setattr("torch.nn.attention.flex_attention._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    model, x = made(Biased).requires_grad_(False), floats(4, 4, 8)
    with Pipeline(model, lambda output, x: output.sum(), num_workers=3, num_microbatches=2) as pipe:
        assert torch.equal(pipe.predict(x), torch.cat([model(x[:2]), model(x[2:])]))
    with refused("model"):
        Pipeline(made(Chooses), nn.MSELoss(), num_microbatches=2, num_workers=2, example=(x[0], x[0]))
