"""The weights that a schedule trains, computed by plain PyTorch in one process: the reference of `rpc-pipe verify`.

A microbatch is a call of the whole model, of the loss function and of `backward`; gradients are added up in the order
of the schedule, of a parameter that several stages use stage by stage. Where forwards overtake updates, a microbatch
uses the versions of weights that are declared for it.
No worker, no stash and no timing: versions are copies in a dictionary, one microbatch follows the other.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..dependency import ConfigError, Spec, local_order
from ..dependency.versions import summed_update
from ..model.batches.microbatches import Microbatches, has_items, update_shares, with_means
from ..model.batches.ordering import Ordering
from ..model.observe.trees import mapped
from ..model.observed_partition import ObservedPartition
from ..model.partition import LayerPartition
from ..workers.compute.modules.batch_norm import Statistics
from ..workers.compute.modules.deferred_batch_norm import defer
from ..workers.compute.modules.module_state import KeptTensor, ModuleState
from ..workers.compute.modules.randomness import Randomness, preserved
from ..workers.compute.sequences.slice_check import NotedDraws
from ..workers.compute.sequences.slices import plain_name
from ..workers.compute.shard import LossFn
from ..workers.compute.stage_state import shown
from ..workers.transport.payload import Tree
from .keyed import Keyed, Shares

#: by parameter, the gradients of the stages that use it
Grads = list[list[Tensor | None]]


class _Stage:
    """The parameters of a stage on one route: the newest, and the older versions that microbatches may still use."""

    def __init__(
        self, module: nn.Module, names: Sequence[str], optimizer: Callable[..., Optimizer], schedule: Any
    ) -> None:
        parameters = dict(module.named_parameters())
        self.named = [(plain_name(name), parameters[name]) for name in names]
        self.own = [parameter for _, parameter in self.named]
        trained = [(name, parameter) for name, parameter in self.named if parameter.requires_grad]
        self.optimizer = optimizer(trained) if trained else None
        self.lr_scheduler = schedule(self.optimizer) if schedule and self.optimizer else None
        self.num_updates = self.newest = 0
        self.versions: dict[int, list[Tensor]] = {}

    def note(self) -> None:
        """Keep the newest version."""
        self.versions[self.newest] = [parameter.detach().clone() for parameter in self.own]

    def at(self, version: int) -> AbstractContextManager[object]:
        """Return a context that gives the parameters a version; versions before it are dropped."""
        self.versions = {number: tensors for number, tensors in self.versions.items() if number >= version}
        pairs = zip(self.own, self.versions[version], strict=True)
        return shown([KeptTensor(parameter, tensor, parameter._version, None) for parameter, tensor in pairs])


@dataclass
class Replica:
    """A whole model with its loss function: the user's for the first route, another copy for each further route."""

    module: nn.Module
    loss_fn: LossFn
    stages: list[_Stage] = field(default_factory=list)
    shares: Shares = field(init=False)


@dataclass
class _StepSums:
    """The sums of a step's microbatches so far."""

    begin: int
    pieces: Microbatches
    scales: Sequence[float]
    #: whether an update of all stages takes the whole step, so that it is divided by its weight and clipped at once
    is_one: bool
    #: (loss or its sum, weight) by microbatch
    parts: list[tuple[float, float]] = field(default_factory=list)
    summed: bool = False

    def weight(self, microbatches: Iterable[int]) -> float:
        """Return the divisor of the gradients of microbatches."""
        return sum(self.parts[m - self.begin][1] for m in microbatches) if self.summed else 1.0


