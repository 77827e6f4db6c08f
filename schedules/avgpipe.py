"""AvgPipe: several pipelines with separate weights on the same workers, averaged elastically."""

from ..dependency import Action, B, ConfigError, U
from .one_f_one_b import OneFOneB


class AvgPipe(OneFOneB):
    """AvgPipe: pipelines that fill each other's flush, with separate weights pulled to a common reference.

    A step's microbatches go to the pipelines in turn, as blocks: while one drains and updates, the next is under way.
    There is no bubble if the other pipelines have P - 1 microbatches. Timeline (P=4, M=4, 2 pipelines) without updates:

        worker 0  F0 F1 F2 F3 .. .. .. B0 .. B1 .. B2 .. B3
        worker 1  .. F0 F1 F2 .. .. B0 F3 B1 .. B2 .. B3 ..
        worker 2  .. .. F0 F1 .. B0 F2 B1 F3 B2 .. B3 .. ..
        worker 3  .. .. .. F0 B0 F1 B1 F2 B2 F3 B3 .. .. ..

        makespan = (M + P - 1) * (t_F + t_B)
        activations <= P - w

    Each pipeline is synchronous in itself. After its update x moves by a (r - x) and the reference r by a (x - r), with
    a = pull / pipelines, stage by stage and pipeline by pipeline, as in asynchronous elastic averaging; the reference
    is evaluated and saved. The paper's constants and the order of blocks are reconstructed.
    """

    source = "Chen et al. 2023, Elastic Averaging for Efficient Pipelined DNN Training, PPoPP; Zhang et al. 2015, EASGD"
    synchronous = False
    pipelines: int = 2
    pull: float = 0.9

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.pipelines < 1 or not 0 < self.pull < self.pipelines:
            raise ConfigError(f"pipelines {self.pipelines}, pull {self.pull}: pull must be above 0 and below pipelines")

    @property
    def num_routes(self) -> int:
        return self.pipelines

    @property
    def averaging_pull(self) -> float:
        return self.pull / self.pipelines

    def route(self, microbatch: int) -> int:
        M = self.num_microbatches
        return microbatch % M * min(self.pipelines, M) // M

    def slot(self, a: Action) -> int:
        M, N = self.num_microbatches, self.pipelines
        if a.kind is U:
            step, route = divmod(a.index, N)
            last = -(-min(route + 1, M) * M // min(N, M)) - 1
            return self.slot(B(a.stage, step * M + min(last, M - 1))) + 1 + route
        stop = max(0, -(-M // N) + self.num_stages - 1 - M)  # the next block waits for the last backward
        return (N + 1) * super().slot(a._replace(index=a.index + a.index // M * stop))

    def peak_activations(self, worker: int) -> int:
        return self.in_flight(worker)
