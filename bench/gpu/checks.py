"""Many `rpc-pipe verify --transport local` in one process:  checks.py DEVICE STEPS NAME=ARGUMENTS .."""

from __future__ import annotations

import contextlib
import io
import json
import shlex
import sys
import time
import traceback

from bench.gpu.runner import verdict
from rpc_pipe.commands.main import main as rpc_pipe


def main(device: str, steps: str, *jobs: str) -> None:
    """Print a line for each, `CHECK {...}`."""
    for job in jobs:
        name, _, typed = job.partition("=")
        begin, out, error = time.perf_counter(), io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
            try:
                code = rpc_pipe(["verify", *shlex.split(typed), "--device", device, "--steps", steps, "--json"])
            except BaseException:  # one that fails must not hide the next ones
                code = -1
                traceback.print_exc()
        found = verdict(code, out.getvalue(), typed)
        why = "" if found else (error.getvalue().strip() or out.getvalue().strip())[-1500:]
        seconds = round(time.perf_counter() - begin, 1)
        print("CHECK", json.dumps({"name": name, "found": found, "s": seconds, "why": why}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
