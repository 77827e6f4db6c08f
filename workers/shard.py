"""The compute of one shard: forward, backward and update of its slice of the model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from .payload import Payload, Tree, map_tensors, pack, tensors_of, unpack
from .randomness import Randomness
from .result import Losses

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
        self._randomness = randomness
        # What arrives is a leaf, and others may hold its storage: a layer such as ReLU(inplace=True) at the start
        # of a stage gets a copy. Layers further on write what the stage itself made.
        first = self.layers[0][1].modules() if self.layers else ()
        self._writes_inputs = any(getattr(module, "inplace", False) for module in first)
        #: microbatch -> (tensors that owe a gradient upstream, tensors that backward starts from)
        self._kept: dict[int, tuple[list[Tensor], list[Tensor]]] = {}
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
        """How many microbatches' activations are held now."""
        return len(self._kept)

    def train(self, mode: bool) -> None:
        """Set all layers to training or evaluation mode."""
        for _, module in self.layers:
            module.train(mode)

    def forward(
        self, step: int, microbatch: int, inputs: Payload, *, target: Tree = None, share: float | None = None
    ) -> Payload | None:
        """Run the layers; return the payload for the next stage, or None if the loss was computed.

        Args:
            target: what the loss function compares with.
            share: on the last stage, this microbatch's share of the step's rows, the weight of a mean loss;
                None on other stages, and to get the output instead of the loss.
        """
        tree = unpack(inputs)
        owing = [tensor for tensor in tensors_of(tree) if tensor.requires_grad]
        if self._writes_inputs:
            tree = map_tensors(tree, torch.clone)
        for index, module in self.layers:
            with self._randomness.forward(step, microbatch, index):
                tree = module(tree)
        if share is None:
            roots = [tensor for tensor in tensors_of(tree) if tensor.requires_grad]
            payload = pack(tree)
        else:
            assert self.loss_fn is not None
            roots = [self._weigh(microbatch, self.loss_fn(tree, target), share)]
            payload = None
        if torch.is_grad_enabled():
            self._kept[microbatch] = owing, roots
        return payload

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
        owing, roots = self._kept.pop(microbatch)
        if grads is None:
            pairs = [(root, None) for root in roots if root.requires_grad]
        else:
            pairs = [(root, grad) for root, grad in zip(roots, unpack(grads), strict=True) if grad is not None]
        if pairs:
            torch.autograd.backward([root for root, _ in pairs], [grad for _, grad in pairs])
        return pack([tensor.grad for tensor in owing])

    def update(self, divisor: float) -> None:
        """Apply one optimizer step to the summed gradients divided by `divisor`, and forget them."""
        if divisor != 1:
            for parameter in self.parameters():
                if parameter.grad is not None:
                    parameter.grad.div_(divisor)
        if self.optimizer is not None:
            self.optimizer.step()
            if self.lr_scheduler is not None:
                self.lr_scheduler.step()
            self.optimizer.zero_grad(set_to_none=True)
