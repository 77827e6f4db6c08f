"""Looped breadth-first: all microbatches through one stage before the worker's next stage."""

from typing import Literal

from ..dependency import Action, B, F, Spec


class LoopedBFS(Spec):
    """Looped BFS: interleaved placement, all microbatches through a stage before the next stage.

        worker 0  F0 F1 F0 F1 .. .. B1 B0 B1 B0
        worker 1  .. F0 F1 F0 F1 B1 B0 B1 B0 ..

    (P=2, M=2, two chunks.) Weights sharded over replicas are gathered once a stage and pass, not once a
    microbatch. In times and activations of a stage:

        makespan = (chunks * M + P - 1) * (t_F + t_B) if M >= P
        activations = chunks * M
    """

    source = "Lamy-Poirier 2023, Breadth-First Pipeline Parallelism, arXiv:2211.05953"
    chunks: int = 2
    b_order: Literal["descending", "ascending"] = "descending"

    @property
    def num_stages(self) -> int:
        return self.chunks * self.num_workers

    def after(self, a: Action) -> list[Action]:
        in_last_chunk = a.stage >= self.num_stages - self.num_workers
        return [F(a.stage, self.num_microbatches - 1)] if a.kind is B and in_last_chunk else []

    def slot(self, a: Action) -> int:
        P, M = self.num_workers, self.num_microbatches
        chunk, worker = divmod(a.stage, P)
        stride = max(M, P)  # the first microbatch returns to worker 0 after P slots at the earliest
        if a.kind is F:
            return chunk * stride + a.microbatch + worker
        turn = M - 1 - a.microbatch if self.b_order == "descending" else a.microbatch
        return 2 * (self.chunks - 1) * stride - chunk * stride + M + 2 * (P - 1) + turn - worker

    def peak_activations(self, worker: int) -> int:
        return self.chunks * self.num_microbatches
