"""The command line's options of checkpoints. Loads without torch."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..dependency import ConfigError, Damaged
from ..system.files import refused
from . import folder as folders

if TYPE_CHECKING:
    from .facade import Checkpoints


def try_checkpoints(every: int | None, folder: str, keep: int | None, resume: str | None) -> None:
    """See, before anything is trained, that checkpoints can be written and read.

    Raises:
        ConfigError: one cannot, or an option has no effect.
    """
    if every is None and keep is not None:
        raise ConfigError(f"--checkpoint-keep {keep}: without --checkpoint-every none is written")
    if resume not in (None, "auto") and folders.newest(Path(str(resume))) is None:
        raise ConfigError(f"--resume {resume}: holds no complete checkpoint; auto starts at step 1 if there is none")
    if every is not None:
        with refused(ConfigError, f"--checkpoint-folder {folder}: cannot be written"):
            Path(folder).mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=folder).close()


def follow(
    checkpoints: Checkpoints, every: int | None, folder: str, keep: int | None, resume: str | None, *, anew: bool = True
) -> str:
    """Apply the options to the checkpoints of a script that starts from its first call; return a line for the user.

    Args:
        anew: whether the job begins; else this process joins a running job, which has its folder and its state.
    """
    told = ""
    if anew:
        # Before the folder is taken, which records its last job.
        named = None if resume in (None, "auto") else folders.newest(Path(str(resume)))
        typed = checkpoints.go_on_with(folder) if resume == "auto" else [] if named is None else [named]
        # A restarted job resumes from its checkpoint, with any options that it began with.
        own = [] if every is None else checkpoints.claim(folder)
        if own or resume is not None:
            told = _newest_sound(checkpoints.resume, own, [path for path in typed if path not in own])
            told = told or f"{folder} holds no complete checkpoint of this job: training starts at step 1"
        if not own and not typed and every is not None:
            told = "; ".join(filter(None, (told, folders.others(Path(folder)))))
    if every is not None:
        checkpoints.every(every, folder, keep=keep)
    return told


def _newest_sound(load: Callable[[Path], Any], own: list[Path], typed: list[Path]) -> str:
    """Go on from the first of these checkpoints that is not damaged; report it, and the damaged ones.

    Where all that a job has written itself are damaged, and none was typed, it starts again as it did at first.

    Raises:
        Damaged: all are.
    """
    damaged: list[Damaged] = []
    for path in (*own, *typed):
        try:
            restored = load(path)
        except Damaged as error:  # on all workers alike
            damaged.append(error)
            continue
        told = _instead(damaged, f"goes on from {path}, after {restored.step} steps")
        return f"{told}; the script's steps 1 to {restored.step} are skipped: until then step and evaluate give nan"
    if typed:
        raise damaged[0]
    return _instead(damaged, "training starts at step 1") if damaged else ""


def _instead(damaged: list[Damaged], then: str) -> str:
    what = "; ".join(f"damaged: {error}" for error in damaged)
    return f"{what}; {then} instead" if damaged else then
