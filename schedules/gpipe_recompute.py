"""GPipe with re-materialisation: keep stage inputs only, compute activations a second time."""

from ..dependency import Action, B, ConfigError, F, R
from .gpipe import GPipe


class GPipeRecompute(GPipe):
    """GPipe with recompute: M stage inputs and the activations of one microbatch, for one more forward each.

    R waits for the backward before it, not for the gradient: it fills the bubble and one microbatch is alive.

        worker 0  F0 F1 F2 F3 R3 .. .. .. .. .. .. B3 R2 B2 R1 B1 R0 B0
        worker 1  .. F0 F1 F2 F3 R3 .. .. .. .. B3 R2 B2 R1 B1 R0 B0 ..
        worker 2  .. .. F0 F1 F2 F3 R3 .. .. B3 R2 B2 R1 B1 R0 B0 .. ..
        worker 3  .. .. .. F0 F1 F2 F3 R3 B3 R2 B2 R1 B1 R0 B0 .. .. ..

        makespan = (M + P - 1) * (t_F + t_B) + M * t_R if keep == 0 and t_R <= t_B
        activations = M

    The last `keep` stages keep their activations instead.
    """

    source = "Huang et al. 2019, GPipe, arXiv:1811.06965, section 2.3; Chen et al. 2016, arXiv:1604.06174"
    recompute = True
    keep: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.keep <= self.num_workers:
            raise ConfigError(f"keep {self.keep}: must be from 0 to the number of stages, {self.num_workers}")

    def recomputes(self, stage: int) -> bool:
        return stage < self.num_stages - self.keep

    def after(self, a: Action) -> list[Action]:
        if a.kind is F:
            return []
        last, turn = self.num_microbatches - 1, self.turn(a.microbatch)
        flush = [F(a.stage, last)]
        return flush if turn == 0 or a.kind is B else [*flush, B(a.stage, self.turn(turn - 1))]

    def slot(self, a: Action) -> int:
        if a.kind is F:
            return a.microbatch + a.stage
        start = self.num_microbatches + self.num_stages + 2 * (self.last_stage - a.stage)
        return start + 2 * self.turn(a.microbatch) + (a.kind is not R)
