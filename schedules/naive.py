"""Naive model parallelism: one microbatch in the whole pipeline."""

from ..dependency import Action, B, F, Spec


class Naive(Spec):
    """Naive model parallelism: one microbatch at a time; P-1 of P workers always wait.

    worker 0  F0 .. .. .. .. .. .. B0 F1
    worker 1  .. F0 .. .. .. .. B0 .. ..
    worker 2  .. .. F0 .. .. B0 .. .. ..
    worker 3  .. .. .. F0 B0 .. .. .. ..

    makespan = M * P * (t_F + t_B)
    bubble = (P - 1) / P
    activations = 1
    """

    source = "common practice"

    def after(self, a: Action) -> list[Action]:
        return [B(a.stage, a.microbatch - 1)] if a.kind is F else []

    def slot(self, a: Action) -> int:
        start = 2 * self.num_stages * a.microbatch
        return start + (a.stage if a.kind is F else 2 * self.num_stages - 1 - a.stage)

    def peak_activations(self, worker: int) -> int:
        return 1
