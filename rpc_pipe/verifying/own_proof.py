"""A user's model trained piped and, as it is, in one process: compared bit for bit."""

from __future__ import annotations

import copy
import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..dependency import ConfigError, Spec
from ..model.batches.microbatches import Microbatches
from ..model.observe.placeholder import draws_at_random
from ..model.observe.skeleton import MARK, is_mark
from ..model.observe.trees import mapped
from ..model.observed_partition import ObservedPartition
from ..model.partition import LayerPartition
from ..model.partition import replicas as copies_of
from ..model.user_model import UserModel, load_user_model
from ..pipeline import Pipeline
from ..workers.actor import WorkerActor
from ..workers.compute.attributes import Attributes
from ..workers.compute.randomness import Randomness, preserved
from ..workers.compute.torch_internals import OperatorMode, is_current, without_torch_function
from ..workers.transport.payload import Tree
from .options import VerifyOptions
from .proof import add_up, replicas, summing_orders
from .verdict import Compared, tell

# Linear in the gradients, so that rounding stays rounding; the momentum shows the gradients themselves.
_optimizer = partial(torch.optim.SGD, lr=1e-3, momentum=0.9)


def prove_own(options: VerifyOptions) -> None:
    """Runs in every worker (or once, over the in-process transport): train, compare, tell the verdict."""
    torch.set_num_threads(options.threads)
    if not options.spec(sum(options.split) if options.split else 10**9).synchronous:
        raise ConfigError(
            f"schedule {options.schedule}: its steps overlap, which is compared for the built-in models alone; leave "
            f"out {options.model}, or take a schedule whose steps do not, such as 1f1b"
        )
    user_model = seeded(options.model, options.seed)
    alone = _alone(user_model, options.seed)
    begin, begin_cpu = time.perf_counter(), time.process_time()
    pipe = Pipeline(
        user_model.model, user_model.loss_fn, optimizer=_optimizer, example=user_model.batch, blocks=options.blocks,
        **options.for_pipeline()
    )  # fmt: skip
    cut = {"cut_s": time.perf_counter() - begin, "cut_cpu_s": time.process_time() - begin_cpu}
    initial = pipe.state_dict()
    losses = [pipe.step(user_model.batch) for _ in range(options.steps)]
    state, momenta, copies = pipe.state_dict(), pipe.gather("momenta", _momenta), pipe.gather("replicas", replicas)
    if initial is not None and state is not None and momenta is not None and copies is not None:
        whole = pipe.partition
        alone.load_state_dict(initial, strict=False)  # of a model made by a function
        randomness = Randomness(options.seed, pipe.actors[0].backend.device)
        expected = Alone(alone, user_model.batch, whole, pipe.spec, randomness)
        compared = Compared()
        compared.losses(losses, [expected.step() for _ in range(options.steps)])
        compared.tensors(state, alone.state_dict(keep_vars=False))
        found = {name: tensor for part in momenta for name, tensor in part.items()}
        compared.tensors(found, expected.momenta(), " gradients")
        for route, tensors in (pair for worker in copies for pair in worker):
            compared.tensors(tensors, {name: state[name] for name in tensors}, f" on route {route}")
        about = {**cut, "blocks": len(whole.block_names), "split": [len(r) for r in whole.ranges]}
        rows = expected.pieces.rows
        tell(compared, options, rows, losses, summed_otherwise=list(whole.shared), more=about)
    pipe.barrier()


def seeded(said: str, seed: int) -> UserModel:
    """Load what `path/to/file.py:make` names; all workers draw the same."""
    torch.manual_seed(seed)
    random.seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed % 2**32)
    return load_user_model(said)


def _alone(user_model: UserModel, seed: int) -> nn.Module:
    """Return a copy of the model that one process can run."""
    if user_model.is_layers:
        layers = LayerPartition(copy.deepcopy(user_model.layers()), 1).build(0, Randomness(seed))
        return nn.Sequential(*(module for _, module in layers))
    if isinstance(user_model.model, nn.Module):
        return copies_of([user_model.model])[0]
    model: nn.Module = user_model.model()  # type: ignore[operator, assignment, call-arg]
    return model


def _momenta(actor: WorkerActor) -> dict[str, Tensor]:
    first = [shard for (_, route), shard in actor.shards.items() if route == 0]
    return {
        name: shard.optimizer.state[parameter]["momentum_buffer"]
        for shard in first
        if shard.optimizer is not None
        for name, parameter in shard.named_parameters()
        if "momentum_buffer" in shard.optimizer.state.get(parameter, {})
    }


