"""What a user types about checkpoints. Loads without torch."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any, Protocol

from ..dependency import ConfigError
from . import folder as folders


class Checkpointed(Protocol):
    """A pipeline, as far as this is concerned."""

    def load_checkpoint(self, folder: str | Path) -> Any: ...
    def resume(self, folder: str | Path) -> Any: ...
    def claim_checkpoints(self, folder: str | Path) -> Path | None: ...
    def checkpoint_every(self, steps: int, folder: str | Path, *, keep: int | None = None) -> None: ...


def try_checkpoints(every: int | None, folder: str, keep: int | None, resume: str | None) -> None:
    """See, before anything is trained, that checkpoints can be written and read.

    Raises:
        ConfigError: one cannot, or an option has no effect.
    """
    if every is None and keep is not None:
        raise ConfigError(f"--checkpoint-keep {keep}: without --checkpoint-every none is written")
    if resume not in (None, "auto") and folders.newest(Path(str(resume))) is None:
        raise ConfigError(f"--resume {resume}: holds no complete checkpoint; auto starts at step 0 if there is none")
    if not folder:
        raise ConfigError("--checkpoint-folder: must name a folder")
    if every is not None:
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as error:
            raise ConfigError(f"--checkpoint-folder {folder}: cannot be written: {error.strerror}") from error


def follow(
    pipe: Checkpointed, every: int | None, folder: str, keep: int | None, resume: str | None, *, anew: bool
) -> str:
    """Do with a new pipeline what was typed; return what to tell of it.

    Args:
        anew: whether its calls will come from the first one on.
    """
    told = ""
    # A job that is started again goes on from its own checkpoint, whatever was typed when it began.
    own = None if every is None else pipe.claim_checkpoints(folder)
    if own is not None or resume is not None:
        source = own or folders.newest(Path(folder if resume in (None, "auto") else resume))
        if source is None:
            told = f"{folder} holds no complete checkpoint: training starts at step 0"
        else:
            restored = (pipe.resume if anew else pipe.load_checkpoint)(source)
            told = f"goes on from {source}, after {restored.step} steps"
    if every is not None:
        pipe.checkpoint_every(every, folder, keep=keep)
    return told
