"""What `rpc-pipe plan` says of a model of `bench.plan_models`, asked as a user would."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def best_plan(make: str, workers: int, microbatches: int) -> dict[str, Any]:
    """Return the best schedule by name that `rpc-pipe plan` finds, as a user would ask for it."""
    return plans(make, workers, microbatches)[0]


def plans(make: str, workers: int, microbatches: int, *more: str) -> list[dict[str, Any]]:
    """Return the best cut of each schedule by name, fastest first; `more`: other options."""
    model = f"{Path(__file__).parent / 'plan_models.py'}:{make}"
    command = [sys.executable, "-m", "rpc_pipe", "plan", model, "--workers", str(workers), "--again", "--no-searched"]
    command += ["--microbatches", str(microbatches), "--no-recompute", "--json", *more]
    root = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    ran = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=root, timeout=180)
    found: list[dict[str, Any]] = json.loads(ran.stdout)["plans"]
    return found


def options_of(plan: Mapping[str, Any]) -> dict[str, Any]:
    """Return a plan's parameters as a schedule takes them."""
    return {key: value for key, value in plan["parameters"].items() if value is not None}
