"""Mobius (Feng et al. 2023, ASPLOS): a worker has more stages than its device has room for.

Weights wait in host memory. Those of a stage are loaded on the lane `copy` while a stage before it computes: once for
all forwards of a step, and again for all backwards. Of the stages of a worker `ahead` have their weights on the device
at most: `peak_weights` says so, and the checker proves it for any timing. Updates are made in host memory.

rpc-pipe simulate --schedule mobius.py:Mobius --workers 4 --cost F=1,B=2,M=2,O=2,Y=2,Z=2
rpc-pipe compare  --schedule mobius.py:Mobius --workers 4 --memory weights=8GB,copy=4GB
rpc-pipe verify mlp --schedule mobius.py:Mobius --set visits=2 --workers 2      compares it with one process
python mobius.py --workers 2 --steps 3                                          trains with workers as threads
"""

import argparse
import threading
from functools import partial
from weakref import WeakKeyDictionary

import torch
from torch import nn

from rpc_pipe import B, F, Pipeline, Spec, Training
from rpc_pipe.dependency import Kind
from rpc_pipe.workers.handlers import carries_out

# `holds` begins (1) or ends (-1) the life on the device of what a kind `moves`, which checker and planner count.
LOAD = Kind("M", "load weights", resource="copy", holds=1, moves="weights", colour="#dddddd")
DROP = Kind("O", "drop weights", resource="copy", holds=-1, moves="weights", colour="#aaaaaa")
AGAIN = Kind("Y", "load weights again", resource="copy", holds=1, moves="weights", colour="#cccccc")
DONE = Kind("Z", "drop weights after backward", resource="copy", holds=-1, moves="weights", colour="#bbbbbb")


class Mobius(Spec):
    """GPipe over `visits` stages a worker, of which `ahead` have their weights on the device or on their way there."""

    visits: int = 3
    ahead: int = 2

    @property
    def num_stages(self):
        return self.visits * self.num_workers

    def place(self, stage, route):
        return stage % self.num_workers

    def stays(self, stage):
        """Return whether the weights stay from the last forward to the first backward."""
        return stage >= self.num_stages - self.ahead * self.num_workers

    def actions(self, s, m):
        first, last = m == 0, m == self.num_microbatches - 1
        between = () if self.stays(s) else ((DROP(s, m),) * last + (AGAIN(s, m),) * first)
        return (LOAD(s, m),) * first + (F(s, m), *between, B(s, m)) + (DONE(s, m),) * last

    def after(self, a):
        s, last, far = a.stage, self.num_microbatches - 1, self.ahead * self.num_workers
        every = range(self.num_microbatches)
        if a.kind is F:
            return [LOAD(s, 0)]
        if a.kind is B:
            return [F(s, n) for n in every] if self.stays(s) else [AGAIN(s, 0)]
        if a.kind is DROP:
            return [F(s, n) for n in every]
        if a.kind is DONE:
            return [B(s, n) for n in every]
        if a.kind is AGAIN:  # the worker's stage behind those that are ahead has ended, and this one has been dropped
            return [DROP(s, last), DONE(s + far, last)]
        return [DROP(s - far, last)] if s >= far else []

    def peak_weights(self, worker):
        return min(self.ahead, self.visits)


class Weights:
    """The weights of a shard: on the device, or in host memory, where whoever reads them finds them."""

    most, now = 0, 0  # bytes on devices, of all shards of this process

    def __init__(self, shard):
        self.lock, self.parameters, self.there = threading.Lock(), list(shard.parameters()), True
        self.device = [p.data for p in self.parameters]
        self.host = [torch.empty_like(p, device="cpu") for p in self.parameters]
        self.size = sum(p.nbytes for p in self.parameters)
        if shard.optimizer is not None:
            shard.optimizer.register_step_pre_hook(lambda *_: self.begin_update())
        self.count(1)

    def count(self, way):
        Weights.now += way * self.size
        Weights.most = max(Weights.most, Weights.now)

    def drop(self):
        """Copy the weights into host memory, and free those of the device, which autograd's graph still names."""
        with self.lock:
            if self.there:
                for p, device, host in zip(self.parameters, self.device, self.host, strict=True):
                    host.copy_(device)
                    device.untyped_storage().resize_(0)
                    p.data = host
                self.there = False
                self.count(-1)

    def load(self):
        """Copy the weights into the same memory of the device, where autograd's graph expects them."""
        with self.lock:
            if not self.there:
                for p, device, host in zip(self.parameters, self.device, self.host, strict=True):
                    device.untyped_storage().resize_(device.nbytes)
                    device.copy_(host)
                    p.data = device
                self.there = True
                self.count(1)

    def begin_update(self):
        """Update the weights in host memory, with gradients there."""
        self.drop()
        for p in self.parameters:
            p.grad = p.grad if p.grad is None else p.grad.to(p.device)


weights, making = WeakKeyDictionary(), threading.Lock()


def of(shard):
    with making:
        return weights.get(shard) or weights.setdefault(shard, Weights(shard))


@carries_out(LOAD)
@carries_out(AGAIN)
def load(ctx):
    """Load the weights of a stage; the first load drops what an evaluation has left."""
    if ctx.task.entry.action.stage < ctx.step.batch.spec.num_workers:
        for shard in ctx.worker.shards.values():
            of(shard).drop()
    of(ctx.task.shard).load()


@carries_out(DROP)
@carries_out(DONE)
def drop(ctx):
    """Drop the weights of a stage."""
    of(ctx.task.shard).drop()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)) for _ in range(4 * options.workers)]
    pipe = Pipeline(
        blocks, nn.functional.mse_loss, training=Training(partial(torch.optim.AdamW, lr=1e-2)),
        schedule=Mobius, schedule_options={"visits": 4}, num_workers=options.workers, num_microbatches=4,
    )  # fmt: skip
    x = torch.randn(32, 8)
    for _ in range(options.steps):
        print(f"loss {pipe.step((x, x.flip(1))):.4f}")
    print(f"weights on devices: at most {Weights.most} of {sum(each.size for each in weights.values())} bytes")
