"""ZB-V: no bubble from step to step, with the activations of 1F1B."""

from ..dependency import Action, F, I, W
from ._vee import Listed, Listing, Vee


class ZBV(Listed, Vee):
    """ZB-V: two stages on each worker in a V, split backward; zero bubble in the memory of 1F1B.

        worker 0  F0 F1 .. F0 I0 W0 F1 I1 W1 I0 W0 .. I1 W1
        worker 1  .. F0 F0 F1 F1 I0 W0 I0 W0 I1 W1 I1 W1 ..

    (P=2, M=2.) With few microbatches the same lists run without those that do not exist. No worker waits between its
    first action and its last; that span is a step's time. In times and activations of a stage:

        makespan = (6 * M + P - 1) * t_F if M >= 2 * P and t_F == t_I == t_W
        span = 6 * M * t_F if M >= 2 * P and t_F == t_I == t_W
        activations = 2 * P if M >= 2 * P and t_F == t_I == t_W
        activations <= 2 * P
    """

    source = "Qi et al. 2024, Pipeline Parallelism with Controllable Memory, arXiv:2405.15362; order as torch's ZBV"
    split_backward = True
    post_validation = True

    def timetable(self, worker: int) -> list[Action | None]:
        P, M = self.num_workers, max(self.num_microbatches, 2 * self.num_workers)
        down, up = worker, self.last_stage - worker
        todo = Listing(begin=worker)
        todo.add(*[(F, down)] * (2 * (P - worker) - 1))
        todo.add(*[(F, up), (F, down)] * worker)
        todo.add(*[(F, up), (I, up), (W, up)] * (P - worker))
        while todo.count(F, up) < M:
            todo.add(*[(F, down)] * (todo.count(F, down) < M), (I, down), (W, down), (F, up), (I, up), (W, up))
        todo.add(*[(I, down), (I, up)] * worker)
        todo.add(*[(I, down), (W, down)] * (P - worker))
        todo.add(*todo.waiting(up, down))
        return todo.slots

    def activation_limit(self, worker: int) -> int:
        return 2 * self.num_workers
