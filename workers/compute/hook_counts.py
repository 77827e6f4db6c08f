"""What backward writes and forwards read, as hooks of gradients may count.

In one process a microbatch's backward comes before the next one's forward; in a pipeline others come between.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Sized
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import nn

from ...dependency import ConfigError
from .counts import changed, held
from .inner_state import may_count
from .occasional_checks import OccasionalChecks
from .read_names import read_by


class HookCounts:
    """Checks some backwards.

    Args:
        modules: all that compute.
        others: what holds the other microbatches whose forwards have run, but not all of their backward.
    """

    def __init__(self, modules: Sequence[nn.Module], others: Sequence[Sized]) -> None:
        self._modules, self._others = modules, others
        self._checks = OccasionalChecks() if any(map(may_count, modules)) else None

    def due(self) -> bool:
        """Tell whether the backward that comes next is to be looked at."""
        return self._checks is not None and self._checks.due()

    @contextmanager
    def watched(self, backward: AbstractContextManager[Any]) -> Iterator[None]:
        """Return a context in which a backward runs.

        Raises:
            ConfigError: on leaving it; other forwards should have met what was written now.
        """
        before = held(self._modules) if any(map(len, self._others)) else {}
        with backward:
            yield
        places = changed(before)
        read = read_by(self._modules) if places else ()
        for module, name in [place for place in places if place[1] in read]:
            raise ConfigError(
                f"backward, as by a hook of a gradient, changed {name} of a {type(module).__name__}, which a forward "
                f"reads: in one process the next microbatch's forward comes behind it, in a pipeline before; count in "
                f"forward, or by optimizer steps"
            )
