"""Interleaved 1F1B: several stages on each worker, so that the bubble shrinks."""

from ..dependency import Action, B, F, Kind, Spec


class Interleaved(Spec):
    """Interleaved 1F1B: `chunks` stages on each worker; a smaller bubble for more messages.

        worker 0  F0 F1 F0 F1 .. B0 .. B1 B0 B1
        worker 1  .. F0 F1 F0 B0 F1 B1 B0 B1 ..

    (P=2, M=2, two chunks.) Counting a worker's own forwards and backwards, forward k waits for a backward: the
    bound is on the worker, not on each of its stages. Made for M a multiple of P; otherwise the last group of P has
    holes. In times and activations of a stage:

        makespan = (chunks * M + P - 1) * (t_F + t_B) if M % P == 0
        bubble = (P - 1) / (chunks * M + P - 1) if M % P == 0
        activations = min(chunks * M, 2 * (P - 1 - w) + (chunks - 1) * P + 1) if M % P == 0
        activations <= min(chunks * M, 2 * (P - 1 - w) + (chunks - 1) * P + 1)
    """

    source = "Narayanan et al. 2021, Megatron-LM, arXiv:2104.04473, section 2.2"
    chunks: int = 2

    @property
    def num_stages(self) -> int:
        return self.chunks * self.num_workers

    def ordinal(self, a: Action) -> int:
        """Return how many actions of its kind the worker runs before `a`."""
        P, chunk = self.num_workers, a.stage // self.num_workers
        turn = chunk if a.kind is F else self.chunks - 1 - chunk
        return (a.microbatch // P * self.chunks + turn) * P + a.microbatch % P

    def at(self, kind: Kind, worker: int, ordinal: int) -> Action:
        """Return the action of `kind` with this ordinal."""
        turns, i = divmod(ordinal, self.num_workers)
        block, turn = divmod(turns, self.chunks)
        chunk = turn if kind is F else self.chunks - 1 - turn
        return kind(chunk * self.num_workers + worker, block * self.num_workers + i)

    def latest(self, kind: Kind, worker: int, ordinal: int) -> list[Action]:
        """Return the last action of `kind` up to `ordinal`: the last group of P microbatches may not be full."""
        while ordinal >= 0:
            action = self.at(kind, worker, ordinal)
            if action.microbatch < self.num_microbatches:
                return [action]
            ordinal -= 1
        return []

    def ahead(self, worker: int) -> int:
        """Return how many forwards a worker runs before its first backward, less one."""
        return 2 * (self.num_workers - 1 - worker) + (self.chunks - 1) * self.num_workers

    def after(self, a: Action) -> list[Action]:
        worker, k = a.stage % self.num_workers, self.ordinal(a)
        needs = self.latest(a.kind, worker, k - 1)
        if a.kind is F:
            needs += self.latest(B, worker, k - self.ahead(worker) - 1)
        return needs

    def slot(self, a: Action) -> int:
        worker, k = a.stage % self.num_workers, self.ordinal(a)
        if a.kind is F:
            return 2 * (k + worker)
        return 2 * (k + worker + self.ahead(worker)) + 1

    def peak_activations(self, worker: int) -> int:
        return min(self.chunks * self.num_microbatches, self.ahead(worker) + 1)
