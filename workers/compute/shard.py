"""The compute of one shard: forward, backward and update of its slice of the model."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ..transport.payload import Payload, Tree, map_tensors, pack, tensors_of, unpack
from .randomness import Randomness
from .result import Losses
from .split_backward import Deferred, Saved, backward_inputs

OptimizerFactory = Callable[[Iterable[nn.Parameter]], Optimizer]
SchedulerFactory = Callable[[Optimizer], LRScheduler]
#: (output of the model, target) -> mean over the microbatch, or (sum, weight)
LossFn = Callable[[Any, Any], Any]


class Shard:
    """A slice of the model on one worker, with its parameters and optimizer state.

    Args:
        stage: its position in the model.
        layers: (index in the whole model, module), in order.
        loss_fn: on the last stage: (output, target) -> mean over the microbatch, or (sum, weight).
    """

    def __init__(
        self,
        stage: int,
        layers: Sequence[tuple[int, nn.Module]],
        randomness: Randomness,
        *,
        loss_fn: LossFn | None = None,
        optimizer: OptimizerFactory | None = None,
        lr_scheduler: SchedulerFactory | None = None,
    ) -> None:
        self.stage = stage
        self.layers = list(layers)
        self.loss_fn = loss_fn
        self.losses = Losses()
        #: (kind of layer, ns) as in `LayerTime`; filled by the next forward if empty; None: not wanted
        self.layer_times: list[tuple[int, int]] | None = None
        self._layer_kinds: dict[tuple[Any, ...], int] = {}
        self._randomness = randomness
        # What arrives is a leaf, and others may hold its storage: a layer such as ReLU(inplace=True) at the start
        # of a stage gets a copy. Layers further on write what the stage itself made.
        first = self.layers[0][1].modules() if self.layers else ()
        self._writes_inputs = any(getattr(module, "inplace", False) for module in first)
        #: microbatch -> (tensors that owe a gradient upstream, tensors that backward starts from, what is saved)
        self._kept: dict[int, tuple[list[Tensor], list[Tensor], Saved | None]] = {}
        #: microbatch -> what to recompute its activations from: inputs, target, share, split
        self._inputs: dict[int, tuple[Payload, Tree, float | None, bool]] = {}
        #: microbatch -> what is left of its backward
        self._deferred: dict[int, Deferred] = {}
        parameters = [p for p in self.parameters() if p.requires_grad]
        self.optimizer = optimizer(parameters) if optimizer and parameters else None
        self.lr_scheduler = lr_scheduler(self.optimizer) if lr_scheduler and self.optimizer else None

    def parameters(self) -> list[nn.Parameter]:
        """Return each parameter once, also if several layers share it."""
        return list(dict.fromkeys(p for _, module in self.layers for p in module.parameters()))

    def state_dict(self) -> dict[str, Tensor]:
        """Return the shard's tensors under the names they have in the unsplit `nn.Sequential`."""
        named = ((index, module.state_dict()) for index, module in self.layers)
        return {f"{index}.{name}": tensor for index, state in named for name, tensor in state.items()}

    @property
    def num_kept(self) -> int:
        """How many microbatches' activations, or inputs to compute them from, are held now."""
        return len(self._kept) + len(self._inputs) + len(self._deferred)

    def train(self, mode: bool) -> None:
        """Set all layers to training or evaluation mode."""
        for _, module in self.layers:
            module.train(mode)

    def forward(
        self,
        step: int,
        microbatch: int,
        inputs: Payload,
        *,
        target: Tree = None,
        share: float | None = None,
        split: bool = False,
        recompute: bool = False,
    ) -> Payload | None:
        """Run the layers; return the payload for the next stage, or None if the loss was computed.

        Args:
            target: what the loss function compares with.
            share: on the last stage, this microbatch's share of the step's rows, the weight of a mean loss;
                None on other stages, and to get the output instead of the loss.
            split: whether `backward_inputs` and `backward_weights` will follow instead of `backward`.
            recompute: keep the inputs instead of the activations; `recompute` comes before backward.
        """
        if not recompute or not torch.is_grad_enabled():
            return self._forward(step, microbatch, inputs, target, share, Saved() if split else None)
        # With the graph, not without: the outputs say what owes a gradient. What the graph would hold is dropped.
        with saved_tensors_hooks(lambda tensor: None, _dropped):
            payload = self._forward(step, microbatch, inputs, target, share, None)
        del self._kept[microbatch]
        self._inputs[microbatch] = inputs, target, share, split
        return payload

    def recompute(self, step: int, microbatch: int) -> None:
        """Compute the activations of a microbatch again, with the same random numbers and no other effect."""
        inputs, target, share, split = self._inputs.pop(microbatch)
        with _on_copies_of_buffers(module for _, module in self.layers):
            self._forward(step, microbatch, inputs, target, share, Saved() if split else None)

    def _forward(
        self, step: int, microbatch: int, inputs: Payload, target: Tree, share: float | None, saved: Saved | None
    ) -> Payload | None:
        tree, randomness = unpack(inputs), self._randomness
        owing = [tensor for tensor in tensors_of(tree) if tensor.requires_grad]
        with saved.hooks() if saved is not None and torch.is_grad_enabled() else nullcontext():
            if self._writes_inputs:
                tree = map_tensors(tree, torch.clone)
            times: list[tuple[int, int]] | None = None if self.layer_times else self.layer_times
            for index, module in self.layers:
                with randomness.lock:
                    randomness.seed_forward(step, microbatch, index)
                    tree = module(tree) if times is None else self._timed(index, module, tree, times)
            if share is not None:
                assert self.loss_fn is not None
                tree = self._weigh(microbatch, self.loss_fn(tree, target), share)
        roots = [tensor for tensor in tensors_of(tree) if tensor.requires_grad]
        if torch.is_grad_enabled():
            self._kept[microbatch] = owing, roots, saved
        return pack(tree) if share is None else None

    def _timed(self, index: int, module: nn.Module, tree: Tree, times: list[tuple[int, int]]) -> Tree:
        """Call a layer and note how long it took."""
        key = index, *(tensor.shape for tensor in tensors_of(tree))
        kind = self._layer_kinds.get(key)
        if kind is None:
            kind = self._layer_kinds[key] = zlib.crc32(repr((module, key[1:])).encode())
        begin = time.perf_counter_ns()
        output = module(tree)
        times.append((kind, time.perf_counter_ns() - begin))
        return output

    def _weigh(self, microbatch: int, loss: Any, share: float) -> Tensor:
        """Note the microbatch's loss; return the tensor that backward starts from.

        A mean counts by its share of the rows, before backward, as plain accumulation does it. A sum starts
        backward as it is: the step's weight is known only when all its microbatches have been forward.
        """
        self.losses.summed = isinstance(loss, tuple)
        if isinstance(loss, tuple):
            root, weight = loss
            self.losses.parts[microbatch] = root.detach(), weight
        else:
            root = loss * share
            self.losses.parts[microbatch] = root.detach(), share
        assert isinstance(root, Tensor)
        return root

    def backward(self, microbatch: int, grads: Payload | None) -> Payload:
        """Run backward from what the next stage sent; add to the weights' gradients; return the inputs'.

        Args:
            grads: one gradient or None for each tensor that this stage's output owed; None after the loss.
        """
        owing, roots, _ = self._kept.pop(microbatch)
        roots, starts = _begin(roots, grads)
        if roots:
            torch.autograd.backward(roots, starts)
        return pack(tuple([tensor.grad for tensor in owing]))

    def backward_inputs(self, microbatch: int, grads: Payload | None) -> Payload:
        """Return the inputs' gradients; leave the weights' to `backward_weights`. Arguments as of `backward`."""
        owing, roots, saved = self._kept.pop(microbatch)
        roots, starts = _begin(roots, grads)
        assert saved is not None
        found, self._deferred[microbatch] = backward_inputs(roots, starts, owing, saved)
        return pack(tuple(found))

    def backward_weights(self, microbatch: int) -> None:
        """Add to the weights' gradients what `backward_inputs` left."""
        self._deferred.pop(microbatch).run()

    def gradients(self) -> Payload:
        """Return the summed gradients, None where there is none, for the other replicas of this shard."""
        return pack([parameter.grad for parameter in self.parameters()])

    def sum_gradients(self, replicas: Sequence[Payload]) -> None:
        """Replace the gradients by the sum of those of all replicas, in the order given: the same on each."""
        for parameter, *parts in zip(self.parameters(), *(unpack(replica) for replica in replicas), strict=True):
            there = [part for part in parts if part is not None]
            total = there[0].clone() if there else None  # others read the parts
            for part in there[1:]:
                total += part
            parameter.grad = total

    def saved(self, microbatch: int) -> Saved:
        """Return what the forward of a microbatch has saved, where actions between it and backward may touch that."""
        _, _, saved = self._kept[microbatch]
        assert saved is not None
        return saved

    def abandon(self) -> None:
        """Forget what has been done since the last update."""
        for kept in (self._kept, self._inputs, self._deferred):
            kept.clear()
        for parameter in self.parameters():
            parameter.grad = None

    @property
    def stateful(self) -> bool:
        """Whether forwards write what later ones read, such as running means."""
        return any(True for _, module in self.layers for _ in module.buffers())

    def divide(self, divisor: float) -> None:
        """Divide the summed gradients by the step's weight."""
        if divisor != 1:
            for parameter in self.parameters():
                if parameter.grad is not None:
                    parameter.grad.div_(divisor)

    def gradient_norms(self) -> list[Tensor]:
        """Return the norm of each gradient, on the device."""
        grads = [parameter.grad for parameter in self.parameters() if parameter.grad is not None]
        return list(torch._foreach_norm(grads)) if grads else []

    def clip(self, max_norm: float, norm: Tensor) -> None:
        """Scale the gradients of a model whose gradients have this norm as `clip_grad_norm_` does."""
        torch.nn.utils.clip_grads_with_norm_(self.parameters(), max_norm, norm)

    def update(self) -> None:
        """Apply one optimizer step to the gradients, and forget them."""
        if self.optimizer is not None:
            self.optimizer.step()
            if self.lr_scheduler is not None:
                self.lr_scheduler.step()
            self.optimizer.zero_grad(set_to_none=True)


def _begin(roots: list[Tensor], grads: Payload | None) -> tuple[list[Tensor], list[Tensor | None]]:
    """Return what backward starts from, and the gradients there."""
    if grads is None:
        return roots, [None] * len(roots)
    pairs = [(root, grad) for root, grad in zip(roots, unpack(grads), strict=True) if grad is not None]
    return [root for root, _ in pairs], [grad for _, grad in pairs]


@contextmanager
def _on_copies_of_buffers(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Let modules write copies of their buffers, such as running means, which have counted the microbatch already.

    Not by putting the values back afterwards: that would be a change in place of what backward needs, and which
    buffers a forward writes cannot be seen from their versions (batch normalisation does not raise them).
    """
    places = [
        (module._buffers, name, buffer)
        for whole in modules
        for module in whole.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    copies = {buffer: buffer.clone() for _, _, buffer in places}
    for buffers, name, buffer in places:
        buffers[name] = copies[buffer]
    try:
        yield
    finally:
        for buffers, name, buffer in places:
            buffers[name] = buffer


def _dropped(_: None) -> NoReturn:
    raise AssertionError("backward before recompute")
