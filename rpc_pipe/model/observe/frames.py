"""The place in the model's source that runs now, by Python's stack frames, and in errors about lost tensors."""

import inspect
import os
import sys
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from ...dependency import ModelError
from .observation import Event

# with the separator: torchvision is no part of torch
_NOT_OF_MODEL = tuple(f"{Path(file).parent}{os.sep}" for file in (torch.__file__, __file__))
#: where `vmap`, `grad` and the other transforms of `torch.func` call a function
_TRANSFORMS = tuple(f"{Path(torch.__file__).parent / '_functorch' / name}.py" for name in ("vmap", "eager_transforms"))
_CHECKPOINT = inspect.unwrap(torch.utils.checkpoint.checkpoint).__code__


def is_of_model(filename: str) -> bool:
    """Return whether a file belongs neither to torch nor to this package."""
    return not filename.startswith(_NOT_OF_MODEL)


def _frames() -> Iterator[FrameType]:
    """Yield the running frames, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def caller() -> str:
    """Return the file and line of the model that runs now."""
    found = next(frame for frame in _frames() if is_of_model(frame.f_code.co_filename) or frame.f_back is None)
    return f"{Path(found.f_code.co_filename).name}:{found.f_lineno}"


def in_function(seen: dict[tuple[int, CodeType], bool]) -> bool:
    """Return whether the forward of an `autograd.Function` is running; function modes do not see its call.

    Args:
        seen: (number of classes, code that has run) -> whether it is a forward; to ask all classes takes 0.1 ms.
    """
    number = len(torch.autograd.Function.__subclasses__())
    running = [(number, frame.f_code) for frame in _frames()]
    if any(each not in seen for each in running):
        functions: list[type] = [torch.autograd.Function]
        for function in functions:
            functions += function.__subclasses__()
        forwards = _forwards(tuple(functions))
        seen |= {each: each[1] in forwards for each in running}
    return any(seen[each] for each in running)


def in_transform() -> bool:
    """Return whether a transform of `torch.func` is running, such as `vmap`, which wraps tensors."""
    return any(frame.f_code.co_filename in _TRANSFORMS for frame in _frames())


@lru_cache(maxsize=1)
def _forwards(functions: tuple[type, ...]) -> frozenset[CodeType]:
    """Return the code of each function's forward: from torch 2.14 on `apply`, which calls it, has no frame."""
    forwards = (inspect.unwrap(function.forward) for function in functions)  # type: ignore[attr-defined]
    return frozenset(forward.__code__ for forward in forwards if hasattr(forward, "__code__"))


def checkpoint_frame() -> FrameType | None:
    """Return the frame of the outermost running call of `torch.utils.checkpoint.checkpoint`; None: there is none."""
    calls = [frame for frame in _frames() if frame.f_code is _CHECKPOINT]
    return calls[-1] if calls else None


def name_of(func: Any) -> str:
    """Return the name of a torch function, or of a block, for messages."""
    if isinstance(func, nn.Module):
        return type(func).__name__
    return getattr(func, "__qualname__", None) or getattr(func, "__name__", None) or str(func)


#: functions that run backward inside a forward
_BACKWARD = {torch.autograd.grad: "torch.autograd.grad", Tensor.backward: "backward"}


def lost(tensor: Tensor, maker: Event | None, current: Event | None) -> ModelError:
    """Return the error about a tensor.

    Args:
        maker: the event that made it, if that is known.
        current: the event that takes it.
    """
    if current is not None and (called := _BACKWARD.get(current.func)):
        why = f"{current.where} calls {called} through blocks, of which each stage has only some"
        return ModelError(f"model: {why}; let a block do so, or name a module that contains them with blocks=")
    what = f"a tensor of shape {tuple(tensor.shape)} that {caller()} takes"
    if maker is not None and maker.is_block:
        why = f"model: {what} was made in block {maker.where} and left it otherwise than by its return value"
        return ModelError(f"{why}; return it, or leave it in an attribute of the block")
    why = f"model: {what} was made by an operation that Python does not see, or is kept by no module"
    return ModelError(f"{why}; put it inside a block, keep it in a module, or name its module with blocks=")


def stale_view(tensor: Tensor) -> ModelError:
    """Return the error about a view of a trained weight that an attribute keeps."""
    why = f"a tensor of shape {tuple(tensor.shape)} that {caller()} takes is a view of a weight in an attribute"
    return ModelError(f"model: {why}: no update reaches its copies; compute it in the forward, as by weight.t()")
