"""V-Min: a third of the activations of 1F1B, the least a V allows."""

from functools import cached_property

from ._controllable import Block
from .v_half import VHalf


class VMin(VHalf):
    """V-Min: V-Half with the shortest lifetimes; a third of 1F1B's activations and two thirds of its bubble.

        worker 0  F0 F1 .. F0 I0 W0 .. I0 W0 F1 I1 W1 .. I1 W1
        worker 1  .. F0 F0 .. .. I0 I0 F1 F1 W0 W0 I1 I1 W1 W1

    (P=2, M=2.) In times and activations of a stage:

        makespan = (6 * M + 4 * P - 5 - 2 * (P % 3 == 0)) * t_F if M >= 2 * P >= 4 and t_F == t_I == t_W
        activations <= 2 * ((P + 4) // 3)
    """

    @cached_property
    def block(self) -> Block:
        P, shift = self.num_workers, 2 * (self.num_workers % 3 == 0)
        return tuple((w, 2 * P - 1 - w, 2 * P + shift + w, 4 * P - 1 + shift - w) for w in range(P))

    def activation_limit(self, worker: int) -> int:
        return 2 * ((self.num_workers + 4) // 3)
