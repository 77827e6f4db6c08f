"""PipeDream-2BW: 1F1B that is never flushed, with one update a step and two versions of the weights."""

from ..dependency import Action, B, U
from .one_f_one_b import OneFOneB


class PipeDream2BW(OneFOneB):
    """PipeDream-2BW: 1F1B without a flush, gradients coalesced over a step, two versions of the weights.

    A step uses the weights that the step before last has left, on all stages, so each gradient is one update late at
    any depth. There is no bubble if a step has at least P microbatches. Timeline (P=4, M=4), updates left out:

        worker 0  F0 F1 F2 F3 .. .. .. B0 .. B1 .. B2 .. B3
        worker 1  .. F0 F1 F2 .. .. B0 F3 B1 .. B2 .. B3 ..
        worker 2  .. .. F0 F1 .. B0 F2 B1 F3 B2 .. B3 .. ..
        worker 3  .. .. .. F0 B0 F1 B1 F2 B2 F3 B3 .. .. ..

        makespan = (M + P - 1) * (t_F + t_B)
        activations <= P - w
    """

    source = "Narayanan et al. 2021, Memory-Efficient Pipeline-Parallel DNN Training, arXiv:2006.09503, section 3.1"
    synchronous = False

    def version(self, stage: int, microbatch: int) -> int:
        return max(0, microbatch // self.num_microbatches - 1)

    def slot(self, a: Action) -> int:
        if a.kind is U:
            return self.slot(B(a.stage, (a.index + 1) * self.num_microbatches - 1)) + 1
        # Between steps of fewer microbatches than workers forwards stop, until the update is there.
        stop = max(0, (self.num_stages - self.num_microbatches) // 2)
        return 2 * super().slot(a._replace(index=a.index + a.index // self.num_microbatches * stop))

    def peak_activations(self, worker: int) -> int:
        return self.in_flight(worker)
