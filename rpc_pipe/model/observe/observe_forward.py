"""The observation of one forward on shapes, which leaves generators, buffers, attributes and inputs unchanged."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path as File
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from ...dependency import ConfigError, ModelError
from ...dependency.errors import first_sentence
from ...system.garbage import uncollected
from ...workers.compute.randomness import Randomness, preserved, python_too
from ...workers.compute.torch_internals import has_saved_tensor_hooks
from .carried_state import find_carried_state
from .frames import is_of_model
from .observation import Observation
from .observer import Observer
from .placeholder import quiet
from .skeleton import Skeleton
from .trees import mapped


@uncollected()
def observe_forward(skeleton: Skeleton, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Observation:
    """Run the model once on shapes and return the record.

    Raises:
        ModelError: the model does something that stages could not do alike; the text names it.
    """
    skeleton.refuse_hooks()
    given = mapped((tuple(args), dict(kwargs)), torch.clone)
    cache = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)  # so that every operation casts its weights itself
    try:
        with preserved(skeleton.device), skeleton.with_placeholders() as held, _eager(), quiet(), _saving():
            python_too(partial(Randomness(0, skeleton.device).seed_forward, 0, 0))(0, 0)  # alike on all workers
            # in new dicts and lists, from which the model may remove items
            observer = Observer(skeleton, given)
            observation = observer.run(*mapped(given, lambda tensor: tensor))
            find_carried_state(observer, observation, skeleton, held, (tuple(args), dict(kwargs)))
            return observation
    except ConfigError:
        raise
    except Exception as error:
        raise ModelError(_raised(skeleton.module, error)) from error
    finally:
        torch.set_autocast_cache_enabled(cache)


def _raised(model: nn.Module, error: Exception) -> str:
    """Return the message about an error of the forward, with its place in the model."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if is_of_model(frame.filename)]
    where = f" at {File(own[-1].filename).name}:{own[-1].lineno}" if own else ""
    return (
        f"model {type(model).__name__}: its forward raised {type(error).__name__}{where} when it was run on shapes: "
        f"{first_sentence(error)}"
    )


def _eager() -> AbstractContextManager[Any]:
    """Return a context in which compiled functions run as they were written."""
    # Importing the compiler takes seconds; a model that is compiled has imported it.
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


def _saving() -> AbstractContextManager[Any]:
    """Return a context that overrides the caller's saved-tensor hooks, so that the model's own `autograd.grad` works.

    Without such hooks it is empty, since `torch.func` does not run under any.
    """
    if not has_saved_tensor_hooks():
        return nullcontext()
    return saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)
