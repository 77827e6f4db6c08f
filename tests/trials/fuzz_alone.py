"""One process that does what a pipeline does, for `fuzz.py` to compare with."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from bench.replaying import replay_of
from rpc_pipe.dependency import Spec
from rpc_pipe.model.batches.microbatches import Microbatches
from rpc_pipe.model.batches.outputs import join_rows
from rpc_pipe.model.partition import LayerPartition
from rpc_pipe.verifying.keyed import Keyed
from rpc_pipe.verifying.reference import add_up, summing_orders
from rpc_pipe.workers.compute.modules.module_state import KeptTensor
from rpc_pipe.workers.compute.modules.randomness import Randomness, preserved, python_too
from rpc_pipe.workers.compute.stage_state import shown
from rpc_pipe.workers.transport.payload import Tree, map_tensors
from trials.fuzz_cases import Case


class Alone:
    """Trains in this process by plain accumulation; each route has a replica of its own, as in the schedule.

    Args:
        spec: by whose order gradients are added up.
        partition: what has been cut; None: nothing has, and it is only tried whether the model can be trained.
        initial: weights of a model that a function makes.
    """

    def __init__(self, case: Case, spec: Spec, partition: Any, initial: Mapping[str, Tensor] | None) -> None:
        self.case, self._spec, self._partition = case, spec, partition
        self._randomness = Randomness(case.number)
        self.replicas = [self._made(route, initial) for route in range(spec.num_routes)]
        self._trained = [[p for layer in layers for p in layer.parameters()] for layers in self.replicas]
        self._trained = [list(dict.fromkeys(parameters)) for parameters in self._trained]
        self.optimizers = [case.optimizer([p for p in some if p.requires_grad]) for some in self._trained]
        schedule = case.lr_scheduler
        self._schedulers = [schedule(optimizer) for optimizer in self.optimizers] if schedule else []
        self._stages = [self._stage(number) for number in range(len(self._trained[0]))]
        self._pending: list[list[list[list[Tensor | None]]]] = []
        self._weight = 0.0
        self._num_steps = 0

    def _made(self, route: int, initial: Mapping[str, Tensor] | None) -> list[nn.Module]:
        model = self.case.model()
        if self.case.unsplit:
            whole = model if isinstance(model, nn.Module) else model()
            if initial is not None and not self.case.as_modules:
                whole.load_state_dict(initial, strict=False)
            return [whole]
        # Further replicas are copies, in which an attribute of a layer has no memory in common with its parameter.
        return [layer for _, layer in LayerPartition(model, 1).build(0, self._randomness, route)]

    def _stage(self, number: int) -> int:
        """Return the stage by whose order the gradients of a parameter are added up."""
        if self._partition is None:
            return 0
        parameter = self._trained[0][number]
        if self.case.unsplit:
            name = next(name for name, p in self.replicas[0][0].named_parameters() if p is parameter)
            return int(self._partition.first_stage_of(name))
        place = next(i for i, layer in enumerate(self.replicas[0]) if any(p is parameter for p in layer.parameters()))
        return next(stage for stage, within in enumerate(self._partition.ranges) if place in within)

    def step(self, asked: dict[str, Any]) -> float:
        """Train on a batch; return the loss."""
        pieces, spec = self._cut(asked)
        parts, grads, summed = [], [], False
        updates = (self._num_steps + 1) % self.case.accumulate == 0
        with preserved(torch.device("cpu")):
            for m in range(len(pieces.inputs)):
                loss = self._loss(spec, m, pieces)
                summed = isinstance(loss, tuple)
                total, weight = loss if isinstance(loss, tuple) else (loss, None)
                total = total.reshape(())
                root = total if summed else total * pieces.shares[m]
                (root if summed or self.case.accumulate == 1 else root / self.case.accumulate).backward()
                parts.append((root.detach().double().item(), 0.0 if weight is None else float(weight)))
                grads.append([_taken_grad(parameter) for parameter in self._trained[spec.route(m)]])
        divisor = sum(weight for _, weight in parts) if summed else 1
        orders = summing_orders(spec)
        self._pending.append(
            [[[grads[m][i] for m in order] for order in orders[stage]] for i, stage in enumerate(self._stages)]
        )
        self._weight += divisor
        if updates:
            self._update(self._weight if summed else 1)
        self._num_steps += 1
        return float(sum(total for total, _ in parts) / divisor)

    def _update(self, divisor: float) -> None:
        for i in range(len(self._stages)):
            routes = zip(*(step[i] for step in self._pending), strict=True)
            total = add_up(add_up(grad for grads in steps for grad in grads) for steps in routes)
            for parameters in self._trained:
                parameters[i].grad = None if total is None else total / divisor if divisor != 1 else total.clone()
        self._pending, self._weight = [], 0.0
        for parameters, optimizer in zip(self._trained, self.optimizers, strict=True):
            if self.case.max_grad_norm is not None:
                nn.utils.clip_grad_norm_(parameters, self.case.max_grad_norm)
            optimizer.step()
            optimizer.zero_grad()
        for scheduler in self._schedulers:
            scheduler.step()

    def evaluate(self, asked: dict[str, Any]) -> float:
        """Return the loss of a batch."""
        pieces, spec = self._cut(asked)
        parts = []
        with self._evaluating(), preserved(torch.device("cpu")):
            for m in range(len(pieces.inputs)):
                loss = self._loss(spec, m, pieces)
                total, weight = loss if isinstance(loss, tuple) else (loss * pieces.shares[m], 0.0)
                parts.append((total.double().item(), float(weight)))
        divisor = sum(weight for _, weight in parts) if isinstance(loss, tuple) else 1
        return float(sum(total for total, _ in parts) / divisor)

    def predict(self, inputs: Tensor) -> Tree:
        """Return the outputs, joined."""
        pieces, spec = self._cut({"batch": (inputs, inputs)})
        with self._evaluating(), preserved(torch.device("cpu")):
            with self.case.settings():
                # As they are returned: a weight among them may be written by the next forward.
                outputs = [map_tensors(self._output(spec, m, pieces), torch.clone) for m in range(len(pieces.inputs))]
            return join_rows(outputs)

    def _evaluating(self) -> AbstractContextManager[None]:
        return evaluating([module for layers in self.replicas for layer in layers for module in layer.modules()])

    def _cut(self, asked: dict[str, Any]) -> tuple[Microbatches, Spec]:
        count = self._spec.num_microbatches
        pieces = Microbatches.of(asked.get("batch"), asked.get("microbatches"), count, 1, LayerPartition.pair)
        return pieces, replace(self._spec, num_microbatches=len(pieces.inputs))

    def _loss(self, spec: Spec, m: int, pieces: Microbatches) -> Any:
        with self.case.settings():  # as torch wants autocast to be used: not around backward
            return self.case.loss_fn(self._output(spec, m, pieces), pieces.targets[m].clone())

    def _output(self, spec: Spec, m: int, pieces: Microbatches) -> Tree:
        layers, x = self.replicas[spec.route(m)], map_tensors(pieces.inputs[m], torch.clone)
        if self.case.unsplit:
            if self._partition is None:
                return layers[0](x)
            seed = partial(self._randomness.seed_forward, self._num_steps, m)
            with Keyed(layers[0], self._partition.block_names, seed):
                return layers[0](x)
        for index, layer in enumerate(layers):
            python_too(partial(self._randomness.seed_forward, self._num_steps, m))(index, 0)
            x = layer(x)
        return x


class Replayed:
    """Trains in this process by the versions of weights that a schedule whose steps overlap declares.

    Args:
        ranges: the layers of each stage.
    """

    def __init__(self, case: Case, spec: Spec, ranges: Sequence[range]) -> None:
        randomness = self._randomness = Randomness(case.number)
        layers = [layer for _, layer in LayerPartition(case.model(), 1).build(0, randomness, 0)]
        self._case = case
        self._replay = replay_of(
            spec, layers, ranges, case.loss_fn, case.optimizer, randomness,
            lr_scheduler=case.lr_scheduler, max_grad_norm=case.max_grad_norm,
        )  # fmt: skip
        self._batches: deque[tuple[Tensor, Tensor]] = deque()
        self._losses = self._replay.train(iter(self._batches.popleft, None))

    @property
    def replicas(self) -> list[list[nn.Module]]:
        """The layers of each route."""
        return [[*replica.module.children()] for replica in self._replay.replicas]

    @property
    def optimizers(self) -> list[Any]:
        """What each route's optimizers keep."""
        kept = [[s.optimizer for s in replica.stages if s.optimizer is not None] for replica in self._replay.replicas]
        return [SimpleNamespace(state={p: s for each in some for p, s in each.state.items()}) for some in kept]

    def step(self, asked: dict[str, Any]) -> float:
        """Train on a batch; return the loss."""
        inputs, targets = asked["batch"]
        batch = inputs.clone(), targets.clone()
        if not self._case.streams:
            return next(self._replay.train([batch]))
        self._batches.append(batch)
        return next(self._losses)

    def evaluate(self, asked: dict[str, Any]) -> float:
        """Return the loss of a batch by the newest weights, or the reference."""
        replay = self._replay
        pieces = Microbatches.of(asked["batch"], None, self._case.microbatches, 1, LayerPartition.pair)
        stages = replay.replicas[0].stages
        modules = [module for layers in self.replicas for layer in layers for module in layer.modules()]
        parts = []
        with evaluating(modules), preserved(torch.device("cpu")), ExitStack() as stack:
            for stage, reference in zip(stages, replay.pulled_to[0], strict=True):
                if self._case.spec().averaging_pull:
                    values = [KeptTensor(p, reference[name], p._version, None) for name, p in stage.named]
                    stack.enter_context(shown(values))
            for m, x in enumerate(pieces.inputs):
                x = map_tensors(x, torch.clone)
                for layer, module in enumerate(replay.replicas[0].module.children()):
                    seed = partial(self._randomness.seed_forward, replay.num_steps, m)
                    python_too(seed)(layer, 0)
                    x = module(x)
                loss = self._case.loss_fn(x, pieces.targets[m].clone())
                assert isinstance(loss, torch.Tensor)  # asynchronous cases have no sums
                parts.append((loss.reshape(()) * pieces.shares[m]).double().item())
        return float(sum(parts))


