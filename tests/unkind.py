"""Models that are legal in one process and hard on a pipeline, and the one process to compare with."""

from __future__ import annotations

import copy
import random
from collections import namedtuple
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from rpc_pipe.demo.proof import add_up, summing_orders
from rpc_pipe.dependency import Spec
from rpc_pipe.model.partition import Partition
from rpc_pipe.pipeline import Pipeline
from rpc_pipe.workers.compute.randomness import Randomness, python_too
from rpc_pipe.workers.transport.payload import Tree, map_tensors, split_rows

WIDTH = 8
DEPTH = 8
ADAM = partial(torch.optim.AdamW, lr=1e-2)

Layer = Callable[[], nn.Module]


@dataclass(frozen=True)
class Model:
    """Layers that are unkind at every border between them, and what trains them."""

    layers: Sequence[Layer]
    loss_fn: Callable[[Any, Tensor], Any]
    inputs: Callable[[int], Tree]
    optimizer: Callable[[Any], torch.optim.Optimizer]


def rows(count: int) -> Tensor:
    return torch.randn(count, WIDTH)


def mse(output: Tree, target: Tensor) -> Tensor:
    return functional.mse_loss(first(output), target)


def first(tree: Tree) -> Tensor:
    while not isinstance(tree, Tensor):
        tree = next(iter(tree.values())) if isinstance(tree, dict) else tree[0]
    return tree


class Linear(nn.Module):
    """What most are made of: a matrix and a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)


class HandedOn(Linear):
    """A weight and what is made of one are used here and handed on, as a position bias or a tied weight is."""

    def forward(self, tree: Tree) -> Tree:
        x, weight, scale = tree if isinstance(tree, tuple) else (tree, self.linear.weight, self.linear.bias.exp())
        own = self.linear.bias.sigmoid()
        y = functional.linear(self.linear(x).tanh() * own * scale, weight + self.linear.weight)
        return y, weight, own + scale


class Twice(Linear):
    """One tensor is returned twice, and written by the next layer: both are."""

    def forward(self, tree: Tree) -> Tree:
        a, b, c = tree if isinstance(tree, tuple) else (tree, tree, tree)
        a = a.mul_(0.5)
        y = self.linear(a + b * c)
        return y, y, y


class InPlace(Linear):
    """Everything that can be is written in place, the input first."""

    def forward(self, x: Tensor) -> Tensor:
        x.sub_(x.detach().mean(0))
        x[:, :2].mul_(0.5)
        y = self.linear(functional.relu(x, inplace=True))
        y += 1
        return y.mul_(self.linear.bias)


class EMA(Linear):
    """Its output depends on a moving average, a counter in a buffer, one in an attribute, and a buffer it replaces."""

    mean: Tensor
    count: Tensor
    last: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("last", torch.zeros(WIDTH))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x - self.mean - self.last) * (1 + self.count % 3) / (1 + self.calls % 2)
        if self.training:
            self.mean.data.lerp_(x.detach().mean(0), 0.1)
            self.count += 1
            self.calls += 1
            self.last = x.detach()[0] / 2
        return y.tanh()


class JustMoved(Linear):
    """Scales by buffers that it has just written and backward needs; of one write autograd does not know."""

    seen: Tensor
    hidden: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.ones(WIDTH))
        self.register_buffer("hidden", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen.lerp_(x.detach().abs().mean(0), 0.5)
            self.hidden.data.lerp_(x.detach().abs().amax(0), 0.5)
        return self.linear(x * self.seen * self.hidden).tanh()


class Bounded(Linear):
    """Shrinks and bounds its weights before it uses them, which autograd does not see, and moves frozen ones."""

    def __init__(self) -> None:
        super().__init__()
        self.book = nn.Parameter(torch.ones(WIDTH), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.linear.weight.data.mul_(0.9).clamp_(-0.3, 0.3)
            self.book.data.lerp_(x.detach().abs().mean(0), 0.5)
        return (self.linear(x) * self.book).tanh()


class CountHandedOn(Linear):
    """A buffer that the next forward writes is handed on."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.tensor(0.0))

    def forward(self, tree: Tree) -> Tree:
        x, count = tree if isinstance(tree, tuple) else (tree, torch.zeros(()))
        self.count += 1
        return self.linear(x).tanh() + count / 4, self.count


class Checkpointed(Linear):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self._inner, x, use_reentrant=False)

    def _inner(self, x: Tensor) -> Tensor:
        return functional.dropout(self.linear(x).tanh(), 0.4, self.training)


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.cfloat) / 4)

    def forward(self, x: Tensor) -> Tensor:
        z = x.to(torch.cfloat) @ self.weight
        return (z / (1 + z.abs())).conj()


