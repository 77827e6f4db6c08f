"""The outputs of a prediction, and the workers that get them."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from ...dependency import BatchError, Spec
from ...workers.transport.payload import Tree
from .microbatches import join_rows


class Outputs:
    """The workers that compute outputs, and those that want them.

    Args:
        to: the worker or workers that want them; None: all.

    Attributes:
        name: compared with other workers, which must ask for the same.
        senders, takers: the workers that have outputs, and those that want them.

    Raises:
        BatchError: there is no such worker.
    """

    def __init__(self, spec: Spec, to: int | Collection[int] | None) -> None:
        everybody = range(spec.num_workers)
        takers = everybody if to is None else to if isinstance(to, Collection) else [to]
        for worker in takers:
            if not isinstance(worker, int) or isinstance(worker, bool) or worker not in everybody:
                raise BatchError(f"to {worker!r}: must be a worker, 0 to {spec.num_workers - 1}, or a list of such")
        taken = sorted(set(takers))
        name = "outputs" if to is None else f"outputs to {', '.join(map(str, taken)) or 'nobody'}"
        self.name, self.takers = name, taken
        self.senders = {spec.place(spec.last_stage, route) for route in range(spec.num_routes)}

    @staticmethod
    def joined(found: Iterable[list[Tree] | None]) -> Tree:
        """Return the outputs that the workers of a process got, joined in the order of microbatches; None: none."""
        parts = next((each for each in found if each is not None), None)
        if parts is None:
            return None
        outputs = {microbatch: output for part in parts for microbatch, output in part.items()}
        return join_rows([outputs[microbatch] for microbatch in sorted(outputs)])
