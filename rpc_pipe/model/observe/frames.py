"""The place in the model's source that runs now, found by Python's stack frames."""

from __future__ import annotations

import inspect
import os
import sys
from functools import lru_cache
from pathlib import Path
from types import CodeType, FrameType

import torch
import torch.utils.checkpoint

# with the separator: torchvision is no part of torch
_NOT_OF_MODEL = tuple(f"{Path(file).parent}{os.sep}" for file in (torch.__file__, __file__))
_CHECKPOINT = inspect.unwrap(torch.utils.checkpoint.checkpoint).__code__


def is_of_model(filename: str) -> bool:
    """Return whether a file belongs neither to torch nor to this package."""
    return not filename.startswith(_NOT_OF_MODEL)


def caller() -> str:
    """Return the file and line of the model that runs now."""
    frame = sys._getframe(1)
    while frame.f_back is not None and not is_of_model(frame.f_code.co_filename):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def in_function() -> bool:
    """Return whether the forward of an `autograd.Function` is running; function modes do not see its call."""
    functions: list[type] = [torch.autograd.Function]
    for function in functions:
        functions += function.__subclasses__()
    forwards = _forwards(tuple(functions))
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code not in forwards:
        frame = frame.f_back
    return frame is not None


@lru_cache(maxsize=1)
def _forwards(functions: tuple[type, ...]) -> frozenset[CodeType]:
    """Return the code of each function's forward: from torch 2.14 on `apply`, which calls it, has no frame."""
    forwards = (inspect.unwrap(function.forward) for function in functions)  # type: ignore[attr-defined]
    return frozenset(forward.__code__ for forward in forwards if hasattr(forward, "__code__"))


def checkpoint_frame() -> FrameType | None:
    """Return the frame of the outermost running call of `torch.utils.checkpoint.checkpoint`; None: there is none."""
    found = _innermost(_CHECKPOINT, sys._getframe(1))
    while found is not None and (outer := _innermost(_CHECKPOINT, found.f_back)) is not None:
        found = outer
    return found


def _innermost(code: CodeType, frame: FrameType | None) -> FrameType | None:
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame
