"""Outputs of microbatches: the workers that have them or want them, and their rows joined."""

from collections.abc import Collection, Iterable

import torch
from torch import Tensor

from ...dependency import BatchError, Spec
from ...workers.transport.payload import Tree


def join_rows(pieces: list[Tree]) -> Tree:
    """Concatenate outputs of microbatches along dimension 0.

    Raises:
        BatchError: an output has no such dimension.
    """
    first = pieces[0]
    if isinstance(first, Tensor):
        if first.dim() == 0:
            raise BatchError("predict: the model gives a tensor without rows; leave labels out if it is a loss")
        return torch.cat(pieces)
    if isinstance(first, (tuple, list)):
        columns = [join_rows(list(column)) for column in zip(*pieces, strict=True)]
        return type(first)(*columns) if hasattr(first, "_fields") else type(first)(columns)
    if isinstance(first, dict):
        return type(first)((key, join_rows([piece[key] for piece in pieces])) for key in first)
    return first


class Outputs:
    """The workers that compute outputs, and the workers that want them.

    Args:
        to: the worker or workers that want them; None: all.

    Attributes:
        name: compared with other workers, which must make the same call.
        senders, takers: the workers that have outputs, and the workers that want them.

    Raises:
        BatchError: there is no such worker.
    """

    def __init__(self, spec: Spec, to: int | Collection[int] | None) -> None:
        everybody = spec.numbers or range(spec.num_workers)
        takers = everybody if to is None else to if isinstance(to, Collection) else [to]
        for worker in takers:
            if not isinstance(worker, int) or isinstance(worker, bool) or worker not in everybody:
                raise BatchError(f"to {worker!r}: must be a worker, 0 to {everybody[-1]}, or a list of such")
        taken = sorted(set(takers))
        name = "outputs" if to is None else f"outputs to {', '.join(map(str, taken)) or 'nobody'}"
        # Worker 0 is the lowest live one for a script, and a dead one takes nothing.
        live = {min(spec.workers) if worker == 0 else worker for worker in taken} & set(spec.workers)
        self.name, self.takers = name, sorted(live)
        self.senders = {spec.place(spec.last_stage, route) for route in range(spec.num_routes)}

    @staticmethod
    def joined(found: Iterable[list[Tree] | None]) -> Tree:
        """Return the outputs that the workers of a process got, joined in the order of microbatches; None: none."""
        parts = next((each for each in found if each is not None), None)
        if parts is None:
            return None
        outputs = {microbatch: output for part in parts for microbatch, output in part.items()}
        return join_rows([outputs[microbatch] for microbatch in sorted(outputs)])
