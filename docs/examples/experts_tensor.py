"""Experts whose matrices are divided, too: DeepSpeed-TED (Singh et al. 2023), members as a mesh of experts x tensors.

Each expert is tensor-parallel along `tp`, and experts are divided along `ep`. Experts are stacked, so a DTensor tells
which member has what. Rows differ along `ep` alone: `shard.rows = 2` parts, of which neighbours compute the same.

python experts_tensor.py                                    one process has all experts
rpc-pipe run experts_tensor.py --workers 4 --members 4      one stage of 2 x 2 members
"""

import argparse
from functools import cache, partial

import torch
from experts import Begin, Gated, exchange, train
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

grid = cache(lambda kind, shape: init_device_mesh(kind, shape, mesh_dim_names=("ep", "tp")))


class Stacked(Gated):
    def __init__(self, width=16):
        super().__init__(width)
        self.up = nn.Parameter(torch.randn(self.count, width, 2 * width) / 4)
        self.down = nn.Parameter(torch.randn(self.count, 2 * width, width) / 6)
        self.bias = nn.Parameter(torch.zeros(self.count, width))

    def compute(self, x, counts):
        """Return outputs for rows that are sorted by expert; members along `ep` have experts in their order."""
        if self.mesh is None:
            weights = zip(x.split(counts.tolist()), self.up, self.down, self.bias, strict=True)
            return torch.cat([torch.tanh(part @ up) @ down + bias for part, up, down, bias in weights])
        ep = self.mesh["ep"]
        here = self.of_members(counts, ep).chunk(ep.size(), 1)[ep.get_local_rank()]  # rows by member and expert here
        out, got = counts.view(ep.size(), -1).sum(1).tolist(), here.sum(1).tolist()
        pieces = exchange(x, got, out, ep.get_group()).split(here.flatten().tolist())
        weights = zip(*(p.to_local() for p in (self.up, self.down, self.bias)), strict=True)
        done = [self.divided(torch.cat(pieces[i :: here.shape[1]]), *w) for i, w in enumerate(weights)]
        split = [y.split(here[:, i].tolist()) for i, y in enumerate(done)]
        return exchange(torch.cat([y[m] for m in range(ep.size()) for y in split]), out, got, ep.get_group())

    def divided(self, x, up, down, bias):
        """Return one expert's output, added up along `tp`; so is the gradient of its rows."""
        tp = self.mesh["tp"]
        x = DTensor.from_local(x, tp, [Replicate()]).to_local(grad_placements=[Partial()])
        return DTensor.from_local(torch.tanh(x @ up) @ down, tp, [Partial()]).full_tensor() + bias


def divide(layer, members):
    if isinstance(layer, Stacked):
        layer.mesh = grid(members.device_type, (2, members.size() // 2))
        for name, cut in (("up", Shard(2)), ("down", Shard(1)), ("bias", Replicate())):
            whole = getattr(layer, name).detach()
            part = distribute_tensor(whole, layer.mesh, [Shard(0), cut], src_data_rank=None)
            setattr(layer, name, nn.Parameter(part))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=4)
    train("ted", [partial(Begin, 16, 16), Stacked, Stacked], divide, 2, parser.parse_args().steps)


if __name__ == "__main__":
    main()