class Reference:
    """Trains whole models in a schedule's order.

    Args:
        spec: with the versions of weights that microbatches use, and the slices of sequences.
        replicas: one for each route, with equal weights.
        cut: which parameters each stage has, and which modules are blocks.
        optimizer, lr_scheduler, max_grad_norm, deferred_batch_norm: as for `Pipeline`.
        ordering: of the microbatches of a step; None: they run in the given order.
        members: how many members of a worker take its microbatches in turn.
        per_microbatch: whether gradients are added over members after each microbatch, not once a step.
    """

    def __init__(
        self,
        spec: Spec,
        replicas: Sequence[Replica],
        cut: LayerPartition | ObservedPartition,
        optimizer: Callable[..., Optimizer],
        randomness: Randomness,
        *,
        lr_scheduler: Any = None,
        max_grad_norm: float | None = None,
        deferred_batch_norm: bool = False,
        ordering: Ordering | None = None,
        members: int = 1,
        per_microbatch: bool = False,
    ) -> None:
        #: number of slices of a microbatch
        self._slices = spec.num_microbatches // spec.num_whole
        self._declared, self._ordering, spec = spec, ordering, spec.unsliced()
        self._members, self._per_microbatch, self._overlaps = members, per_microbatch, not spec.synchronous
        self._spec, self._cut, self._randomness, self._max_norm = spec, cut, randomness, max_grad_norm
        self.replicas = list(replicas)
        names: list[list[str]] = [[] for _ in range(spec.num_stages)]
        for name, _ in self.replicas[0].module.named_parameters():
            names[cut.first_stage_of(name)].append(name)
        self._statistics = []
        for replica in self.replicas:
            modules = list(replica.module.to(randomness.device).modules())
            defer(modules if deferred_batch_norm else ())
            self._statistics.append(Statistics(modules))
            replica.shares = Shares(replica.module, cut)
            replica.stages = [_Stage(replica.module, own, optimizer, lr_scheduler) for own in names]
        #: the reference weights of each stage, which pull the weights of routes, of each group of separate routes
        self.pulled_to = [
            [{name: p.detach().clone() for name, p in stage.named} for stage in replica.stages]
            for replica in self.replicas[:: spec.num_separate]
        ]
        #: norms of the gradients before clipping, by step, where a step has one
        self.norms: list[float] = []
        #: (stage, first microbatch of an update) -> microbatch -> gradients that the update will take
        self._given: dict[tuple[int, int], dict[int, Grads]] = {}
        self.num_steps = 0

    def train(self, batches: Iterable[Tree]) -> Iterator[float]:
        """Train on one batch after the other and yield the loss of each; a call is one stream."""
        spec, begin = None, 0
        for batch in batches:
            # Whole, as the model may change it: kernels depend on the address where a microbatch begins.
            batch = mapped(batch, partial(Tensor.to, device=self._randomness.device, copy=True))
            pieces = Microbatches.of(batch, None, self._spec.num_microbatches * self._members, 1, self._cut.pair)
            pieces = pieces if self._ordering is None else self._ordering.applied(self._spec, pieces)
            count = len(pieces.inputs)
            if not self.num_steps and not isinstance(self._cut, LayerPartition):  # the pipeline has observed one, too
                self._settle(pieces)
            if self._cut.adds_means and self._spec.takes_steps and any(map(has_items, pieces.first)):
                pieces = with_means(pieces)
            if spec is None or count != spec.num_microbatches:
                spec, begin = replace(self._spec, num_microbatches=count), 0
                self._declared = replace(self._declared, num_microbatches=count * self._slices)
                for stage in (stage for replica in self.replicas for stage in replica.stages):
                    stage.newest, stage.versions = 0, {}
                    stage.note()
            scales = update_shares(spec, pieces.shares) or pieces.shares
            step = _StepSums(begin if self._overlaps else 0, pieces, scales, spec.takes_steps)
            with preserved(self._randomness.device):
                self._step(spec, step)
            self._take_over_statistics()
            begin, self.num_steps = begin + count, self.num_steps + 1
            total = sum(loss for loss, _ in step.parts)
            yield total / sum(weight for _, weight in step.parts) if step.summed else total

    def state_dict(self, route: int = 0) -> dict[str, Tensor]:
        """Return the newest weights of a route under the unsplit model's names; of the first, the reference if any."""
        replica = self.replicas[route]
        state: dict[str, Tensor] = dict(replica.module.state_dict())
        now = {p: name for name, p in replica.module.named_parameters()}  # a forward may have exchanged modules
        for stage, pulled_to in zip(replica.stages, self.pulled_to[0], strict=True):
            if self._spec.averaging_pull and route == 0:
                state |= {now[parameter]: pulled_to[name] for name, parameter in stage.named}
        return state

    def optimizer_state(self) -> dict[str, Tensor]:
        """Return the tensors of the first route's optimizers, by parameter and key."""
        return state_of((stage.optimizer, stage.named) for stage in self.replicas[0].stages)

    def _settle(self, pieces: Microbatches) -> None:
        """Run a forward that counts for nothing: some models change themselves for good in their first one."""
        for replica in self.replicas:
            before = ModuleState(list(replica.module.modules()))
            weights = [(weight, weight.detach().clone()) for weight in replica.module.parameters()]
            with preserved(self._randomness.device), torch.no_grad():
                self._loss(replica, 0, *mapped((pieces.inputs[0], pieces.targets[0]), torch.clone))
                before.put_back()
                for weight, value in weights:
                    if not torch.equal(weight, value):  # as where a forward moves a teacher's weights
                        weight.copy_(value)

    def _loss(self, replica: Replica, m: int, inputs: Any, target: Any) -> Any:
        args, kwargs = ((inputs,), {}) if isinstance(self._cut, LayerPartition) else inputs
        seed, noted = partial(self._randomness.seed_forward, self.num_steps, m), NotedDraws()
        noting = noted if self._slices > 1 else nullcontext()
        with noting, Keyed(replica.module, self._cut.block_names, seed, replica.shares):
            output = replica.module(*args, **kwargs)
        if noted.found:
            cause = "dropout and noise draw other numbers for slices than for whole sequences"
            raise ConfigError(f"slices: {cause}; verify the model without them")
        return replica.loss_fn(output, target)

    def _forth_and_back(self, spec: Spec, step: _StepSums, m: int) -> list[Grads]:
        """Run one microbatch and return the gradients by stage; `m` is counted through the stream."""
        replica, at = self.replicas[spec.route(m // self._members)], m - step.begin
        replica.shares.renew()
        used = [[replica.shares.of(parameter) for parameter in stage.own] for stage in replica.stages]
        with ExitStack() as stack:  # backward too, as a checkpoint computes again
            if self._overlaps:
                for number, stage in enumerate(replica.stages):
                    stack.enter_context(stage.at(self._declared.version(number, m * self._slices)))
            loss = self._loss(replica, m, step.pieces.inputs[at], step.pieces.targets[at])
            step.summed = isinstance(loss, tuple)
            total, weight = loss if isinstance(loss, tuple) else (loss, 0.0)
            step.parts.append(((total if step.summed else total * step.pieces.shares[at]).item(), float(weight)))
            if not step.summed:
                total = total * step.scales[at]
            elif not step.is_one:  # such an update knows its rows, not its weight
                total = total * step.scales[at] / (weight or 1)
            total.backward()
        grads = [[[leaf.grad for leaf in leaves] for leaves in of_stage] for of_stage in used]
        for leaf in chain.from_iterable(chain.from_iterable(used)):
            leaf.grad = None
        return grads

    def _step(self, spec: Spec, step: _StepSums) -> None:
        """Train on a batch; an update runs as soon as all its microbatches have their gradients.

        All replicas make it.
        """
        updates = {m: summed_update(spec, m) for m in range(step.begin, step.begin + spec.num_microbatches)}
        for m, update in updates.items():
            routes, takes = spec.alike(spec.route(m)), [each for each in updates if updates[each] == update]
            ready = []
            for number, grads in enumerate(self._forth_and_back(spec, step, m)):
                of_update = self._given.setdefault((number, takes[0]), {})
                of_update[m] = grads
                if len(of_update) == len(takes):
                    ready.append(number)
                    self._take(spec, step, number, routes, self._given.pop((number, takes[0])))
            for route in routes:
                stages = [self.replicas[route].stages[number] for number in ready]
                for some in [stages] if step.is_one else [[stage] for stage in stages]:
                    self._clip(some, note=step.is_one and route == routes[0])
                for number in ready:
                    self._update(number, route)
        used = {route for m in updates for route in spec.alike(spec.route(m))}
        for route in range(len(self.replicas)):
            for number in range(spec.num_stages if route not in used else 0):  # without microbatches
                self._update(number, route)

    @torch.no_grad()
    def _take_over_statistics(self) -> None:
        """Give all replicas the sums of their deferred batch normalisations, in the order of replicas."""
        for summed in zip(*(each.named(summed=True).values() for each in self._statistics), strict=True):
            total = add_up(tensor.clone() for tensor in summed)
            for tensor in summed:
                tensor.copy_(total)
        for each in self._statistics:
            each.commit()

    def _take(self, spec: Spec, step: _StepSums, number: int, routes: Sequence[int], grads: dict[int, Grads]) -> None:
        """Give a stage's parameters on some routes the sum of an update's gradients: over microbatches in the order of
        the schedule, then over routes, then over the stages that use a parameter."""
        of_step = summing_orders(replace(spec, num_microbatches=spec.num_microbatches // self._members))
        given = [[[m for m in order if self._members * m + step.begin in grads] for order in each] for each in of_step]
        orders = [[self._groups(order, step.begin) for order in each] for each in given]
        weight = step.weight(grads) if step.is_one else 1.0
        for n, (name, _) in enumerate(self.replicas[0].stages[number].named):
            stages = enumerate(self._cut.shared.get(name, [number]))
            added = ((i, groups) for i, stage in stages for groups in orders[stage])
            total = add_up(add_up(add_up(grads[m][n][i] for m in each) for each in groups) for i, groups in added)
            if total is not None and weight != 1:
                total = total.div_(weight)
            for route in routes:
                self.replicas[route].stages[number].own[n].grad = None if total is None else total.clone()

    def _groups(self, order: Sequence[int], begin: int) -> list[list[int]]:
        """Return the microbatches of the whole batch in groups, as their gradients are added.

        A group has one microbatch of every member, or all microbatches of one member. Without members it has all.
        """
        count = self._members
        groups = [[begin + m * count + member for m in order] for member in range(count)]
        return [*map(list, zip(*groups, strict=True))] if self._per_microbatch else groups

    def _clip(self, stages: Sequence[_Stage], *, note: bool) -> None:
        if self._max_norm is not None and stages:
            norm = nn.utils.clip_grad_norm_([p for stage in stages for p in stage.own], self._max_norm)
            if note:
                self.norms.append(float(norm))

    def _update(self, number: int, route: int) -> None:
        stage = self.replicas[route].stages[number]
        if stage.optimizer is not None:
            with self._randomness.lock:
                self._randomness.seed_update(stage.num_updates, self._cut.ranges[number].start)
                stage.optimizer.step()
            stage.num_updates += 1
            if stage.lr_scheduler is not None:
                stage.lr_scheduler.step()
            stage.optimizer.zero_grad()
        with torch.no_grad():
            for name, parameter in stage.named if self._spec.averaging_pull else ():
                pulled_to = self.pulled_to[route // self._spec.num_separate][number][name]
                pull = (parameter - pulled_to) * self._spec.averaging_pull
                parameter.sub_(pull)
                pulled_to += pull
        stage.newest += 1
        if self._overlaps:
            stage.note()


def add_up(parts: Iterable[Tensor | None]) -> Tensor | None:
    """Add up in the order given."""
    total = None
    for part in (part for part in parts if part is not None):
        # torch cannot add a dense tensor to a sparse one
        swapped = total is not None and total.is_sparse and not part.is_sparse
        total = part if total is None else part + total if swapped else total + part
    return total


@lru_cache(maxsize=16)
def summing_orders(spec: Spec) -> list[list[list[int]]]:
    """Return, by stage and route, the microbatches in the order that the schedule adds their gradients."""
    orders: list[list[list[int]]] = [[[] for _ in range(spec.num_routes)] for _ in range(spec.num_stages)]
    for worker in range(spec.num_workers):
        for action in local_order(spec, worker):
            if action.kind.accumulates:
                orders[action.stage][spec.route(action.microbatch)].append(action.microbatch)
    return orders


def state_of(optimizers: Iterable[tuple[Optimizer | None, Iterable[tuple[str, nn.Parameter]]]]) -> dict[str, Tensor]:
    """Return the tensors of optimizers by parameter and key: of momentum, they show the gradients of all steps."""
    trained = [(optimizer, *each) for optimizer, named in optimizers if optimizer is not None for each in named]
    states = ((name, optimizer.state.get(parameter, {})) for optimizer, name, parameter in trained)
    return {f"{name} {key}": v for name, state in states for key, v in state.items() if isinstance(v, Tensor)}


@torch.no_grad()
def give(module: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Give a model the numbers of a state, by names."""
    for name, tensor in module.state_dict().items():
        if name in state and isinstance(tensor, Tensor):
            tensor.copy_(state[name])
