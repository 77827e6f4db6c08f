"""What `bench/fuzz.py` draws: a model, how it is trained, by which schedule; and one process that does the same."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from random_specs import RandomProgram, RandomSlots, RandomSpec
from torch import Tensor, nn

from bench.fuzz_models import LOSSES, MANNERS, Made, Unsplit
from bench.fuzz_operations import OPERATIONS, WIDTH
from rpc_pipe.demo.own_proof import Keyed
from rpc_pipe.demo.proof import add_up, summing_orders
from rpc_pipe.dependency import Order, Spec
from rpc_pipe.model.microbatches import Microbatches, join_rows
from rpc_pipe.model.partition import Partition
from rpc_pipe.pipeline import Pipeline
from rpc_pipe.planning.specs import make_spec, parameter_types
from rpc_pipe.schedules import SCHEDULES
from rpc_pipe.workers.compute.randomness import Randomness, preserved
from rpc_pipe.workers.transport.payload import Tree, map_tensors

_SYNCHRONOUS = [name for name, cls in SCHEDULES.items() if cls.synchronous]
_OPTIONS: dict[str, list[Any]] = {
    "b_order": ["descending", "ascending"], "keep": [0, 1, 2], "window": [1, 2, 3, 5], "chunks": [1, 2, 3],
    "waves": [1, 2], "pairs": [1, 2], "scale": ["direct-concat", "forward-doubling", "backward-halving"],
}  # fmt: skip
_SPARSE = {"sparse bag", "sparse"}
#: so much that they take more than their share of the time, or end most gradients
_RARE = {"detached", "orthogonal", "svd", "recurrent", "attention"}
_OPTIMIZERS: list[tuple[Callable[..., torch.optim.Optimizer], dict[str, Any]]] = [
    (torch.optim.SGD, {"lr": 0.05}),
    (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True}),
    (torch.optim.AdamW, {"lr": 1e-2}),
    (torch.optim.AdamW, {"lr": 1e-2, "foreach": False, "amsgrad": True}),
    (torch.optim.RMSprop, {"lr": 1e-3, "centered": True}),
    (torch.optim.Adagrad, {"lr": 1e-2}),
    (torch.optim.NAdam, {"lr": 1e-3}),
    (torch.optim.Adafactor, {"lr": 1e-3}),
]


class Case:
    """A pipeline and what is done with it, all drawn from a number.

    Args:
        workers: how many, where a job has decided that.
    """

    def __init__(self, number: int, workers: int | None = None) -> None:
        draw = self._draw = random.Random(number)
        self.number = number
        self.workers = workers or draw.choice([1, 2, 2, 2, 3, 3, 4, 5])
        self.microbatches = draw.choice([1, 2, 3, 4, 5, 6, 8])
        self.schedule: Any = draw.choice(_SYNCHRONOUS)
        self.options: dict[str, Any] = {}
        if draw.random() < 0.12:
            self.schedule = draw.choice([RandomSpec, RandomSlots, RandomProgram])
            self.options = {"seed": draw.randrange(10**6)}
        else:
            self._draw_options(draw)
        self.order: Order | None = draw.choice(["ready", "fixed", None])
        self.unsplit = draw.random() < 0.06
        self.as_modules = draw.random() < 0.4
        self.accumulate = draw.choice([1, 1, 1, 2, 3])
        self.max_grad_norm = draw.choice([None, None, 0.05, 10.0])
        self.ema_decay = draw.choice([None, None, None, 0.5])
        self.autocast = draw.random() < 0.1
        self.streams = draw.random() < 0.25
        self.steps = draw.choice([1, 2, 3]) * (1 if self.accumulate == 1 else 2)
        # Casts of weights that are cached without gradients are used with them after: torch loses gradients then.
        calls = ["", "state"] if self.autocast else ["", "", "evaluate", "predict", "state"]
        self.between = [draw.choice(calls) for _ in range(self.steps)]
        self.loss_fn = draw.choice(LOSSES)
        self._draw_model(draw)
        self.given = draw.random() < 0.2  # microbatches, not a batch

    def _draw_options(self, draw: random.Random) -> None:
        known = parameter_types(SCHEDULES[self.schedule])
        for name, values in _OPTIONS.items():
            if name in known and draw.random() < 0.5:
                self.options[name] = draw.choice(values)
        if "recompute" not in known and not SCHEDULES[self.schedule].recompute and draw.random() < 0.3:
            self.options["recompute"] = draw.choice(["all", "0", "0+1"] if self.workers > 1 else ["all", "0"])

    def _draw_model(self, draw: random.Random) -> None:
        usual = [name for name in OPERATIONS if name not in _RARE]
        few = draw.sample(usual, draw.choice([2, 4, 8])) + draw.sample(sorted(_RARE), draw.choice([0, 0, 1]))
        manners = draw.sample(list(MANNERS), 3)
        stages = self.spec().num_stages
        self.makers = [
            Made(draw.randrange(10**9), draw.choice([1, 1, 2, 3]), few, manners)
            for _ in range(stages + draw.choice([0, 0, 1, 3]))
        ]
        self.tied, self.skips, self.draws = draw.random() < 0.3, draw.random() < 0.6, draw.random() < 0.5
        is_sparse = not _SPARSE.isdisjoint(name for maker in self.makers for name in maker.names)
        kinds = [0, 5] if is_sparse else [0, 1] if self.tied and self.unsplit else list(range(len(_OPTIMIZERS)))
        cls, settings = _OPTIMIZERS[draw.choice(kinds)]
        self.optimizer = partial(cls, **settings)
        halved = partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5)
        self.lr_scheduler = draw.choice([None, None, halved])
        layers = len(self.makers)
        self.split = None
        if draw.random() < 0.5 and not self.unsplit:
            cuts = sorted(draw.sample(range(1, layers), stages - 1))
            self.split = [end - begin for begin, end in zip([0, *cuts], [*cuts, layers], strict=True)]

    def spec(self) -> Spec:
        """Return the schedule, unchecked.

        Raises:
            ConfigError: its parameters do not go together.
        """
        return make_spec(self.schedule, self.workers, self.microbatches, self.options)

    def __str__(self) -> str:
        schedule = self.schedule if isinstance(self.schedule, str) else self.schedule.__name__
        names = " | ".join(" ".join(maker.names) for maker in self.makers) if hasattr(self, "makers") else ""
        said = {
            name: value
            for name, value in vars(self).items()
            if name not in ("makers", "number", "schedule") and not name.startswith("_") and value not in (None, False)
        }
        return f"{schedule} {said} [{names}]".replace("<function ", "").replace("functools.", "")

    def model(self) -> Any:
        """Make the model, the same each time."""
        torch.manual_seed(self.number)
        if self.unsplit:
            whole = partial(Unsplit, self.makers, self.tied, self.skips, self.draws)
            return whole() if self.as_modules else whole
        return [maker() for maker in self.makers] if self.as_modules else list(self.makers)

    def batches(self) -> list[tuple[Tensor, Tensor]]:
        """Make the batches, one of each step: microbatches are ragged, and sometimes fewer."""
        draw = random.Random(self.number + 1)
        rows = [2 * self.microbatches + draw.choice([0, 1, self.microbatches - 1]) for _ in range(self.steps)]
        if draw.random() < 0.1:
            rows[-1] = max(2, self.microbatches // 2)
        generator = torch.Generator().manual_seed(self.number)
        return [(torch.randn(n, WIDTH, generator=generator), torch.randn(n, WIDTH, generator=generator)) for n in rows]

    def asked(self, batch: tuple[Tensor, Tensor]) -> dict[str, Any]:
        """Return what a step is called with: a batch, or microbatches of rows that differ more."""
        if not self.given or len(batch[0]) < 2 * self.microbatches:
            return {"batch": batch}
        rows = [2] * (self.microbatches - 1)
        rows.append(len(batch[0]) - sum(rows))
        return {"microbatches": list(zip(batch[0].split(rows), batch[1].split(rows), strict=True))}

    def settings(self) -> Any:
        """Return the context in which everything is called."""
        return torch.autocast("cpu", torch.bfloat16) if self.autocast else nullcontext()

    def pipeline(self, stall_s: float) -> Pipeline:
        """Make the pipeline."""
        return Pipeline(
            self.model(), self.loss_fn, optimizer=self.optimizer, lr_scheduler=self.lr_scheduler,
            schedule=self.schedule, schedule_options=self.options, num_workers=self.workers,
            num_microbatches=self.microbatches, split=self.split, order=self.order, seed=self.number,
            max_grad_norm=self.max_grad_norm, accumulate=self.accumulate, ema_decay=self.ema_decay, stall_s=stall_s,
            example=self.batches()[0] if self.unsplit else None, blocks="blocks" if self.unsplit else None,
        )  # fmt: skip


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
        return [layer for _, layer in Partition(model, 1).build(0, self._randomness, 0)]

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
                loss = self.case.loss_fn(self._output(spec, m, pieces), pieces.targets[m].clone())
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
        return sum(total for total, _ in parts) / divisor

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
        torch.clear_autocast_cache()

    def evaluate(self, asked: dict[str, Any]) -> float:
        """Return the loss of a batch."""
        pieces, spec = self._cut(asked)
        parts = []
        with self._evaluating(), preserved(torch.device("cpu")):
            for m in range(len(pieces.inputs)):
                loss = self.case.loss_fn(self._output(spec, m, pieces), pieces.targets[m].clone())
                total, weight = loss if isinstance(loss, tuple) else (loss * pieces.shares[m], 0.0)
                parts.append((total.double().item(), float(weight)))
        divisor = sum(weight for _, weight in parts) if isinstance(loss, tuple) else 1
        return sum(total for total, _ in parts) / divisor

    def predict(self, inputs: Tensor) -> Tree:
        """Return the outputs, joined."""
        pieces, spec = self._cut({"batch": (inputs, inputs)})
        with self._evaluating(), preserved(torch.device("cpu")):
            return join_rows([self._output(spec, m, pieces) for m in range(len(pieces.inputs))])

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        modules = [module for layers in self.replicas for layer in layers for module in layer.modules()]
        modes = [module.training for module in modules]
        for module in modules:
            module.training = False
        with torch.no_grad():
            yield
        for module, mode in zip(modules, modes, strict=True):
            module.training = mode

    def _cut(self, asked: dict[str, Any]) -> tuple[Microbatches, Spec]:
        pieces = Microbatches.of(asked.get("batch"), asked.get("microbatches"), self._spec.num_microbatches, 1)
        return pieces, replace(self._spec, num_microbatches=len(pieces.inputs))

    def _output(self, spec: Spec, m: int, pieces: Microbatches) -> Tree:
        layers, x = self.replicas[spec.route(m)], map_tensors(pieces.inputs[m], torch.clone)
        if self.case.unsplit:
            if self._partition is None:
                return layers[0](x)
            seed = partial(self._randomness.seed_forward, self._num_steps, m)
            with Keyed(layers[0], self._partition.block_names, seed, torch.device("cpu")):
                return layers[0](x)
        for index, layer in enumerate(layers):
            self._randomness.seed_forward(self._num_steps, m, index)
            x = layer(x)
        return x


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