class SparseGradients(Linear):
    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(16, WIDTH, mode="sum", sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        ids = x.detach().argsort(1)[:, :3]
        return self.linear(x + self.bag(ids)).tanh()


class Hooks(Linear):
    """Hooks of gradients, of a parameter, after accumulation, and of the module."""

    accumulated: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear.weight.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
        self.register_buffer("accumulated", torch.tensor(0))
        self.linear.bias.register_post_accumulate_grad_hook(self._count)
        self.norm = nn.LayerNorm(WIDTH)
        self.norm.register_full_backward_hook(self._doubled)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if y.requires_grad:
            y.register_hook(lambda grad: grad * 3)
        return self.norm(y).tanh()

    @staticmethod
    def _doubled(module: nn.Module, grads: Any, outputs: Any) -> tuple[Tensor]:
        return (grads[0] * 2,)

    def _count(self, parameter: Tensor) -> None:
        self.accumulated.add_(1)


class Views(Linear):
    """Views, not contiguous, of one tensor and of a weight, are handed on; the tree holds what is no tensor too."""

    def forward(self, tree: Tree) -> Tree:
        x = tree if isinstance(tree, Tensor) else tree["parts"][0] + tree["parts"][1].T * tree["scale"] + tree["row"]
        count = torch.zeros(1, dtype=torch.int64) if isinstance(tree, Tensor) else tree["count"].add_(1)
        y = self.linear(x.tanh()) / (1 + int(count))
        return {"parts": [y, y.T], "scale": 0.5, "none": None, "count": count, "row": self.linear.weight[0]}


class Strided(Linear):
    """Tensors that repeat elements, or leave some out, are handed on: copied, they would be summed in another order."""

    def forward(self, tree: Tree) -> Tree:
        x = tree if isinstance(tree, Tensor) else tree[0] + sum(other.sum() for other in tree[1:])
        y = self.linear(x).tanh()
        return y, y[:, :1].expand(-1, 3), y[:, ::2], y.detach()[:1].expand(5, -1), y[1:].T


class StridedGradients(Linear):
    """The gradient of its input is every other element of something: laid out anew, it is summed in another order."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.view_as_real(torch.complex(x, self.linear(x)).tanh())[..., 0] + self.linear.bias


class Penalty(Linear):
    """Forward asks for a gradient itself."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x if x.requires_grad else x.detach().requires_grad_()
            y = self.linear(x).tanh()
            (grad,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return y + grad


Pair = namedtuple("Pair", "left right")


class Pairs(Linear):
    def forward(self, tree: Tree) -> Tree:
        left, right = tree if isinstance(tree, Pair) else (tree, None)
        y = self.linear(left).tanh()
        return Pair(y if right is None else y + right, y.square())


class Depth(Linear):
    """Stochastic depth, by Python's and numpy's random numbers."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training and random.random() < 0.3:
            return x
        return self.linear(x).tanh() * (0.5 + float(numpy.random.rand()))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRU(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.cell(x)[0]


def noisy(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    """A sum and a weight, of an output with noise."""
    return functional.mse_loss(output + torch.randn_like(output) / 4, target.sub_(1), reduction="sum"), len(target)


def normed(norm: Callable[[nn.Linear], nn.Module]) -> Layer:
    return lambda: nn.Sequential(norm(nn.Linear(WIDTH, WIDTH)), nn.Tanh())


def frozen() -> nn.Module:
    """A backbone in evaluation mode between layers that are trained."""
    layer = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), nn.BatchNorm1d(WIDTH))
    layer[2].running_mean.fill_(0.25)  # type: ignore[operator]
    return layer.requires_grad_(False).eval()


def trained() -> nn.Module:
    return nn.Sequential(nn.Identity(), nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2))


def batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh())


def repeated(layer: Layer, *others: Layer, **options: Any) -> Model:
    """Make a model of the same layers again and again."""
    return Model(([layer, *others] * DEPTH)[:DEPTH], **({"loss_fn": mse, "inputs": rows, "optimizer": ADAM, **options}))


MODELS = {
    "weights handed on": repeated(HandedOn),
    "one tensor twice": repeated(Twice),
    "in place": repeated(InPlace),
    "in place, modules": repeated(trained),
    "moving average": repeated(EMA),
    "average just moved": repeated(JustMoved),
    "counter handed on": repeated(CountHandedOn),
    "checkpoint with dropout": repeated(Checkpointed),
    "loss with noise": repeated(trained, loss_fn=noisy),
    "complex": repeated(Complex, loss_fn=lambda output, target: (output - target).abs().mean()),
    "sparse": repeated(SparseGradients, optimizer=partial(torch.optim.SGD, lr=0.1)),
    "hooks": repeated(Hooks),
    "views": repeated(Views),
    "strided": repeated(Strided),
    "gradients with strides": repeated(StridedGradients),
    "asks for gradients": repeated(Penalty),
    "named tuples": repeated(Pairs),
    "stochastic depth": repeated(Depth),
    "recurrent": repeated(Recurrent, inputs=lambda count: torch.randn(count, 3, WIDTH)),
    "spectral norm": repeated(normed(nn.utils.parametrizations.spectral_norm)),
    "spectral norm of old": repeated(normed(nn.utils.spectral_norm)),
    "weight norm": repeated(normed(nn.utils.parametrizations.weight_norm)),
    "batch norm": repeated(batch_norm),
    "frozen": repeated(frozen, trained),
}


def plainly(
    model: Model, spec: Spec, ranges: Sequence[range], batches: Sequence[tuple[Tree, Tensor]], seed: int
) -> tuple[list[float], list[dict[str, Tensor]]]:
    """Train in this process by plain accumulation; return the losses and, by route, the tensors of the model.

    Each route has its own replica, which sees its own microbatches, and all get the same gradients: summed stage by
    stage in the schedule's own order, those of each route by themselves and then together.
    """
    randomness = Randomness(seed)
    partition = Partition(list(model.layers), 1)
    replicas = [[layer for _, layer in partition.build(0, randomness, route)] for route in range(spec.num_routes)]
    trained = [[p for layer in layers for p in layer.parameters()] for layers in replicas]
    optimizers = [model.optimizer([p for p in parameters if p.requires_grad]) for parameters in trained]
    losses = []
    for step, (inputs, targets) in enumerate(batches):
        spec = replace(spec, num_microbatches=min(spec.num_microbatches, len(targets)))
        count = spec.num_microbatches
        parts, grads = [], []
        for m, (x, target) in enumerate(zip(split_rows(inputs, count), split_rows(targets, count), strict=True)):
            x, target = map_tensors(x, torch.clone), target.clone()
            for index, layer in enumerate(replicas[spec.route(m)]):
                python_too(partial(randomness.seed_forward, step, m))(index, 0)
                x = layer(x)
            loss = model.loss_fn(x, target)
            total, weight = loss if isinstance(loss, tuple) else (loss * (len(target) / len(targets)), None)
            total.backward()
            parts.append((total.item(), weight))
            grads.append([_taken_grad(parameter) for parameter in trained[spec.route(m)]])
        divisor = sum(weight for _, weight in parts) if isinstance(loss, tuple) else 1
        losses.append(sum(total for total, _ in parts) / divisor)
        for i, total in enumerate(_summed(spec, ranges, replicas[0], grads)):
            for parameters in trained:
                parameters[i].grad = None if total is None else total / divisor
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return losses, [nn.Sequential(*layers).state_dict() for layers in replicas]


def _taken_grad(parameter: Tensor) -> Tensor | None:
    grad, parameter.grad = parameter.grad, None
    return grad


def _summed(
    spec: Spec, ranges: Sequence[range], layers: Sequence[nn.Module], grads: Sequence[Sequence[Tensor | None]]
) -> list[Tensor | None]:
    """Return the gradient of each parameter, summed in the order of the stage that has it."""
    orders = summing_orders(spec)
    places = [index for index, layer in enumerate(layers) for _ in layer.parameters()]
    stages = [next(stage for stage, within in enumerate(ranges) if place in within) for place in places]
    return [add_up(add_up(grads[m][i] for m in order) for order in orders[stage]) for i, stage in enumerate(stages)]


def batches_for(name: str, num_microbatches: int, count: int = 2) -> list[tuple[Tree, Tensor]]:
    """Return batches whose microbatches are ragged, if there are several."""
    rows = 2 * num_microbatches + (num_microbatches > 1)
    inputs = [MODELS[name].inputs(rows) for _ in range(count)]
    return [(x, torch.randn(x.shape)) for x in inputs]


def differences(pipe: Pipeline, model: Model, batches: Sequence[tuple[Tree, Tensor]], seed: int) -> list[str]:
    """Train, and return what differs from one process in any bit."""
    before = copy.deepcopy(batches)
    losses = [pipe.step(batch) for batch in batches]
    expected_losses, expected = plainly(model, pipe.spec, pipe.partition.ranges, before, seed)
    pairs = zip(losses, expected_losses, strict=True)
    found = [f"loss of step {i}: {loss}, not {other}" for i, (loss, other) in enumerate(pairs) if loss != other]
    for actor in pipe.actors:
        for (_, route), shard in actor.shards.items():
            state = shard.state_dict().items()
            found += [f"{name} of route {route}" for name, t in state if not torch.equal(t, expected[route][name])]
    same = all(torch.equal(t, old) for pair in zip(batches, before, strict=True) for t, old in zip(*pair, strict=True))
    return found if same else [*found, "the user's batch"]
