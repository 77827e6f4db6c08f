"""A model profiled by all workers of a job at once: each is busy while the others are, as in a pipeline."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ...dependency import G, Kind
from ...launching.job import current_job
from ...model.user_model import UserModel
from ...tracing import run_folders
from ...workers.compute.device import backend_for
from ..profile import LayerCost, Profile, as_json, from_json
from .calibration import calibrate
from .merging import merged
from .profiling import RUNTIME_MS, profile_model


def profile_together(
    user_model: UserModel, rows: Sequence[int], num_workers: int, settings: Mapping[str, Any]
) -> tuple[Profile, int]:
    """Return what all workers of this job measured, and which of them this is; they call it alike.

    Args:
        user_model: the same on all workers.
        settings: keyword arguments of `profile_model`.

    Raises:
        ConfigError: as of `profile_model`.
    """
    os.environ[run_folders.FOLDER] = run_folders.OFF  # nobody watches layers that sleep
    actor, found = calibrate(num_workers)
    actor.exchange("all are there", None)
    job = current_job()
    backend_for(settings.get("device", "cpu"), job.place if job else actor.worker).use()  # `cuda`: each its own

    def barrier(going: bool) -> bool:
        return all(actor.exchange("who goes on measuring", going))

    own = profile_model(user_model, rows, at_least=num_workers, barrier=barrier, **settings)
    told = actor.exchange("profiles", json.dumps(as_json(own)))
    profiles = [from_json(json.loads(each), "the profile of a worker") for each in told]
    profile = merged(profiles, found.links)
    on_host = own.device == "cpu"  # a GPU runs behind its worker, which hides what the worker takes
    profile = with_moves(profile, found.per_byte if on_host else 0.0)
    per_stage = around(profile.per_stage, found.per_action if on_host else {})
    per_step, per_mib = (max(0.0, found.per_step), found.per_mib) if on_host else (0.0, 0.0)
    return replace(profile, per_stage=per_stage, per_step=per_step, per_mib=per_mib), actor.worker


def with_moves(profile: Profile, per_byte: float) -> Profile:
    """Return a profile in which replicas that exchange gradients compute less while these move."""

    def moved(cost: LayerCost) -> LayerCost:
        return replace(cost, times={**cost.times, G: cost.times[G] + per_byte * cost.size.gradients})

    return replace(profile, measured={rows: [*map(moved, costs)] for rows, costs in profile.measured.items()})


def around(assumed: Mapping[Kind, float], found: Mapping[Kind, float]) -> dict[Kind, float]:
    """Return what each stage takes besides its blocks, ms: what the runtime was found to take for what was assumed."""
    # Not less than nothing: what was assumed has been divided by the speed of a worker that was slow meanwhile.
    return {**assumed, **{kind: max(0.0, assumed.get(kind, RUNTIME_MS) - RUNTIME_MS + found[kind]) for kind in found}}
