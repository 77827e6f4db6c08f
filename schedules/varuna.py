"""Varuna: recompute everywhere but on the last stage, just before the gradient is needed."""

from ..dependency import Action, B, F, R, Spec


class Varuna(Spec):
    """Varuna: only stage inputs are kept; R runs while the next stage runs backward; the last stage keeps all.

        worker 0  F0 F1 F2 F3 .. .. R0 B0 .. R1 B1 .. R2 B2 R3 B3
        worker 1  .. F0 F1 F2 .. R0 B0 F3 R1 B1 .. R2 B2 R3 B3 ..
        worker 2  .. .. F0 F1 R0 B0 F2 R1 B1 F3 R2 B2 R3 B3 .. ..
        worker 3  .. .. .. F0 B0 F1 B1 F2 B2 .. F3 B3 .. .. .. ..

    No window on F, as only a forward's inputs are kept: forwards fill the time that a late gradient leaves free.

        activations = min(M, max(1, 3 * (P - 1 - w))) if t_B == 2 * t_F
        activations <= M
    """

    source = "Athlur et al. 2022, Varuna, arXiv:2111.04007, section 4; compared with generate_schedule.cc"
    recompute = True

    def recomputes(self, stage: int) -> bool:
        return stage < self.last_stage

    def after(self, a: Action) -> list[Action]:
        keeps = a.stage + 1 == self.last_stage
        return [(F if keeps else R)(a.stage + 1, a.microbatch)] if a.kind is R else []

    def slot(self, a: Action) -> int:
        if a.kind is F:
            return 4 * a.microbatch + a.stage
        return 4 * a.microbatch + self.num_stages + 3 * (self.last_stage - a.stage) + (a.kind is B)

    def peak_activations(self, worker: int) -> int:
        return self.num_microbatches
