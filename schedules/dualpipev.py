"""DualPipeV: DualPipe's overlap of forward and backward on one copy of the weights."""

from ._dual import Dual, dual_order
from ._vee import Listing, Vee


class DualPipeV(Dual, Vee):
    """DualPipeV: two stages on each worker in a V; forwards of one meet backwards of the other, in pairs.

        worker 0  F0 F1 .. F0 I0 W0 F1 B1 B0 .. B1
        worker 1  .. F0 F0 F1 F1 B0 B0 .. B1 B1 ..

    (P=2, M=2.) The steady state is pairs F, B that kernels may overlap; backward is split where the pipeline fills
    and drains. With few microbatches the same lists run without the missing microbatches. In times and activations of a
    stage:

        makespan = (6 * M + P - 1) * t_F if M >= 2 * P and t_F == t_I == t_W
        activations = 2 * P + 1 if M >= 2 * P and t_F == t_I == t_W
        activations <= 2 * P + 1
    """

    source = "DeepSeek-AI 2024, DualPipe (cut-in-half, Sea AI Lab 2025), as deepseek-ai/DualPipe dualpipev.py"

    def timetable(self, worker: int) -> Listing:
        P = self.num_workers
        return dual_order(P, max(self.num_microbatches, 2 * P), worker, worker, self.last_stage - worker)

    def activation_limit(self, worker: int) -> int:
        return 2 * self.num_workers + 1
