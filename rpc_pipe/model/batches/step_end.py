"""What updates must know of other stages at the end of a step, by the options and the results of earlier steps."""

from __future__ import annotations

from ...dependency import NO_REDUCTIONS, BatchError, Reductions, Spec, known_reductions
from ...workers.compute.result import Result, clips
from ...workers.compute.updating import Training


class StepEnd:
    """Decides step by step what updates must know of other stages; all workers decide the same.

    Args:
        training: its `post_validation` says whether updates may precede the norm of all gradients (and be undone);
            None: the schedule's own choice.

    Raises:
        BatchError: post-validation is wanted and impossible.
    """

    def __init__(self, spec: Spec, training: Training) -> None:
        max_grad_norm, post_validation = training.max_grad_norm, training.post_validation
        scaled = training.grad_scaler is not None and training.grad_scaler.is_enabled()
        self._spec, self._max_norm, self._accumulate = spec, max_grad_norm, training.accumulate
        possible = spec.synchronous and max_grad_norm is not None and not scaled and not spec.zero
        if post_validation and not possible:
            raise BatchError(
                "post_validation: needs max_grad_norm, a synchronous schedule, and neither grad_scaler nor zero: else "
                "updates wait for no norm, must not overflow, or are given to others at once; leave it out"
            )
        self._validates = possible and (spec.post_validation if post_validation is None else post_validation)
        #: how parameters that several hold are divided into pieces; known when the model has been cut
        self.divided = NO_REDUCTIONS
        # Only the first step shows whether the loss is a sum with a weight, for which updates wait; and clipping is
        # frequent at first.
        self._reductions = Reductions(weight=True, norms=max_grad_norm is not None or scaled)

    def updates(self, step: int) -> bool:
        """Return whether training step `step` ends with an update."""
        return (step + 1) % self._accumulate == 0

    def reductions(self, step: int, *, streamed: bool) -> Reductions:
        """Return what the updates of training step `step` must know.

        Args:
            streamed: whether the next step may begin before this one has ended; if not, an early update saves nothing.
        """
        if not self.updates(step):
            reductions = self._reductions._replace(norms=False, validated=False, updates=False)
        else:
            reductions = self._reductions._replace(validated=self._reductions.validated and streamed)
        tied, buckets = self.divided.tied, self.divided.buckets
        return known_reductions(self._spec, reductions._replace(tied=tied, buckets=buckets))

    def observe_result(self, result: Result) -> None:
        """Record the result of a step: after a clipped step the next is likely to be clipped too."""
        quiet = self._validates and result.norm_tensor is not None and not clips(self._max_norm, result.norm_tensor)
        self._reductions = self._reductions._replace(weight=result.summed, validated=quiet)
