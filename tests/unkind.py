"""Models that are legal in one process and hard on a pipeline, and the one process to compare with."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import unkind_layers
from torch import Tensor, nn
from torch.nn import functional
from training_options import pipeline_with
from unkind_layers import WIDTH, Layer, trained

from rpc_pipe.dependency import Spec
from rpc_pipe.model.partition import LayerPartition
from rpc_pipe.pipeline import Pipeline
from rpc_pipe.verifying.reference import add_up, summing_orders
from rpc_pipe.workers.compute.modules.randomness import Randomness, python_too
from rpc_pipe.workers.transport.payload import Tree, map_tensors, split_rows

DEPTH = 8
ADAM = partial(torch.optim.AdamW, lr=1e-2)


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


def noisy(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    """A sum and a weight, of an output with noise."""
    return functional.mse_loss(output + torch.randn_like(output) / 4, target.sub_(1), reduction="sum"), len(target)


def repeated(layer: Layer, *others: Layer, **options: Any) -> Model:
    """Make a model of the same layers again and again."""
    return Model(([layer, *others] * DEPTH)[:DEPTH], **({"loss_fn": mse, "inputs": rows, "optimizer": ADAM, **options}))


MODELS = {
    "weights handed on": repeated(unkind_layers.HandedOn),
    "one tensor twice": repeated(unkind_layers.Twice),
    "in place": repeated(unkind_layers.InPlace),
    "in place, modules": repeated(trained),
    "moving average": repeated(unkind_layers.EMA),
    "average just moved": repeated(unkind_layers.JustMoved),
    "counter handed on": repeated(unkind_layers.CountHandedOn),
    "checkpoint with dropout": repeated(unkind_layers.Checkpointed),
    "loss with noise": repeated(trained, loss_fn=noisy),
    "complex": repeated(unkind_layers.Complex, loss_fn=lambda output, target: (output - target).abs().mean()),
    "sparse": repeated(unkind_layers.SparseGradients, optimizer=partial(torch.optim.SGD, lr=0.1)),
    "sparse, handed on": repeated(unkind_layers.SparseHandedOn),
    "hooks": repeated(unkind_layers.Hooks),
    "views": repeated(unkind_layers.Views),
    "strided": repeated(unkind_layers.Strided),
    "gradients with strides": repeated(unkind_layers.StridedGradients),
    "asks for gradients": repeated(unkind_layers.Penalty),
    "named tuples": repeated(unkind_layers.Pairs),
    "stochastic depth": repeated(unkind_layers.Depth),
    "recurrent": repeated(unkind_layers.Recurrent, inputs=lambda count: torch.randn(count, 3, WIDTH)),
    "spectral norm": repeated(unkind_layers.normed(nn.utils.parametrizations.spectral_norm)),
    "spectral norm of old": repeated(unkind_layers.normed(nn.utils.spectral_norm)),
    "weight norm": repeated(unkind_layers.normed(nn.utils.parametrizations.weight_norm)),
    "batch norm": repeated(unkind_layers.batch_norm),
    "frozen": repeated(unkind_layers.frozen, trained),
    "set anew, read by a hook": repeated(unkind_layers.SetAnew),
}


def plainly(
    model: Model, spec: Spec, ranges: Sequence[range], batches: Sequence[tuple[Tree, Tensor]], seed: int
) -> tuple[list[float], list[dict[str, Tensor]]]:
    """Train in this process by plain accumulation; return the losses and, by route, the tensors of the model.

    Each route has its own replica, which sees its own microbatches, and all get the same gradients: summed stage by
    stage in the schedule's own order, those of each route by themselves and then together.
    """
    randomness = Randomness(seed)
    partition = LayerPartition(list(model.layers), 1)
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


def pipeline(model: Model, schedule: str, **options: Any) -> Pipeline:
    """Return a pipeline of the model."""
    return pipeline_with(list(model.layers), model.loss_fn, optimizer=model.optimizer, schedule=schedule, **options)


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
