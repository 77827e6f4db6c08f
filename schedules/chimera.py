"""Chimera: two pipelines in opposite directions over the same workers."""

from typing import Literal

from ..dependency import Action, B, F, Order, ScheduleError, Spec


class Chimera(Spec):
    """Chimera: microbatches go down and up the workers; half of 1F1B's bubble for a second copy of the weights.

        worker 0  F0 F1 .. F2 B2 F3 B3 B0 .. B1
        worker 1  .. F0 F2 F1 F3 B2 B0 B3 B1 ..
        worker 2  .. F2 F0 F3 F1 B0 B2 B1 B3 ..
        worker 3  F2 F3 .. F0 B0 F1 B1 B2 .. B3

    Units of P microbatches, half in each direction (`pairs`: that many rotated pairs of directions), follow each
    other as workers get free. The gradients of the replicas of a stage are summed before the update. `scale` says how
    more than P microbatches are arranged: units one after another, or two forwards to one backward, which suits a
    backward of twice a forward's time and doubles the activations; backward-halving is that with microbatches of half
    the size. `group` is 2 where forwards are doubled, else 1.

        makespan = (2 * M + P / pairs - 2) * t_F if t_F == t_B and M % P == P % 2 == 0 and group == 1
        activations = min(w + 1, P - w) + P / 2 if t_F == t_B and M % P == P % 2 == 0 and group == pairs == 1
        makespan = (3 * M + 3 * P / 2 - 3) * t_F if 2 * t_F == t_B and M % (2 * P) == P % 2 == 0 and group == 2
        activations = 2 * min(w + 1, P - w) + P if 2 * t_F == t_B and M % (2 * P) == P % 2 == 0 and group == 2
    """

    source = "Li and Hoefler 2021, Chimera, arXiv:2107.06925, sections 3.1 to 3.5"
    pairs: int = 1
    scale: Literal["direct-concat", "forward-doubling", "backward-halving"] = "direct-concat"

    def __post_init__(self) -> None:
        super().__post_init__()
        P, pairs = self.num_workers, self.pairs
        if pairs < 1 or (pairs > 1 and P % (2 * pairs)):
            fits = [n for n in range(1, P // 2 + 1) if P % (2 * n) == 0] or [1]
            raise ScheduleError(f"pairs {pairs}: must be {' or '.join(map(str, fits))} for {P} workers")

    @property
    def order(self) -> Order:
        return "fixed" if self.scale == "direct-concat" else "ready"

    @property
    def num_routes(self) -> int:
        return min(2 * self.pairs, self.num_workers)  # a single worker has one direction

    def place(self, stage: int, route: int) -> int:
        turned = route // 2 * (self.num_workers // self.pairs)
        return (turned + (stage if route % 2 == 0 else self.last_stage - stage)) % self.num_workers

    @property
    def group(self) -> int:  # how many microbatches go through a stage as one forward
        return 1 if self.scale == "direct-concat" else 2

    def locate(self, microbatch: int) -> tuple[int, int, int]:
        """Return the unit of a microbatch, its route and its position there."""
        unit, i = divmod(microbatch // self.group, self.num_workers)
        share = -(-self.num_workers // self.num_routes)
        return unit, i // share, i % share

    def route(self, microbatch: int) -> int:
        return self.locate(microbatch)[1]

    def after(self, a: Action) -> list[Action]:
        earlier = a.microbatch - self.group * self.num_workers
        return [B(a.stage, earlier // self.group * self.group + self.group - 1)] if a.kind is F else []

    def slot(self, a: Action) -> int:
        D = self.num_workers
        unit, route, i = self.locate(a.microbatch)
        nominal = 2 * (D * unit + i) + (a.stage if a.kind is F else 2 * D - 1 - a.stage)
        return (nominal * self.num_routes + route) * self.group + a.microbatch % self.group

    def peak_activations(self, worker: int) -> int:
        window = self.group * -(-self.num_workers // self.num_routes)
        return len(self.hosted(worker)) * min(self.num_microbatches, window)