@contextmanager
def evaluating(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Return a context in which modules are in evaluation mode, and nothing has a gradient."""
    modes = [module.training for module in modules]
    for module in modules:
        module.training = False
    with torch.no_grad():
        yield
    for module, mode in zip(modules, modes, strict=True):
        module.training = mode


def _taken_grad(parameter: Tensor) -> Tensor | None:
    grad, parameter.grad = parameter.grad, None
    return grad


def state_of(layers: Sequence[tuple[int, nn.Module]], optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    """Return all that layers hold: weights, buffers, attributes, modes, and what the optimizer keeps."""
    found: dict[str, Any] = {}
    for index, layer in layers:
        for prefix, module in layer.named_modules(prefix=str(index)):
            held = {**vars(module), **module._parameters, **module._buffers}
            for name, value in held.items():
                if isinstance(value, (bool, int, float)):
                    found[f"{prefix}.{name}"] = value
                elif isinstance(value, Tensor):
                    found[f"{prefix}.{name}"] = copied(value)
        for name, parameter in layer.named_parameters():
            if parameter.grad is not None:
                found[f"{index}.{name} gradient"] = copied(parameter.grad)
            kept = {} if optimizer is None else optimizer.state.get(parameter, {})
            found |= {f"{index}.{name} {k}": copied(t) for k, t in kept.items() if isinstance(t, Tensor)}
    return found


def copied(tensor: Tensor) -> Tensor:
    """Return a tensor's value as it is now."""
    return copy.deepcopy(tensor.detach()).resolve_conj()
