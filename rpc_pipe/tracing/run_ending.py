"""How a run ended, for its watchers: a file of lines beside the boards. Loads without torch.

The process that ends a run writes the cause and then removes the file with its folder. A watcher opens the file at its
first poll, so it can read the last lines even after the removal.
"""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

#: the file's name in a run's folder
END = "end"
#: longer causes are cut off
_MOST_TEXT = 8_000
RUN_FAILED, RUN_STOPPED = "failed", "was stopped"


class Ending(NamedTuple):
    """How a run, or a worker of it, ended."""

    #: RUN_FAILED or RUN_STOPPED
    what: str
    #: why
    text: str
    #: whether the end of another worker has caused it
    consequence: bool = False

    def __str__(self) -> str:
        return f"{self.what}: {self.text}"


def tell_end(folder: Path, ending: Ending) -> None:
    """Tell watchers, if possible."""
    line = json.dumps(ending._replace(text=ending.text[:_MOST_TEXT]))
    with suppress(OSError), (folder / END).open("a") as file:
        file.write(line + "\n")  # in one piece, as other workers may write too
