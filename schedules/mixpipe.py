"""MixPipe, as we read its abstract: Chimera whose directions may run further ahead."""

from ..dependency import Action, B, ConfigError, F, Order
from .chimera import Chimera


class MixPipe(Chimera):
    """MixPipe (our reading of its abstract): Chimera with a free window in each direction.

        worker 0  F0 F1 .. F2 B2 F3 B3 B0 .. B1
        worker 1  .. F0 F2 F1 F3 B2 B0 B3 B1 ..
        worker 2  .. F2 F0 F3 F1 B0 B2 B1 B3 ..
        worker 3  F2 F3 .. F0 B0 F1 B1 B2 .. B3

    `window` microbatches of a direction may be in flight on a stage (default P; Chimera has half of that): fewer
    bubbles between units for more activations.

        activations <= 2 * min(P, M) if not window
        activations <= 2 * min(window, M) if window
    """

    source = "Zhang et al. 2023, MixPipe, DAC 2023 (abstract only; not compared with the authors' tables)"
    window: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        least = -(-self.num_workers // self.num_routes)
        if self.scale != "direct-concat":
            raise ConfigError(f"scale {self.scale}: mixpipe has a window instead; only direct-concat")
        if self.window is not None and self.window < least:
            raise ConfigError(f"window {self.window}: mixpipe on {self.num_workers} workers needs at least {least}")

    @property
    def order(self) -> Order:
        return "ready"  # in fixed order it is Chimera

    def after(self, a: Action) -> list[Action]:
        unit, route, i = self.locate(a.microbatch)
        share = -(-self.num_workers // self.num_routes)
        here = self.num_workers - share * route if route == self.num_routes - 1 else share  # odd P: fewer on the last
        earlier, j = divmod(unit * here + i - (self.window or self.num_workers), here)
        return [B(a.stage, earlier * self.num_workers + route * share + j)] if a.kind is F else []

    def peak_activations(self, worker: int) -> int:
        return len(self.hosted(worker)) * min(self.num_microbatches, self.window or self.num_workers)
