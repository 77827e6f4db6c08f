"""DualPipe: microbatches enter at both ends; a worker's forward of one meets its backward of the other."""

from ..dependency import Order, ScheduleError
from ._dual import Dual, dual_order
from ._vee import Listing


class DualPipe(Dual):
    """DualPipe: two replicas of the model over the same workers, fed from both ends, in overlapped pairs.

        worker 0  F0 F1 F2 B1 F3 B0 B3 I2 W2
        worker 1  F1 F0 F3 B0 F2 B1 B2 I3 W3

    (P=2, M=4; even microbatches go down, odd ones up.) The gradients of the two replicas of a stage are summed
    before the update. With few microbatches the same lists run without the missing microbatches.

        makespan = (3 * M + P / 2 - 1 + 2 * (M % 2)) * t_F if M >= 2 * P and t_F == t_I == t_W
        activations = P + 1 if M >= 2 * P and t_F == t_I == t_W
        activations <= P + 1
    """

    source = "DeepSeek-AI 2024, DeepSeek-V3, arXiv:2412.19437, section 3.2.1; order as deepseek-ai/DualPipe"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_workers % 2:
            raise ScheduleError(f"workers {self.num_workers}: dualpipe needs an even number, as streams meet in pairs "
                                f"of workers; such as {self.num_workers + 1}")  # fmt: skip

    @property
    def order(self) -> Order:
        return "fixed"

    @property
    def num_routes(self) -> int:
        return 2

    def place(self, stage: int, route: int) -> int:
        return stage if route == 0 else self.last_stage - stage

    def timetable(self, worker: int) -> Listing:
        P = self.num_workers
        count = max(-(-self.num_microbatches // 2), P)  # in each direction
        end = min(worker, P - 1 - worker)
        return dual_order(P // 2, count, end, end, P - 1 - end)

    def turn(self, microbatch: int) -> int:
        return microbatch // 2

    def activation_limit(self, worker: int) -> int:
        return self.num_workers + 1
