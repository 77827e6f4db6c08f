"""V-Half: half the activations of 1F1B and half its bubble."""

from functools import cached_property

from ._controllable import Block, timetable
from ._vee import Listed, Listing, Vee


class VHalf(Listed, Vee):
    """V-Half: two stages on each worker in a V, split backward; half of 1F1B's activations and of its bubble.

        worker 0  F0 F1 .. F0 I0 W0 F1 .. I0 I1 W1 W0 .. I1 W1
        worker 1  .. F0 F0 F1 F1 I0 W0 I0 W0 .. I1 W1 I1 W1 ..

    (P=2, M=2.) In times and activations of a stage:

        makespan = (6 * M + 6 * ((P + 1) // 2) - 7) * t_F if M >= 2 * P and P >= 3 and t_F == t_I == t_W
        makespan = (6 * M + 1) * t_F if M >= 4 and P == 2 and t_F == t_I == t_W
        activations <= 2 * ((P + 2) // 2)
    """

    source = "Qi et al. 2024, Pipeline Parallelism with Controllable Memory, arXiv:2405.15362; order as zbv_greedy.py"
    split_backward = True

    @cached_property
    def block(self) -> Block:
        """When a microbatch does F down, F up, I up, I down on each worker: lifetimes of half a pipeline."""
        P, shift = self.num_workers, 3 * (self.num_workers % 2 == 0)
        return tuple((2 * w, 3 * P - 2 - w, 3 * P - 1 + shift + 2 * w, 6 * P - 2 + shift - w) for w in range(P))

    def timetable(self, worker: int) -> Listing:
        return timetable(self.block, self.num_microbatches, worker)

    def activation_limit(self, worker: int) -> int:
        return 2 * ((self.num_workers + 2) // 2)
