"""Eager 1F1B: about twice the microbatches in flight, so that late arrivals hide behind compute."""

from ..dependency import Action, B, F, Spec


class EagerOneFOneB(Spec):
    """Eager 1F1B: 1F1B that tolerates slow links, for less than twice its activations.

        worker 0  F0 F1 F2 F3 .. .. .. B0 .. B1 .. B2 .. B3
        worker 1  .. F0 F1 F2 F3 .. B0 .. B1 .. B2 .. B3 ..
        worker 2  .. .. F0 F1 F2 B0 F3 B1 .. B2 .. B3 .. ..
        worker 3  .. .. .. F0 B0 F1 B1 F2 B2 F3 B3 .. .. ..

    Between neighbours a payload may take half the time of a forward and a backward, and the full rate still holds:

        makespan = (M + P - 1) * (t_F + t_B) + 2 * (P - 1) * latency if latency <= (t_F + t_B) / 2
        activations = min(2 * (P - w) - 1, M) if latency == 0
        activations <= min(2 * (P - w) - 1, M)
    """

    source = "Zhuang et al. 2022, arXiv:2211.05322 (1f1b_overlap_friendly); Jiang et al. 2023, DynaPipe"

    def in_flight(self, stage: int) -> int:
        return 2 * (self.num_stages - stage) - 1

    def after(self, a: Action) -> list[Action]:
        return [B(a.stage, a.microbatch - self.in_flight(a.stage))] if a.kind is F else []

    def slot(self, a: Action) -> int:
        if a.kind is F:
            return 2 * (a.microbatch + a.stage) + 1
        return 2 * (a.microbatch + 2 * self.num_stages - 1 - a.stage)

    def peak_activations(self, worker: int) -> int:
        return min(self.in_flight(worker), self.num_microbatches)
