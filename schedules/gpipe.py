"""GPipe: all microbatches forward, then all backward."""

from typing import Literal

from ..dependency import Action, B, F, Spec


class GPipe(Spec):
    """GPipe: all forwards, a flush, all backwards; the least messages in flight, the most memory.

    The flush is the relation: no backward on a stage before its last forward.

        worker 0  F0 F1 F2 F3 .. .. .. .. .. .. B3 B2 B1 B0
        worker 1  .. F0 F1 F2 F3 .. .. .. .. B3 B2 B1 B0 ..
        worker 2  .. .. F0 F1 F2 F3 .. .. B3 B2 B1 B0 .. ..
        worker 3  .. .. .. F0 F1 F2 F3 B3 B2 B1 B0 .. .. ..

        makespan = (M + P - 1) * (t_F + t_B)
        bubble = (P - 1) / (M + P - 1)
        activations = M

    The paper runs the backward passes from the last microbatch to the first (`descending`), torch from the first
    (`ascending`).
    """

    source = "Huang et al. 2019, GPipe, arXiv:1811.06965, section 2.3"
    b_order: Literal["descending", "ascending"] = "descending"

    def after(self, a: Action) -> list[Action]:
        return [F(a.stage, self.num_microbatches - 1)] if a.kind is B else []

    def turn(self, microbatch: int) -> int:
        """Return how many backwards of a stage come before that of a microbatch."""
        return self.num_microbatches - 1 - microbatch if self.b_order == "descending" else microbatch

    def slot(self, a: Action) -> int:
        if a.kind is F:
            return a.microbatch + a.stage
        return self.num_microbatches + 2 * (self.num_stages - 1) + self.turn(a.microbatch) - a.stage

    def peak_activations(self, worker: int) -> int:
        return self.num_microbatches
