"""What tests that start real processes share.

Processes are forks of one that has imported torch, which start in milliseconds, where a test is about what they do;
`anew`: where it is about how they are started, read and loaded, as a user's are.
"""

from __future__ import annotations

import os
import random
import re
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from fork_server import Started, server

ROOT = Path(__file__).parent.parent
#: a GPT that trains in milliseconds, on a text that is there
SMALL = "--width 16 --heads 2 --depth 2 --context 16 --batch 8 --microbatches 4".split()
TEXT = ["--data", str(ROOT / "rpc_pipe" / "launching" / "launcher.py")]


def free_port() -> int:
    """Return a port that nobody listens at, and that the kernel gives to no other socket meanwhile."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)  # below the ports that it chooses from
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def environment(**more: str) -> dict[str, str]:
    """This process's variables without those of a job, and some more."""
    clean = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    return clean | more


def start(
    *arguments: object, cwd: Path = ROOT, merged: bool = False, anew: bool = False, **more: str
) -> Started | subprocess.Popen[str]:
    """Start `python *arguments`, with `more` in its environment; `merged`: stderr goes to stdout."""
    typed = list(map(str, arguments))
    if not (anew or not hasattr(os, "pidfd_open")):
        return server().start(typed, environment(**more), str(cwd), merged=merged)
    return subprocess.Popen(
        [sys.executable, *typed], stdout=subprocess.PIPE, stderr=subprocess.STDOUT if merged else subprocess.PIPE,
        text=True, env=environment(**more), cwd=cwd,
    )  # fmt: skip


def python(
    *arguments: object, timeout: float = 120, cwd: Path = ROOT, anew: bool = False, **more: str
) -> subprocess.CompletedProcess[str]:
    """Run `python *arguments` to its end."""
    with start(*arguments, cwd=cwd, merged=False, anew=anew, **more) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        finally:
            process.kill()
        assert process.returncode is not None
    return subprocess.CompletedProcess(list(map(str, arguments)), process.returncode, out, err)


def rpc_pipe(
    *arguments: object, timeout: float = 120, cwd: Path = ROOT, anew: bool = False, **more: str
) -> subprocess.CompletedProcess[str]:
    """Run the command line to its end."""
    return python("-m", "rpc_pipe", *arguments, timeout=timeout, cwd=cwd, anew=anew, **more)


def unmerged(output: str) -> str:
    """Return the output of a launcher with a line for each worker where it shows a line of several once."""
    lines = []
    for line in output.splitlines():
        alike = re.fullmatch(r"\((\d+) (?:workers|processes)\) (\| .*)", line)
        lines += [line] if alike is None else [f"worker {worker} {alike[2]}" for worker in range(int(alike[1]))]
    return "\n".join(lines)