class Alone:
    """Trains a model as it is in this process, by plain gradient accumulation.

    Gradients of microbatches are summed in the order of the schedule; what is drawn at random is keyed as in the
    pipeline, by the place in the model.
    """

    def __init__(
        self,
        model: nn.Module,
        batch: Tree,
        whole: LayerPartition | ObservedPartition,
        spec: Spec,
        randomness: Randomness,
    ) -> None:
        self.model = model.to(randomness.device)
        self._loss_fn, self._whole, self._randomness = whole.loss_fn, whole, randomness
        self.pieces = Microbatches.of(batch, None, spec.num_microbatches, 1, pair=whole.pair)
        self._optimizer = _optimizer([p for p in self.model.parameters() if p.requires_grad])
        self._orders = summing_orders(replace(spec, num_microbatches=len(self.pieces.inputs)))
        self._num_steps = 0
        self._settle()

    def _settle(self) -> None:
        """Run a forward that counts for nothing: some models change themselves for good in their first one."""
        buffers = [(m, n, b) for m in self.model.modules() for n, b in m._buffers.items() if b is not None]
        kept, before = [(*where, where[-1].clone()) for where in buffers], Attributes(self.model.modules())
        with preserved(self._randomness.device):
            self._loss(0, self.pieces.inputs[0], self.pieces.targets[0])
        before.put_back()
        for module, name, buffer, was in kept:
            module._buffers[name] = buffer.copy_(was)

    def momenta(self) -> dict[str, Tensor]:
        """Return the momentum of all parameters that had gradients, by name."""
        state = self._optimizer.state
        named = self.model.named_parameters()
        return {name: state[p]["momentum_buffer"] for name, p in named if "momentum_buffer" in state.get(p, {})}

    def step(self) -> float:
        """Train on the batch and return the loss."""
        parts: list[tuple[float, float]] = []
        grads: list[Mapping[str, Tensor]] = []  # by microbatch
        summed = False
        with preserved(self._randomness.device):
            for m, (inputs, target) in enumerate(zip(self.pieces.inputs, self.pieces.targets, strict=True)):
                loss = self._loss(m, inputs, target)
                summed = isinstance(loss, tuple)
                root, weight = loss if isinstance(loss, tuple) else (loss * self.pieces.shares[m], 0.0)
                root.backward()
                parts.append((root.item(), float(weight)))
                grads.append({n: p.grad for n, p in self.model.named_parameters() if p.grad is not None})
                self._optimizer.zero_grad()
        divisor = sum(weight for _, weight in parts) if summed else 1.0
        for name, parameter in self.model.named_parameters():
            stage = self._whole.first_stage_of(name)
            parameter.grad = add_up(add_up(grads[m].get(name) for m in order) for order in self._orders[stage])
            if parameter.grad is not None and divisor != 1:
                parameter.grad.div_(divisor)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._num_steps += 1
        return sum(loss for loss, _ in parts) / divisor

    def _loss(self, m: int, inputs: Any, target: Any) -> Any:
        args, kwargs = inputs if self._whole.pair is not None else ((inputs,), {})
        device = self._randomness.device
        args, kwargs = mapped((tuple(args), kwargs), lambda t: t.to(device, copy=True))  # which the model may change
        target = mapped(target, lambda tensor: tensor.to(device))
        seed = partial(self._randomness.seed_forward, self._num_steps, m)
        with Keyed(self.model, self._whole.block_names, seed):
            output = self.model(*args, **kwargs)
        assert self._loss_fn is not None
        return self._loss_fn(output, target)


class Keyed(TorchFunctionMode):
    """Lets a model draw its random numbers by the place where it draws: (calls of blocks before, number of the draw).

    Args:
        blocks: names of the blocks; what is inside one is one place.
        seed: called with the place before numbers are drawn; number 0 is the block.
    """

    def __init__(self, model: nn.Module, blocks: Sequence[str], seed: Callable[[int, int], None]) -> None:
        super().__init__()
        self._seed = seed
        self._marked = MARK in blocks
        names = [name for name in dict.fromkeys(blocks) if name != MARK]
        self._blocks = [model if not name else model.get_submodule(name) for name in names]
        self._position = self._number = 0
        self._inside = False
        self._wrapped: list[tuple[nn.Module, Any]] = []

    def __enter__(self) -> Keyed:
        for block in self._blocks:
            self._wrapped.append((block, vars(block).get("forward")))
            vars(block)["forward"] = partial(self._block, block.forward)
        self._begin()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        for block, own in self._wrapped:
            del vars(block)["forward"]
            if own is not None:
                vars(block)["forward"] = own
        # The loss function draws on from where the model has stopped.

    def _begin(self) -> None:
        """Begin a place: Python's and numpy's generators follow torch's."""
        self._seed(self._position, 0)
        drawn = int(torch.randint(2**32, ()).item())
        random.seed(drawn)
        if numpy := sys.modules.get("numpy"):
            numpy.random.seed(drawn)
        self._seed(self._position, 0)

    def _block(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._inside:
            return forward(*args, **kwargs)
        self._inside = True
        own = is_current(self)
        if own:  # under a mode torch leaves its fast paths: attention in evaluation has other bits
            super().__exit__(None, None, None)  # type: ignore[no-untyped-call]
        try:
            result = forward(*args, **kwargs)
        finally:
            self._inside = False
            if own:
                super().__enter__()  # type: ignore[no-untyped-call]
        self._advance()
        return result

    def _advance(self) -> None:
        self._position, self._number = self._position + 1, 0
        with without_torch_function():
            self._begin()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._inside:
            return func(*args, **(kwargs or {}))
        if self._marked and is_mark(func):
            return self._advance()
        self._seed(self._position, self._number + 1)
        with _Draws() as draws:
            result = func(*args, **(kwargs or {}))
        if draws.seen:
            self._number += 1
            self._begin()
        self._seed(self._position, 0)
        return result


class _Draws(OperatorMode):
    """Sees whether an operator may draw random numbers, as the observed forward does: by its numbers it need not."""

    seen = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen |= draws_at_random(func, kwargs or {})
        return func(*args, **(kwargs or {}))
