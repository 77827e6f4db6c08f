"""ZB-V: no bubble from step to step, with the activations of 1F1B."""

from ..dependency import F, I, W
from ._vee import Listed, Listing, Vee


class ZBV(Listed, Vee):
    """ZB-V: two stages on each worker in a V, split backward; zero bubble in the memory of 1F1B.

        worker 0  F0 F1 .. F0 I0 W0 F1 I1 W1 I0 W0 .. I1 W1
        worker 1  .. F0 F0 F1 F1 I0 W0 I0 W0 I1 W1 I1 W1 ..

    (P=2, M=2.) With few microbatches the same lists run without the missing microbatches. No worker waits between its
    first action and its last; that span is a step's time. In times and activations of a stage:

        makespan = (6 * M + P - 1) * t_F if M >= 2 * P and t_F == t_I == t_W
        span = 6 * M * t_F if M >= 2 * P and t_F == t_I == t_W
        activations = 2 * P if M >= 2 * P and t_F == t_I == t_W
        activations <= 2 * P
    """

    source = "Qi et al. 2024, Pipeline Parallelism with Controllable Memory, arXiv:2405.15362; order as torch's ZBV"
    split_backward = True
    post_validation = True

    def timetable(self, worker: int) -> Listing:
        P, M = self.num_workers, max(self.num_microbatches, 2 * self.num_workers)
        down, up = worker, self.last_stage - worker
        F_down, F_up, both_down, both_up = (F, down), (F, up), ((I, down), (W, down)), ((I, up), (W, up))
        todo = Listing(begin=worker)
        todo.add(F_down, times=2 * (P - worker) - 1)
        todo.add(F_up, F_down, times=worker)
        todo.add(F_up, *both_up, times=P - worker)
        todo.add(F_down, *both_down, F_up, *both_up, times=M - todo.count(F, down))
        todo.add(*both_down, F_up, *both_up, times=M - todo.count(F, up))
        todo.add((I, down), (I, up), times=worker)
        todo.add(*both_down, times=P - worker)
        todo.add((W, up), times=todo.waiting(up))
        todo.add((W, down), times=todo.waiting(down))
        return todo

    def activation_limit(self, worker: int) -> int:
        return 2 * self.num_workers
