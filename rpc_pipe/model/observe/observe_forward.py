"""The observation of one forward on shapes, which leaves generators, buffers, attributes and inputs unchanged.

Each stage has a copy of the model. So state that one forward leaves in the model for the next must be written and read
by one stage, or by all alike. Tensors are found by observing a second forward, which begins with the attributes that
the first has left: attributes that it reads are carried over.
"""

import sys
import traceback
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from pathlib import Path as File
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from ...dependency import ConfigError, ModelError
from ...dependency.errors import first_sentence
from ...system.garbage import uncollected
from ...workers.compute.modules.module_state import OF_TORCH, ModuleState
from ...workers.compute.modules.randomness import Randomness, preserved, python_too
from ...workers.compute.modules.torch_internals import has_saved_tensor_hooks
from .frames import is_of_model
from .observation import CarriedState, Depends, Event, Observation
from .observer import Observer
from .placeholder import quiet
from .side_effects import num_hooks
from .skeleton import Skeleton
from .trees import mapped, tensors


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
        state = skeleton.followed.observed(), skeleton.with_placeholders()
        with preserved(skeleton.device), state[0], state[1] as held, _eager(), quiet(), _saving():
            python_too(partial(Randomness(0, skeleton.device).seed_forward, 0, 0))(0, 0)  # alike on all workers
            # in new dicts and lists, because the model may remove items
            hooks = {module: num_hooks(module) for module in skeleton.module.modules()}
            observer = Observer(skeleton, given)
            observation = observer.run(*mapped(given, lambda tensor: tensor))
            observation.hooked = {module for module, count in hooks.items() if num_hooks(module) > count}
            _find_carried_state(observer, observation, skeleton, held, (tuple(args), dict(kwargs)))
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
    what = f"{type(error).__name__}{where} when it was run on shapes: {first_sentence(error)}"
    return f"model {type(model).__name__}: its forward raised {what}"


def _eager() -> AbstractContextManager[Any]:
    """Return a context that runs compiled functions without the compiler."""
    # Importing the compiler takes seconds; a model that is compiled has imported it.
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


def _saving() -> AbstractContextManager[Any]:
    """Return a context that overrides the caller's saved-tensor hooks, so that `autograd.grad` in the model works.

    Without such hooks it is empty, since `torch.func` does not run under any.
    """
    if not has_saved_tensor_hooks():
        return nullcontext()
    return saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)


def _find_carried_state(
    observer: Observer, observation: Observation, skeleton: Skeleton, before: ModuleState, given: Any
) -> None:
    """Complete an observation with the state that its forward has left, while the model still has it.

    Args:
        before: the modules' state before the forward.
        given: (args, kwargs) before the forward.
    """
    inside = {module for block in skeleton.blocks for module in block.modules()}
    observation.changed = before.changed_attributes()
    now_other = {module for module, _ in observation.changed}
    changed = [module for module in before.modules if module in now_other]
    skeleton.counting |= now_other  # a second forward may restore them
    skeleton.exchanged |= dict.fromkeys(replaced := skeleton.replaced_buffers())
    around = [module for module in changed if module not in inside] or any(m not in inside for m, _ in replaced)
    writes = any(event.depends is Depends.FIELDS and event.writes and event.buffers for event in observation.events)
    observation.to_the_end = bool(around) or writes
    left = _tensors_left(observer, skeleton, changed)
    if not left:
        return
    given = mapped(given, Tensor.clone)
    again = Observer(skeleton, given, left)
    with suppress(Exception):  # reads before the error count
        again.run(*mapped(given, lambda tensor: tensor))
    for (what, made), used in again.used:
        observation.carried.append(CarriedState(what, [made, _in_first_forward(observation, used)]))


def _in_first_forward(observation: Observation, event: Event) -> Event:
    """Return the event of the first forward that corresponds to one of the second.

    It is the same call of a block, or the same event if both forwards were equal so far; otherwise `event` itself.
    """
    there = observation.calls if event.is_block else observation.events
    place = event.position if event.is_block else event.index
    same = there[place] if place < len(there) else event
    alike = (same.func, same.module, same.position) == (event.func, event.module, event.position)
    return same if alike else event


def _tensors_left(observer: Observer, skeleton: Skeleton, changed: Iterable[nn.Module]) -> dict[int, tuple[str, Event]]:
    """Return the tensors that the forward has left and not every stage computes: by id, (name, event that made it)."""
    held = [(module, name, value) for module in changed for name, value in vars(module).items()]
    held += [(module, name, module._buffers.get(name)) for module, name in skeleton.replaced_buffers()]
    found = {}
    for module, name, value in held:
        for tensor in tensors(value) if name not in OF_TORCH else ():
            made = observer.made_by(tensor)
            if made is not None and made.depends is not Depends.FIELDS:
                found[id(tensor)] = f"attribute {name} of {skeleton.name_of(module)}", made
    return found
