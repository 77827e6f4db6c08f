"""Worker processes, as the launcher holds them, and the queue of their events. Loads without torch."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import threading
import time
from typing import Any, NamedTuple

from . import launcher_link as link
from .logs import Logs

#: most events that wait to be handled; workers that print more wait
MOST_UNREAD = 256
#: longer lines, as of progress bars, are shown in parts
_LONGEST_LINE = 8192
#: seconds to read a worker's pipes after its end, as a child process may keep them open
_LAST_WORDS_S = 1.0


class WorkerEvent(NamedTuple):
    """An event of a worker: `told` a message, `printed` a line, `no more` messages, or `ended` with an exit code."""

    what: str
    worker: int
    detail: Any


#: the events of all workers, in the order in which they came
Events = queue.Queue[WorkerEvent]


class WorkerProcess:
    """One worker process with its pipes, read by threads into `events`."""

    def __init__(
        self, rank: int, command: list[str], environment: dict[str, str], events: Events, logs: Logs | None = None
    ) -> None:
        self._rank = rank
        self._logs = logs
        self._events = events
        ends: list[int] = []
        try:
            ends += os.pipe()
            ends += os.pipe()
            leash_end, leash, told, tell_end = ends
            self.process = subprocess.Popen(
                command,
                env={**environment, "RANK": str(rank), link.LEASH: str(leash_end), link.TELL: str(tell_end)},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=(leash_end, tell_end),
                start_new_session=True,  # the terminal's Ctrl-C must reach the launcher alone
            )
        except OSError:  # the launcher needs the descriptors to clean up
            for end in ends:
                os.close(end)
            raise
        self._leash = open(leash, "wb", buffering=0)
        os.close(leash_end)
        os.close(tell_end)
        readers = [
            threading.Thread(target=self._read_told, args=(told,), daemon=True),
            threading.Thread(target=self._read_output, daemon=True),
        ]
        try:
            for reader in (*readers, threading.Thread(target=self._await_end, args=(readers,), daemon=True)):
                reader.start()
        except RuntimeError:  # the system cannot start a thread
            self.kill()
            raise

    def order_stop(self) -> None:
        """Ask it to finish the step and stop."""
        with contextlib.suppress(OSError, ValueError):  # it has ended
            self._leash.write(link.STOP)

    def kill(self) -> None:
        """Kill the process and all processes that it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def _put(self, what: str, detail: Any) -> None:
        self._events.put(WorkerEvent(what, self._rank, detail))

    def _read_told(self, descriptor: int) -> None:
        with open(descriptor) as lines:
            for text in lines:
                with contextlib.suppress(ValueError):  # it was killed in the middle of a message
                    self._put("told", json.loads(text))
        self._put("no more", None)

    def _read_output(self) -> None:
        assert self.process.stdout is not None
        rest = b""
        with self.process.stdout as output:
            while read := os.read(output.fileno(), _LONGEST_LINE):
                if self._logs is not None:
                    self._logs.write(self._rank, read)
                *lines, rest = (rest + read).split(b"\n")
                if len(rest) > _LONGEST_LINE:
                    lines, rest = [*lines, rest], b""
                for line in lines:
                    self._put("printed", _shown(line))
        if rest:
            self._put("printed", _shown(rest))

    def _await_end(self, readers: list[threading.Thread]) -> None:
        code = self.process.wait()
        deadline = time.monotonic() + _LAST_WORDS_S
        for reader in readers:
            reader.join(max(0.0, deadline - time.monotonic()))
        self._leash.close()
        self._put("ended", code)


def _shown(line: bytes) -> str:
    """Return a printed line as a terminal would finally show it."""
    return line.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="replace").rstrip()
