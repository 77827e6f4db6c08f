"""1F1B: one forward, one backward, with as few microbatches in flight as keep the pipeline full."""

from ..dependency import Action, B, ConfigError, F, Spec


class OneFOneB(Spec):
    """1F1B: GPipe's time with the activations of only P-s microbatches on stage s.

    Stage s starts a forward only if fewer than P-s of its microbatches wait for their backward.

        worker 0  F0 F1 F2 F3 .. .. .. B0 .. B1 .. B2 .. B3
        worker 1  .. F0 F1 F2 .. .. B0 F3 B1 .. B2 .. B3 ..
        worker 2  .. .. F0 F1 .. B0 F2 B1 F3 B2 .. B3 .. ..
        worker 3  .. .. .. F0 B0 F1 B1 F2 B2 F3 B3 .. .. ..

        makespan = (M + P - 1) * (t_F + t_B)
        bubble = (P - 1) / (M + P - 1)
        activations = min(P - w, M) if not window
        activations <= min(window - w, M) if window

    `window` is the bound on microbatches in flight on stage 0 (default P), one less on each later stage: a wider
    one buys tolerance of late arrivals with memory.
    """

    source = "Narayanan et al. 2021, PipeDream-flush, arXiv:2006.09503, section 3; Fan et al. 2021, DAPPLE"
    window: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.window is not None and self.window < self.num_workers:
            raise ConfigError(f"window {self.window}: must be at least {self.num_workers}, the number of workers")

    def in_flight(self, stage: int) -> int:
        return (self.window or self.num_workers) - stage

    def after(self, a: Action) -> list[Action]:
        return [B(a.stage, a.microbatch - self.in_flight(a.stage))] if a.kind is F else []

    def slot(self, a: Action) -> int:
        P = self.num_stages
        return 2 * a.microbatch + (a.stage if a.kind is F else 2 * P - 1 - a.stage)

    def peak_activations(self, worker: int) -> int:
        return min(self.in_flight(worker), self.num_microbatches)
