"""Train piped and unpiped from one seed and compare every bit: the proof that a schedule changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import AdamW

from ..demo.gpt import gpt_layers, next_byte_loss
from ..demo.settings import GPTConfig
from ..dependency import Spec, local_order
from ..model.partition import LayerPartition
from ..pipeline import Pipeline
from ..workers.actor import WorkerActor
from ..workers.compute.randomness import Randomness
from ..workers.transport.payload import split_rows
from .options import VerifyOptions
from .replay import Replay
from .verdict import Compared, tell

Layers = Sequence[Callable[[], nn.Module]]
Batch = tuple[Tensor, Tensor]

_optimizer = partial(AdamW, lr=1e-2, weight_decay=0.1)


@dataclass(frozen=True)
class Problem:
    """A small model with dropout, and data for it."""

    layers: Layers
    loss_fn: Callable[[Tensor, Tensor], Tensor]
    batch: Callable[[torch.Generator, int], Batch]


def problem(name: str, dropout: float, num_stages: int) -> Problem:
    """Return the problem `gpt`, `conv` or `mlp`, with enough layers for `num_stages`."""
    if name == "gpt":
        config = GPTConfig(width=32, depth=max(4, num_stages - 2), heads=2, context=16, dropout=dropout)
        return Problem(gpt_layers(config), next_byte_loss, _bytes)
    if name == "conv":
        return Problem(_conv_layers(max(4, num_stages - 1), dropout), functional.cross_entropy, _images)
    return Problem(_mlp_layers(max(4, num_stages), dropout), functional.mse_loss, _vectors)


def _bytes(generator: torch.Generator, rows: int) -> Batch:
    samples = torch.randint(256, (rows, 17), generator=generator)
    return samples[:, :-1].contiguous(), samples[:, 1:].contiguous()


def _images(generator: torch.Generator, rows: int) -> Batch:
    return torch.randn(rows, 3, 8, 8, generator=generator), torch.randint(10, (rows,), generator=generator)


def _vectors(generator: torch.Generator, rows: int) -> Batch:
    return torch.randn(rows, 16, generator=generator), torch.randn(rows, 16, generator=generator)


def _conv_layers(blocks: int, dropout: float) -> Layers:
    def block(channels_in: int, stride: int) -> nn.Module:
        conv = nn.Conv2d(channels_in, 8, 3, stride=stride, padding=1)
        return nn.Sequential(conv, nn.GroupNorm(2, 8), nn.ReLU(), nn.Dropout2d(dropout))

    def head() -> nn.Module:
        return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10))

    return [partial(block, 3, 2), *(partial(block, 8, 1) for _ in range(blocks - 1)), head]


def _mlp_layers(count: int, dropout: float) -> Layers:
    def layer() -> nn.Module:
        return nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Dropout(dropout))

    return [layer] * (count - 1) + [partial(nn.Linear, 16, 16)]


def unpiped(
    problem: Problem, spec: Spec, stages: Sequence[range], batches: Sequence[Batch], randomness: Randomness
) -> tuple[list[float], dict[str, Tensor]]:
    """Train in this process by plain gradient accumulation; return the losses and the final weights.

    Gradients of microbatches are summed stage by stage in the schedule's own order (descending for GPipe as
    published), those of each route by themselves and then together.
    """
    model = [module for _, module in LayerPartition(list(problem.layers), 1).build(0, randomness)]
    optimizer = _optimizer([p for module in model for p in module.parameters()])
    losses = []
    for step, (inputs, targets) in enumerate(batches):
        count = min(spec.num_microbatches, len(inputs))
        pieces = list(zip(split_rows(inputs, count), split_rows(targets, count), strict=True))
        loss_of: list[float] = []
        grads: list[dict[nn.Parameter, Tensor]] = []  # by microbatch
        for m, (x, target) in enumerate(pieces):
            for layer, module in enumerate(model):
                with randomness.lock:
                    randomness.seed_forward(step, m, layer)
                    x = module(x)
            loss = problem.loss_fn(x, target) * (len(target) / len(targets))
            loss.backward()
            loss_of.append(loss.item())
            grads.append({p: p.grad for module in model for p in module.parameters() if p.grad is not None})
            optimizer.zero_grad()
        for stage, orders in enumerate(summing_orders(replace(spec, num_microbatches=count))):
            for layer in stages[stage]:
                for parameter in model[layer].parameters():
                    parts = [add_up(grads[m].get(parameter) for m in order) for order in orders]
                    parameter.grad = add_up(parts)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(sum(loss_of))
    named = nn.Sequential(*model).state_dict()
    return losses, named


def replayed(
    problem: Problem, spec: Spec, stages: Sequence[range], batches: Sequence[Batch], randomness: Randomness
) -> tuple[list[float], dict[str, Tensor]]:
    """Train in this process by the declared versions; return the losses and the final weights of all routes."""
    layers = [module for _, module in LayerPartition(list(problem.layers), 1).build(0, randomness)]
    replay = Replay(spec, layers, stages, problem.loss_fn, _named_optimizer, randomness)
    losses = list(replay.train(batches))
    expected = replay.state_dict()
    for route in range(1, spec.num_routes):
        expected |= {f"{name} on route {route}": tensor for name, tensor in replay.state_dict(route).items()}
    return losses, expected


def _named_optimizer(named: Sequence[tuple[str, nn.Parameter]]) -> AdamW:
    return _optimizer([parameter for _, parameter in named])


def add_up(parts: Iterable[Tensor | None]) -> Tensor | None:
    """Add up in the order given."""
    total = None
    for part in parts:
        if part is not None:
            total = part if total is None else total + part
    return total


def summing_orders(spec: Spec) -> list[list[list[int]]]:
    """Return, by stage and route, the microbatches in the order in which the schedule adds up their gradients."""
    orders: list[list[list[int]]] = [[[] for _ in range(spec.num_routes)] for _ in range(spec.num_stages)]
    for worker in range(spec.num_workers):
        for action in local_order(spec, worker):
            if action.kind.accumulates:
                orders[action.stage][spec.route(action.microbatch)].append(action.microbatch)
    return orders


def prove(options: VerifyOptions) -> None:
    """Runs in every worker (or once, over the in-process transport): train, compare, tell the verdict."""
    torch.set_num_threads(options.threads)
    generator = torch.Generator().manual_seed(options.seed)
    # The number of stages is needed for the size of the model, before there is a pipeline.
    spec = options.spec(num_layers=10**9) if options.split is None else options.spec(sum(options.split))
    task = problem(options.model, options.dropout, spec.num_stages)
    batches = [task.batch(generator, options.batch_rows) for _ in range(options.steps)]
    pipe = Pipeline(list(task.layers), task.loss_fn, optimizer=_optimizer, **options.for_pipeline())
    overlaps = not pipe.spec.synchronous
    losses = list(pipe.train(batches)) if overlaps else [pipe.step(batch) for batch in batches]
    state, copies = pipe.state_dict(), pipe.gather("replicas", replicas)
    if state is not None and copies is not None:
        compute = replayed if overlaps else unpiped
        device = pipe.actors[0].backend.device
        there = [(inputs.to(device), targets.to(device)) for inputs, targets in batches]
        randomness = Randomness(options.seed, device)
        expected_losses, expected = compute(task, pipe.spec, pipe.partition.ranges, there, randomness)
        expected = {name: tensor.cpu() for name, tensor in expected.items()}
        for route, tensors in (pair for worker in copies for pair in worker):
            state |= {f"{name} on route {route}": tensor for name, tensor in tensors.items()}
            if not overlaps:
                expected |= {f"{name} on route {route}": expected[name] for name in tensors}
        compared = Compared()
        compared.losses(losses, expected_losses)
        compared.tensors(state, expected)
        tell(compared, options, options.batch_rows, losses, exactly=True)
    pipe.barrier()


def replicas(actor: WorkerActor) -> list[tuple[int, dict[str, Tensor]]]:
    """Return what the state of the model leaves out: the shards of the other routes, which must be equal."""
    return [(route, shard.state_dict()) for (_, route), shard in actor.shards.items() if route > 0]
