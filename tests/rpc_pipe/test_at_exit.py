"""What a process does at its end is not done by its forks."""

import subprocess
import sys

SCRIPT = """
import atexit, os, sys
from rpc_pipe.system.at_exit import at_exit
at_exit(print, "own", 1)
atexit.unregister(at_exit(print, "taken back"))
if os.fork() == 0:
    sys.exit(0)
os.wait()
"""


def test_a_fork_does_not_do_what_its_parent_does_at_the_end():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr, done.returncode) == ("own 1\n", "", 0)
