"""Where in the model the forward is that runs now, as Python's frames tell."""

from __future__ import annotations

import inspect
import os
import sys
from pathlib import Path
from types import CodeType, FrameType

import torch
import torch.utils.checkpoint

# with the separator: torchvision is no part of torch
_NOT_OF_MODEL = tuple(f"{Path(file).parent}{os.sep}" for file in (torch.__file__, __file__))
_CHECKPOINT = inspect.unwrap(torch.utils.checkpoint.checkpoint).__code__
_APPLY = torch.autograd.Function.apply.__func__.__code__  # type: ignore[attr-defined]


def is_of_model(filename: str) -> bool:
    """Tell whether a file is neither torch's nor of those that observe and run models."""
    return not filename.startswith(_NOT_OF_MODEL)


def caller() -> str:
    """Return the file and line of the model that runs now."""
    frame = sys._getframe(1)
    while frame.f_back is not None and not is_of_model(frame.f_code.co_filename):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def in_function() -> bool:
    """Tell whether the forward of an `autograd.Function` runs: no mode sees that one was called."""
    return _innermost(_APPLY, sys._getframe(1)) is not None


def checkpoint_frame() -> FrameType | None:
    """Return the outermost call of `torch.utils.checkpoint.checkpoint` in which the forward is, if it is in one."""
    found = _innermost(_CHECKPOINT, sys._getframe(1))
    while found is not None and (outer := _innermost(_CHECKPOINT, found.f_back)) is not None:
        found = outer
    return found


def _innermost(code: CodeType, frame: FrameType | None) -> FrameType | None:
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame
