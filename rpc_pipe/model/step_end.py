"""What the end of a step asks for: known from the training's options, and from what came out of the steps before."""

from __future__ import annotations

from ..dependency import Asked, ConfigError, Spec, asked_of
from ..workers.compute.result import Result, clips
from ..workers.compute.updating import Training


class StepEnd:
    """What updates must know of other stages, step by step; all workers come to the same.

    Args:
        post_validation: whether updates may be made before the norm of all gradients is known; None: as the schedule
            says.

    Raises:
        ConfigError: they cannot, although it is wanted.
    """

    def __init__(
        self, spec: Spec, training: Training, max_grad_norm: float | None, post_validation: bool | None
    ) -> None:
        scaled = training.grad_scaler is not None and training.grad_scaler.is_enabled()
        self._spec, self._max_norm, self._accumulate = spec, max_grad_norm, training.accumulate
        possible = spec.synchronous and max_grad_norm is not None and not scaled
        if post_validation and not possible:
            raise ConfigError(
                "post_validation: needs max_grad_norm, a synchronous schedule, and no grad_scaler: else updates wait "
                "for no norm, or must not overflow; leave it out"
            )
        self._validates = possible and (spec.post_validation if post_validation is None else post_validation)
        #: by stage, those that hold some of its parameters too; known when the model has been cut
        self.sharing: tuple[tuple[int, ...], ...] = ()
        # Whether the loss is given as sums, so that updates wait for its weight, is known after the first step; and
        # it is clipped often at first.
        self._asked = Asked(weight=True, norms=max_grad_norm is not None or scaled)

    def updates(self, step: int) -> bool:
        """Tell whether training step `step` ends with an update."""
        return (step + 1) % self._accumulate == 0

    def asked(self, step: int, *, streamed: bool) -> Asked:
        """Return what the updates of training step `step` must know.

        Args:
            streamed: whether the next step may begin before it has ended; if not, an early update helps nobody.
        """
        if not self.updates(step):
            asked = self._asked._replace(norms=False, validated=False)
        else:
            asked = self._asked._replace(validated=self._asked.validated and streamed)
        return asked_of(self._spec, asked._replace(sharing=self.sharing))

    def told(self, result: Result) -> None:
        """Take note of what a step came to: who was clipped in one step is likely to be in the next."""
        quiet = self._validates and result.norm_tensor is not None and not clips(self._max_norm, result.norm_tensor)
        self._asked = self._asked._replace(weight=result.summed, validated=quiet)
