"""PipeDream: 1F1B that is never flushed, with an update after every microbatch."""

from ..dependency import Action, B, U
from .one_f_one_b import OneFOneB


class PipeDream(OneFOneB):
    """PipeDream: 1F1B without a flush, an update after every microbatch, each forward with weights that are stashed.

    A microbatch's forward uses the newest weights that its stage is sure to have then, and its backward uses the same.
    So stage s holds P-s versions of them. Its gradient is P-s-1 updates late. Timeline (P=4, M=4), updates left out:

        worker 0  F0 F1 F2 F3 .. .. .. B0 .. B1 .. B2 .. B3
        worker 1  .. F0 F1 F2 .. .. B0 F3 B1 .. B2 .. B3 ..
        worker 2  .. .. F0 F1 .. B0 F2 B1 F3 B2 .. B3 .. ..
        worker 3  .. .. .. F0 B0 F1 B1 F2 B2 F3 B3 .. .. ..

        makespan = (M + P - 1) * (t_F + t_B)
        activations <= P - w

    `vertical_sync`: all stages use the same version for a microbatch, that of the first stage; each holds P versions.
    """

    source = "Narayanan et al. 2019, PipeDream, SOSP, sections 3.2 and 3.3"
    synchronous = False
    update_every = "microbatch"
    vertical_sync: bool = False

    def version(self, stage: int, microbatch: int) -> int:
        return max(0, microbatch + 1 - self.in_flight(0 if self.vertical_sync else stage))

    def slot(self, a: Action) -> int:
        return 2 * super().slot(B(a.stage, a.index)) + 1 if a.kind is U else 2 * super().slot(a)

    def peak_activations(self, worker: int) -> int:
        return self.in_flight(worker)
