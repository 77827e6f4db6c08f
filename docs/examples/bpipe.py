"""BPipe (Kim et al. 2023, ICML): early workers put activations into the memory of late ones, which have room.

In 1F1B worker s of P holds P - s microbatches, so the first one holds P and the last one 1. Here worker s of the first
half sends every second microbatch to its partner P - 1 - s, and takes it back before the backward. Each of the two then
holds about P / 2 + 1. Nothing of that is in the package: four kinds of actions, a schedule, four functions.

rpc-pipe simulate --schedule bpipe.py:BPipe --workers 8 --microbatches 12 --cost F=2,B=4,E=1,K=1,X=1,L=1
rpc-pipe compare  --schedule bpipe.py:BPipe --workers 8 --microbatches 12 --memory activations=64MB,copy=128MB
rpc-pipe verify mlp --schedule bpipe.py:BPipe --workers 8 --microbatches 12    compares it with one process
python bpipe.py --workers 4 --steps 3                                          trains with workers as threads
"""

import argparse
from functools import partial

import torch
from torch import nn

from rpc_pipe import B, F, Pipeline, Training
from rpc_pipe.dependency import Kind
from rpc_pipe.schedules import OneFOneB
from rpc_pipe.workers.handlers import carries_out
from rpc_pipe.workers.transport.payload import pack, unpack

# `holds` begins (1) or ends (-1) the life of a microbatch's activations on the device, which checker and planner count.
EVICT = Kind("E", "evict activations to the partner", resource="copy", holds=-1, colour="#aaaaaa")
KEEP = Kind("K", "keep the partner's activations", resource="copy", holds=1, colour="#bbbbbb")
GIVE = Kind("X", "give them back", resource="copy", holds=-1, colour="#cccccc")
LOAD = Kind("L", "take activations back", resource="copy", holds=1, colour="#dddddd")


class BPipe(OneFOneB):
    """1F1B in which partners share the activations that they hold."""

    def partner(self, stage):
        return self.last_stage - stage

    def evicts(self, stage, m):
        """Stage s holds P - s microbatches and its partner s + 1: of those that they share, every second one goes."""
        return stage < self.partner(stage) - 1 and m % 2 == 1

    def actions(self, s, m):
        if self.evicts(s, m):
            return F(s, m), EVICT(s, m), LOAD(s, m), B(s, m)
        if s > self.partner(s) + 1 and self.evicts(self.partner(s), m):
            return F(s, m), B(s, m), KEEP(s, m), GIVE(s, m)
        return F(s, m), B(s, m)

    # A payload usually goes to a neighbour, as its kind says. These go to the partner.
    def origin(self, a):
        kind = {KEEP: EVICT, LOAD: GIVE}.get(a.kind)
        return kind(self.partner(a.stage), a.microbatch) if kind else super().origin(a)

    def successors(self, a, *more):
        kind = {EVICT: KEEP, GIVE: LOAD}.get(a.kind)
        return [kind(self.partner(a.stage), a.microbatch)] if kind else super().successors(a, *more)

    def moved(self, a):
        return self.partner(a.stage) if a.kind in (KEEP, GIVE) else a.stage

    # Memory is bounded by edges: a forward waits until an earlier microbatch has left, a load for the backward before.
    def after(self, a):
        s, m = a.stage, a.microbatch
        if a.kind is F:
            late = [EVICT(s, n) for n in (m - 1, m - 2) if self.evicts(s, n)][-1:]
            return [*super().after(a), *(e for e in late if m - e.microbatch == 2 or self.num_workers - s < 4)]
        if a.kind is GIVE:
            return [B(s, min(self.until(s, m), self.num_microbatches - 1))]
        return [B(s, m - 1)] if a.kind is LOAD else []

    def until(self, s, m):
        """Return the last microbatch whose backward the partner runs before it gives back m: no sooner than needed."""
        return m + (s - self.partner(s) - 1) // 2

    def slot(self, a):
        base, shift = {EVICT: (F, 1), KEEP: (B, 2), LOAD: (B, -2), GIVE: (B, 3)}.get(a.kind, (a.kind, 0))
        m = self.until(a.stage, a.microbatch) if a.kind is GIVE else a.microbatch
        return 8 * super().slot(base(a.stage, m)) + shift

    def peak_activations(self, worker):
        """The checker proves it for any timing; while copies keep up, the first worker holds P / 2 + 1."""
        return self.num_workers // 2 + 2


evicted, kept = {}, {}  # (shard, microbatch) -> addresses of the shard's weights; payload of the partner


@carries_out(EVICT)
def evict(ctx):
    """Send all that the forward has saved, except weights; autograd holds empty tensors meanwhile."""
    weights, gone = {p.untyped_storage().data_ptr() for p in ctx.task.shard.parameters()}, []

    def take(tensor):
        if tensor.untyped_storage().data_ptr() in weights:
            return tensor
        gone.append(tensor)
        return tensor.new_empty(0)

    ctx.task.shard.saved(ctx.microbatch).replace(take)
    evicted[ctx.task.shard, ctx.microbatch] = weights
    return pack(gone)


@carries_out(KEEP)
def keep(ctx):
    """Hold the payload of the partner."""
    kept[ctx.task.shard, ctx.microbatch] = ctx.source()


@carries_out(GIVE)
def give(ctx):
    """Send it back."""
    return kept.pop((ctx.task.shard, ctx.microbatch))


@carries_out(LOAD)
def load(ctx):
    """Let autograd hold the tensors again."""
    weights, back = evicted.pop((ctx.task.shard, ctx.microbatch)), iter(unpack(ctx.source()))
    saved = ctx.task.shard.saved(ctx.microbatch)
    saved.replace(lambda t: t if t.untyped_storage().data_ptr() in weights else next(back))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)) for _ in range(options.workers)]
    pipe = Pipeline(
        blocks, nn.functional.mse_loss, training=Training(partial(torch.optim.AdamW, lr=1e-2)),
        schedule=BPipe, num_workers=options.workers, num_microbatches=2 * options.workers,
    )  # fmt: skip
    x = torch.randn(8 * options.workers, 8)
    for _ in range(options.steps):
        print(f"loss {pipe.step((x, x.flip(1))):.4f}")
