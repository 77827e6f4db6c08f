"""The job that wrote a checkpoint: a script with a model. Its checkpoints from one beginning on are a series."""

from __future__ import annotations

import re
import sys
import time
import zlib
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..workers.compute.sequences.slices import plain_name
from . import folder
from .collective import everywhere
from .folder import is_same, written_by

if TYPE_CHECKING:
    from ..workers.actor import WorkerActor

#: settings that a resumed job takes from the checkpoint, not from the script
_SETTINGS = {"learning_rate": "learning rate", "lr_scheduler": "learning-rate schedule"}


def job_of(actor: WorkerActor) -> dict[str, Any]:
    """Return the facts that a checkpoint keeps of its job. All workers make the same call."""
    shards = actor.shards.values()
    named = [(name, tensor) for shard in shards for name, tensor in shard.state_dict().items()]
    forms = {zlib.crc32(f"{plain_name(name)} {getattr(tensor, 'shape', '')}".encode()) for name, tensor in named}
    every = {form for told in everywhere(actor, "shapes of the model", sorted(forms)) for form in told}
    groups = [group for shard in shards if shard.optimizer is not None for group in shard.optimizer.param_groups]
    return {
        "script": Path(sys.argv[0]).name,
        "model": zlib.crc32(repr(sorted(every)).encode()),
        "begun": time.time_ns(),
        "learning_rate": next((float(group.get("initial_lr", group["lr"])) for group in groups), None),
        "lr_scheduler": next((_named(shard.updating.training.lr_scheduler) for shard in shards), None),
    }


def _named(factory: Any) -> str | None:
    if isinstance(factory, partial):
        given = [*map(repr, factory.args), *(f"{name}={value!r}" for name, value in sorted(factory.keywords.items()))]
        return re.sub(" at 0x[0-9a-f]+", "", f"{_named(factory.func)}({', '.join(given)})")
    return None if factory is None else str(getattr(factory, "__name__", type(factory).__name__))


def differences(job: Mapping[str, Any], written: Mapping[str, Any]) -> str:
    """Return the settings of a script that differ from its checkpoint's job; "" if none does."""
    found = [
        f"{what} {written[name]} in the checkpoint, which counts, and {job[name]} in the script"
        for name, what in _SETTINGS.items()
        if written.get(name) and job.get(name) and written[name] != job[name]
    ]
    return "; ".join(found)


def last_series(where: Path, job: Mapping[str, Any]) -> list[Path]:
    """Return the checkpoints of the series that `job` has begun last, also damaged ones, the newest first."""
    found = [(path, written_by(path)) for path in reversed(folder.named(where))]
    found = [(path, other) for path, other in found if is_same(job, other)]
    begun = max((int(other.get("begun", 0)) for _, other in found if other is not None), default=0)
    last = folder.noted(where).get("job")
    if last and is_same(job, last) and last.get("begun", 0) > begun:
        return []  # it has written none yet
    return [path for path, other in found if other is None or other.get("begun", 0) == begun]


def others(where: Path) -> str:
    """Return a sentence on the checkpoints in a folder, which another job wrote; "" if there is none."""
    left = folder.complete(where)
    if not left:
        return ""
    found = written_by(left[-1]) or {}
    begun = time.strftime(", begun %Y-%m-%d %H:%M", time.localtime(found["begun"] / 1e9)) if found.get("begun") else ""
    of = f"of {found['script']}{begun}" if found.get("script") else "that do not say whose they are"
    return f"{len(left)} other checkpoints stay in {where}, the last {left[-1].name} {of}: --resume names one"
