"""Hanayo: microbatches pass the workers in waves, forth and back."""

from ..dependency import Action, B, F, Order, Spec


class Hanayo(Spec):
    """Hanayo: `waves` zigzags over the workers; about Chimera's bubble with one copy of the weights.

        worker 0  F0 F1 .. F0 B0 F1 B1 B0 .. B1
        worker 1  .. F0 F0 F1 F1 B0 B0 B1 B1 ..

    (P=2, M=2, one wave.) At a turn neighbouring stages are on one worker and hand over without a message. Microbatches
    go in units of P. In times and activations of a stage:

        makespan = (4 * waves * M + 2 * (P - 1)) * t_F if M % P == 0 and t_F == t_B
        bubble = (P - 1) / (2 * waves * M + P - 1) if M % P == 0 and t_F == t_B
        activations = (2 * waves - 1) * P + w + 1 if M % P == 0 and t_F == t_B
        activations <= 2 * waves * min(P, M)
    """

    source = "Liu et al. 2023, Hanayo, arXiv:2308.15762 (relation ours; their own timetables are not published)"
    waves: int = 1

    @property
    def order(self) -> Order:
        return "ready"  # with an odd number of microbatches, or slices, its slots leave gaps that later actions fill

    @property
    def num_stages(self) -> int:
        return 2 * self.waves * self.num_workers

    def place(self, stage: int, route: int) -> int:
        at = stage % (2 * self.num_workers)
        return min(at, 2 * self.num_workers - 1 - at)

    def after(self, a: Action) -> list[Action]:
        return [B(a.stage, a.microbatch - self.num_workers)] if a.kind is F else []

    def slot(self, a: Action) -> int:
        K = self.num_stages
        unit, i = divmod(a.microbatch, self.num_workers)
        return 2 * K * unit + 2 * i + (a.stage if a.kind is F else 2 * K - 1 - a.stage)

    def peak_activations(self, worker: int) -> int:
        return 2 * self.waves * min(self.num_workers, self.num_microbatches)
