"""What tests that start real processes share."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
#: a GPT that trains in milliseconds, on a text that is there
SMALL = "--width 16 --heads 2 --depth 2 --context 16 --batch 8 --microbatches 4".split()
TEXT = ["--data", str(ROOT / "rpc_pipe" / "launching" / "launcher.py")]


def environment(**more: str) -> dict[str, str]:
    """This process's variables without those of a job, and some more."""
    clean = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    return clean | more


def rpc_pipe(
    *arguments: object, timeout: float = 120, cwd: Path = ROOT, **more: str
) -> subprocess.CompletedProcess[str]:
    """Run the command line to its end."""
    command = [sys.executable, "-m", "rpc_pipe", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=environment(**more), cwd=cwd)
