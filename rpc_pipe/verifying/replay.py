"""What a stream trains, computed in one process: every microbatch by the versions of weights that are declared for it.

No worker, no stash and no timing: versions are copies in a dictionary, one microbatch follows the other. That has the
bits of the pipeline, at any timing, and costs a fraction of it; so convergence may be studied here.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim import Optimizer

from ..dependency import Spec, local_order, microbatches_of, takes_steps, update_of
from ..model.batches.microbatches import update_shares
from ..workers.compute.randomness import Randomness, python_too
from ..workers.compute.stash import Holding, places_of
from ..workers.transport.payload import split_rows

Batch = tuple[Tensor, Tensor]
Grads = list[Tensor | None]


class _Replica:
    """A stage on one route: its newest weights, and as many older versions as are still asked for."""

    def __init__(
        self, layers: Sequence[tuple[int, nn.Module]], optimizer: Callable[..., Optimizer], schedule: Any
    ) -> None:
        self.layers = list(layers)
        self.named = [(f"{i}.{name}", p) for i, module in layers for name, p in module.named_parameters()]
        trained = [(name, parameter) for name, parameter in self.named if parameter.requires_grad]
        self.optimizer = optimizer(trained) if trained else None
        self.lr_scheduler = schedule(self.optimizer) if schedule and self.optimizer else None
        modules = (part for _, module in self.layers for part in module.modules())
        self.places = places_of(modules, {parameter: n for n, (_, parameter) in enumerate(self.named)})
        self.num_updates = self.newest = 0
        self.versions: dict[int, list[Tensor]] = {}
        self.grads: dict[int, dict[int, Grads]] = {}  # update -> microbatch -> gradients

    def note(self) -> None:
        """Keep the newest version."""
        self.versions[self.newest] = [parameter.detach().clone() for _, parameter in self.named]


class Replay:
    """A model whose training by a schedule is replayed.

    Args:
        layers: the whole model's, built.
        stages: which layers each stage has.
        loss_fn: (output, target) -> mean.
        optimizer, lr_scheduler, max_grad_norm: as for `Pipeline`.
    """

    def __init__(
        self,
        spec: Spec,
        layers: Sequence[nn.Module],
        stages: Sequence[range],
        loss_fn: Callable[[Any, Any], Tensor],
        optimizer: Callable[..., Optimizer],
        randomness: Randomness,
        *,
        lr_scheduler: Any = None,
        max_grad_norm: float | None = None,
    ) -> None:
        self._spec, self._loss_fn, self._randomness, self._max_norm = spec, loss_fn, randomness, max_grad_norm
        self.replicas = [
            [_Replica([(i, copy.deepcopy(layers[i])) for i in stage], optimizer, lr_scheduler) for stage in stages]
            for _ in range(spec.num_routes)
        ]
        #: of each stage, what routes are pulled to
        self.reference = [{name: p.detach().clone() for name, p in stage.named} for stage in self.replicas[0]]
        self._num_steps = 0

    def train(self, batches: Iterable[Batch]) -> Iterator[float]:
        """Train on one batch after the other and yield the loss of each."""
        spec, step = None, 0
        for inputs, targets in batches:
            count = min(self._spec.num_microbatches, len(inputs))
            if spec is None or count != spec.num_microbatches:
                spec, step = replace(self._spec, num_microbatches=count), 0
                for stage in (stage for route in self.replicas for stage in route):
                    stage.newest, stage.versions = 0, {}
                    stage.note()
            pieces = list(zip(split_rows(inputs, count), split_rows(targets, count), strict=True))
            shares = [len(target) / len(targets) for _, target in pieces]
            scales = update_shares(spec, shares)
            losses = []
            for m, (x, target) in enumerate(pieces):
                loss = self._forward(spec, step * count + m, x, target)
                losses.append((loss.detach() * shares[m]).item())
                self._backward(spec, step * count + m, loss * scales[m])
            for route in range(min(count, spec.num_routes), spec.num_routes):  # without microbatches
                for number in range(spec.num_stages):
                    self._update(spec, number, route)
            step, self._num_steps = step + 1, self._num_steps + 1
            yield sum(losses)

    def state_dict(self, route: int = 0) -> dict[str, Tensor]:
        """Return the newest weights of a route under the unsplit model's names; of the first, the reference if any."""
        layers = [(i, module) for stage in self.replicas[route] for i, module in stage.layers]
        state = {f"{i}.{name}": t for i, module in layers for name, t in module.state_dict().items()}
        for stage, reference in zip(self.replicas[0], self.reference, strict=True):
            if self._spec.elasticity and route == 0:  # by today's names: a forward may exchange modules
                now = {p: f"{i}.{name}" for i, module in stage.layers for name, p in module.named_parameters()}
                state |= {now[parameter]: reference[name] for name, parameter in stage.named}
        return state

    @torch.no_grad()
    def evaluate(self, inputs: Tensor, targets: Tensor) -> float:
        """Return the loss by the newest weights, or the reference."""
        state = self.state_dict()
        for layer, module in (layer for stage in self.replicas[0] for layer in stage.layers):
            mode = module.training
            own = {name: state[f"{layer}.{name}"] for name in module.state_dict()}
            inputs = functional_call(module.eval(), own, (inputs,))
            module.train(mode)
        return float(self._loss_fn(inputs, targets))

    def _forward(self, spec: Spec, m: int, x: Tensor, target: Tensor) -> Tensor:
        self._used: list[list[Tensor]] = []
        for number, stage in enumerate(self.replicas[spec.route(m)]):
            version = spec.version(number, m)
            for old in [v for v in stage.versions if v < version]:
                del stage.versions[old]
            leaves = [
                t.detach().requires_grad_(p.requires_grad)
                for t, (_, p) in zip(stage.versions[version], stage.named, strict=True)
            ]
            self._used.append(leaves)
            with Holding(stage.places, leaves, [parameter for _, parameter in stage.named]):
                for layer, module in stage.layers:
                    python_too(partial(self._randomness.seed_forward, self._num_steps, m))(layer, 0)
                    x = module(x)
        return self._loss_fn(x, target)

    def _backward(self, spec: Spec, m: int, loss: Tensor) -> None:
        stages = self.replicas[spec.route(m)]
        with ExitStack() as stack:  # a checkpoint computes again
            for stage, used in zip(stages, self._used, strict=True):
                stack.enter_context(Holding(stage.places, used, [parameter for _, parameter in stage.named]))
            loss.backward()
        ready = []
        for number, stage in enumerate(stages):
            update = update_of(spec, number, m)
            kept = stage.grads.setdefault(update.index, {})
            kept[m] = [leaf.grad for leaf in self._used[number]]
            if len(kept) == len(microbatches_of(spec, update)):
                ready.append(number)
        # What is clipped together is of one update of all stages, and complete with the same microbatch.
        for number in ready:
            self._give(spec, number, m)
        if self._max_norm is not None:
            stages = [self.replicas[spec.route(m)][number] for number in ready]
            for some in [stages] if takes_steps(spec) else [[stage] for stage in stages]:
                if some:
                    nn.utils.clip_grad_norm_([p for stage in some for _, p in stage.named], self._max_norm)
        for number in ready:
            self._update(spec, number, spec.route(m))

    def _give(self, spec: Spec, number: int, m: int) -> None:
        """Give a stage's parameters the sum of gradients, in the order in which the schedule adds them up."""
        stage = self.replicas[spec.route(m)][number]
        kept = stage.grads.pop(update_of(spec, number, m).index)
        begin = m // spec.num_microbatches * spec.num_microbatches
        order = [begin + i for i in summing_order(spec, number) if begin + i in kept]
        for n, (_, parameter) in enumerate(stage.named):
            total = None
            for gradient in (kept[i][n] for i in order):
                if gradient is not None:
                    total = gradient if total is None else total + gradient
            parameter.grad = total

    def _update(self, spec: Spec, number: int, route: int) -> None:
        stage = self.replicas[route][number]
        if stage.optimizer is not None:
            with self._randomness.lock:
                self._randomness.seed_update(stage.num_updates, stage.layers[0][0])
                stage.optimizer.step()
            stage.num_updates += 1
            if stage.lr_scheduler is not None:
                stage.lr_scheduler.step()
            stage.optimizer.zero_grad()
        with torch.no_grad():
            for name, parameter in stage.named if spec.elasticity else ():
                pull = (parameter - self.reference[number][name]) * spec.elasticity
                parameter.sub_(pull)
                self.reference[number][name] += pull
        stage.newest += 1
        stage.note()


_orders: dict[tuple[Spec, int], list[int]] = {}


def summing_order(spec: Spec, stage: int) -> list[int]:
    """Return a step's microbatches in the order in which a stage adds up their gradients."""
    if (spec, stage) not in _orders:
        workers = {spec.place(stage, route) for route in range(spec.num_routes)}
        found = [a for w in sorted(workers) for a in local_order(spec, w) if a.stage == stage and a.kind.accumulates]
        _orders[spec, stage] = [action.index for action in found]
    return _orders[spec, stage]
