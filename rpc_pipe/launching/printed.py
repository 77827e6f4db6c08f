"""The lines that workers print, as the launcher shows them: a line that all print alike once. Loads without torch."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection

#: seconds that a line waits for the same line of the other workers
PATIENCE_S = 0.3


class _Line:
    def __init__(self, text: str) -> None:
        self.text, self.since = text, time.monotonic()
        self.workers: list[int] = []


class Printed:
    """Shows the lines of each worker in its order, and a line of all workers alike once.

    Args:
        workers: the workers with lines to show.
        show: shows one line: (the workers that printed it, text).
    """

    def __init__(self, workers: Collection[int], show: Callable[[list[int], str], None]) -> None:
        self._workers, self._show = set(workers), show
        self._waiting: deque[_Line] = deque()

    def add(self, worker: int, text: str) -> None:
        """Take a line; it is shown by a later `show` at the latest."""
        if worker not in self._workers:
            return
        same = None
        for line in self._waiting:
            if worker in line.workers:  # the worker has printed this line, so its new one is later
                same = None
            elif same is None and line.text == text:
                same = line
        if same is None:
            same = _Line(text)
            self._waiting.append(same)
        same.workers.append(worker)
        self.show(PATIENCE_S)

    def show(self, patience_s: float = 0.0) -> None:
        """Show the first lines that all workers have printed, or that have waited for `patience_s`."""
        while self._waiting:
            first = self._waiting[0]
            if len(first.workers) < len(self._workers) and time.monotonic() < first.since + patience_s:
                return
            self._show(first.workers, self._waiting.popleft().text)
