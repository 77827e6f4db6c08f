"""The model of a user, as a function `path/to/file.py:make` returns it: model, batch and perhaps a loss function."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..dependency import ConfigError, ModelError
from ..dependency.errors import first_sentence
from ..system.load_module import load_module
from ..workers.compute.shard import LossFn
from ..workers.transport.payload import Tree, map_tensors, tensors_of
from .call_form import CallForm, loss_of_output
from .deferred import DeferredModel
from .observe.model_kinds import needs_observation
from .observed_model import ObservedModel, observe
from .partition import LayerLike, as_pair, refuse_no_layer
from .shard_maker import Model


@dataclass(frozen=True)
class UserModel:
    """A model with an example batch."""

    model: Model
    batch: Tree
    #: None: the model computes its loss itself
    loss_fn: LossFn | None = None

    @property
    def is_layers(self) -> bool:
        """Whether the model is a list of layers; else its blocks are found by observation."""
        return not needs_observation(self.model)

    def layers(self) -> list[LayerLike]:
        """Return the layers of a list, as they were given.

        Raises:
            ModelError: the model is a builder of stages, which has no list, or an item is no layer.
        """
        if not isinstance(self.model, (nn.Sequential, Sequence)):
            raise ModelError("model: a builder of stages has no layers to measure; return a list of them, or a module")
        layers = list(self.model)
        for index, layer in enumerate(layers):
            refuse_no_layer(layer, index)
        return layers

    def pair(self, batch: Tree) -> tuple[Tree, Tree]:
        """Return a batch for a list of layers as (inputs, targets).

        Raises:
            ModelError: there is no loss function.
        """
        if self.loss_fn is None:
            raise ModelError("loss_fn: layers compute no loss; let make() return model, batch, loss_fn")
        return as_pair(batch)

    def call(self, batch: Tree) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of the model's forward."""
        args, kwargs = self._form.pair(batch)[0]
        return args, kwargs

    @cached_property
    def _form(self) -> CallForm:
        model = self.model
        return CallForm(model if isinstance(model, nn.Module) else DeferredModel(model, 0).model, self.loss_fn)  # type: ignore[arg-type]

    def observe(self, args: Sequence[Any], kwargs: Mapping[str, Any], at_least: int = 1) -> ObservedModel:
        """Find the blocks of a model that is no list of layers, at least `at_least` if possible."""
        return observe(self.model, args, kwargs, at_least=at_least)  # type: ignore[arg-type]

    def loss(self, output: Any, batch: Tree) -> Tensor:
        """Return the loss of the loss function, or the one in the model's output.

        Raises:
            ModelError: there is no loss.
        """
        if self.loss_fn is None:
            return loss_of_output(output)
        result = self.loss_fn(output, self._form.pair(batch)[1])
        summed: Tensor = result[0] if isinstance(result, tuple) else result
        return summed


def load_user_model(said: str) -> UserModel:
    """Call the function `path/to/file.py:name` and return its model.

    Raises:
        ModelError: there is no such function, it raises, or does not return a model and a batch.
    """
    path, colon, name = said.rpartition(":")
    if not colon or not path.endswith(".py"):
        raise ModelError(f"{said}: must be path/to/file.py:make, a function that returns model, batch")
    module = load_module(Path(path), f"rpc_pipe_model_{Path(path).stem}", said, first=True)
    make = getattr(module, name, None)
    if not callable(make):
        own = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise ModelError(f"{said}: the file has no function {name!r}; it has {', '.join(own) or 'none'}")
    try:
        made = make()
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        raise ModelError(f"{said}: raised {type(error).__name__}: {first_sentence(error)}") from error
    if not isinstance(made, tuple) or len(made) not in (2, 3):
        raise ModelError(f"{said}: returned a {type(made).__name__}; must be model, batch or model, batch, loss_fn")
    model, batch, loss_fn = made if len(made) == 3 else (*made, None)
    if not isinstance(model, (nn.Module, Sequence)) and not callable(model):
        raise ModelError(f"{said}: the model is a {type(model).__name__}; must be a module or a list of layers")
    if not any(True for _ in tensors_of(batch)):
        raise ModelError(f"{said}: the batch has no tensor")
    try:
        map_tensors(batch, lambda tensor: tensor)
    except TypeError as error:
        raise ModelError(f"{said}: {error}") from error
    if any(tensor.is_nested and tensor.layout is torch.strided for tensor in tensors_of(batch)):
        raise ModelError(f"{said}: the batch has a nested tensor without rows; give it layout=torch.jagged, or pad it")
    if not rows_of(batch):
        raise ModelError(f"{said}: the batch has no rows; at least 1")
    return UserModel(model, batch, loss_fn)


def rows_of(batch: Tree) -> int:
    """Return the number of rows of a batch: the size of dimension 0 of its tensors."""
    sizes = [tensor.shape[0] for tensor in tensors_of(batch) if tensor.dim()]
    return max(sizes, default=1)


def resize_batch(batch: Tree, rows: int) -> Tree:
    """Return a batch of `rows` rows, by repeating rows or leaving some out."""
    return resized(batch, rows_of(batch), rows)


def resized(batch: Tree, now: int, size: int, dim: int = 0) -> Tree:
    """Return a batch with `size` places along a dimension of the tensors that have `now` there."""

    def change(tensor: Tensor) -> Tensor:
        if tensor.dim() <= dim or tensor.shape[dim] != now:
            return tensor
        changed = tensor.detach().index_select(dim, torch.arange(size, device=tensor.device) % now)
        return changed.requires_grad_(tensor.requires_grad)

    return map_tensors(batch, change)
