"""Hooks and containers through which tensors leave blocks: those of a model's first forward, of users, of `vmap`."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from in_turn import floats
from test_whole import SGD, made, plain
from torch import Tensor, nn
from torch.nn import functional

from rpc_pipe import ConfigError, Pipeline, Training

X, Y = floats(8, 8), floats(8, 8)


class Listed(nn.Module):
    """Four blocks in a list; what is kept of them is added to the output."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)])
        self.kept: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.kept = []
        for layer in self.layers:
            x = layer(x)
        return x + sum(kept.mean(-1, keepdim=True) * (2 + place) for place, kept in enumerate(self.kept))


class Lazy(Listed):
    """Registers its hooks in its first forward, as transformers does for hidden states."""

    hooked = False

    def keep(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self.kept += [args[0], output] if not self.kept else [output]

    def forward(self, x: Tensor) -> Tensor:
        if not self.hooked:
            for layer in self.layers:
                layer.register_forward_hook(self.keep)
            self.hooked = True
        return super().forward(x)


class KeepsInput(Listed):
    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            layer.register_forward_hook(self.keep)

    def keep(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self.kept.append(args[0])


class KeepsBefore(Listed):
    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            layer[1].register_forward_pre_hook(self.keep)

    def keep(self, module: nn.Module, args: Any) -> None:
        self.kept.append(args[0])


class KeepsMean(KeepsInput):
    """The hook computes by the output, so that the tensor that is kept is another one."""

    def keep(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self.kept.append(output.square().mean(0))


class ByClosure(Listed):
    """The hook of each block is a closure over the model."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            layer.register_forward_hook(lambda module, args, output: self.kept.append(output))


class KeepsInBlock(Listed):
    """Each block keeps its input in an attribute."""

    class Block(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            self.given = x
            return super().forward(x).tanh()

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([self.Block(8, 8) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.layers[0].given.mean() + self.layers[2].given.square()


class Lists(Listed):
    """The blocks append to a list that they are given."""

    class Block(nn.Linear):
        def forward(self, x: Tensor, losses: list[Tensor]) -> Tensor:  # type: ignore[override]
            losses.append(x.mean(-1, keepdim=True))
            return super().forward(x).tanh()

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([self.Block(8, 8) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        losses: list[Tensor] = []
        for layer in self.layers:
            x = layer(x, losses)
        return x + sum(losses)


class SharedKeys(Listed):
    """The last blocks take keys that the first two have put into a dict, as Gemma 3n and Gemma 4 do."""

    class Block(nn.Linear):
        def forward(self, x: Tensor, place: int, *, shared: dict[str, tuple[Tensor, Tensor]]) -> Tensor:  # type: ignore[override]
            kind = "even" if place % 2 == 0 else "odd"
            if place < 2:
                shared[kind] = super().forward(x).tanh(), x * 2
            key, value = shared[kind]
            return super().forward(x) * key.softmax(-1) + value

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([self.Block(8, 8) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        shared: dict[str, tuple[Tensor, Tensor]] = {}
        for place, layer in enumerate(self.layers):
            x = layer(x, place, shared=shared)
        return x


class Masked(Listed):
    """A mask that `vmap` makes around the blocks, of indices into an input, as the stock Gemma 3 does for images."""

    def forward(self, x: Tensor) -> Tensor:
        groups = (x > 0).long()

        def seen(row: Tensor, place: Tensor) -> Tensor:
            return groups[row, place] == groups[row, 0]

        each = torch.vmap(torch.vmap(seen, (None, 0)), (0, None))
        return super().forward(x * each(torch.arange(len(x)), torch.arange(8)).float())


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize(
    "kind", [Lazy, KeepsInput, KeepsBefore, KeepsMean, ByClosure, KeepsInBlock, Lists, SharedKeys, Masked]
)  # fmt: skip
def test_what_hooks_and_blocks_keep_trains_as_in_one_process(kind, workers):
    """Hooks of a first forward were missed from the second microbatch on; what the others keep was refused."""
    model, alone, loss_fn = made(kind), made(kind), functional.mse_loss
    pieces = [((a, b), {}) for a, b in zip(X.chunk(4), Y.chunk(4), strict=True)]
    expected = plain(lambda a, b: loss_fn(alone(a), b), [pieces] * 3, lambda loss: loss, list(alone.parameters()))
    pipe = Pipeline(model, loss_fn, training=Training(SGD), num_microbatches=4, num_workers=workers)
    assert [pipe.step((X, Y)) for _ in range(3)] == expected


def test_the_users_model_runs_before_and_after_with_hooks_of_its_own():
    """The blocks of the user's model had got the hooks of the stages' copies, and its forward registered them twice."""
    model = made(Lazy)
    alone = copy.deepcopy(model)
    training = Training(partial(torch.optim.SGD, lr=0.0))
    pipe = Pipeline(model, functional.mse_loss, training=training, num_microbatches=2, num_workers=2)
    first = pipe.step((X, Y))
    assert torch.equal(model(X), alone(X))
    assert pipe.step((X, Y)) == first


def _bert(**options: Any) -> tuple[nn.Module, dict[str, Tensor]]:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16, "vocab_size": 32}
    drop = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = transformers.BertConfig(num_hidden_layers=4, num_labels=3, **sizes, **drop, **options)
    return made(lambda: transformers.BertForSequenceClassification(config)), {
        "input_ids": torch.arange(24).view(4, 6),
        "labels": torch.arange(4) % 3,
    }


@pytest.mark.parametrize(
    ("options", "workers"), [({"output_hidden_states": True}, 3), ({"output_attentions": True}, 2)]
)
def test_a_loss_reads_hidden_states_and_attentions_of_a_stock_bert(options, workers):
    """The first forward also changes the configuration, and when it was run again the hooks were registered twice."""
    model, batch = _bert(attn_implementation="eager", **options)
    alone = copy.deepcopy(model)

    def loss_fn(output: Any, batch: Any) -> Tensor:
        kept = output.hidden_states or output.attentions
        return output.loss + sum(each.square().mean() * place for place, each in enumerate(kept))  # type: ignore[no-any-return]

    pieces = [((), {name: tensor[i : i + 2] for name, tensor in batch.items()}) for i in (0, 2)]
    expected = plain(alone, [pieces] * 2, lambda output: loss_fn(output, None))
    pipe = Pipeline(model, loss_fn, training=Training(SGD), num_microbatches=2, num_workers=workers)
    assert [pipe.step(batch) for _ in range(2)] == expected


@pytest.mark.parametrize("keep", [lambda y: y, lambda y: y.detach(), lambda y: torch.tensor(y.detach().sum().item())])
@pytest.mark.parametrize(("block", "is_refused"), [(0, True), (3, False)])
def test_a_loss_reads_what_a_hook_keeps(block, is_refused, keep):
    """The loss met a placeholder of another stage, and its error was one of torch; or it used an older number."""
    kept: dict[str, Tensor] = {}
    model = made(Listed)
    model.layers[block].register_forward_hook(lambda module, args, output: kept.update(features=keep(output)))
    alone = made(Listed)

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return functional.mse_loss(output, target) + kept["features"].square().mean()

    pipe = Pipeline(model, loss_fn, training=Training(SGD), num_microbatches=1, num_workers=2)
    if is_refused:
        with pytest.raises(ConfigError):
            pipe.step((X, Y))
        return
    output = alone(X)
    assert pipe.step((X, Y)) == (functional.mse_loss(output, Y) + keep(output).square().mean()).item()
