"""Mixtures of experts over members: rows travel to the experts, or experts to the rows, as one rule says by expert.

GShard's gate (Lepikhin et al. 2021): the two best experts of a row, at most `capacity` rows an expert, others dropped,
and an auxiliary loss against uneven loads. Each member has microbatches and some experts of its own. The rules:

    rows     all rows visit their experts and come back, by two all-to-alls: GShard, FastMoE (He et al. 2021)
    weights  all experts are sent to the rows, and gradients back: Janus (Liu et al. 2023)
    hot      experts are sent if more rows than weights would travel: FasterMoE's shadow experts (He et al. 2022)

`homes` says which member has an expert: SmartMoE (Zhai et al. 2023) places experts by their loads, and a checkpoint of
one placement goes on with another. One expert gets all rows, and those of the gate add to it: DeepSpeed-MoE's residual
expert (Rajbhandari et al. 2022). Numbers that travel in a microbatch's forward and backward, for an expert with R rows
in all, and n members:

    rows     4 * R * width * (n - 1) / n        on average
    weights  2 * parameters of the expert * (n - 1)

python experts.py                                                            one process has all experts
rpc-pipe run experts.py --workers 4 --members 2 -- --ways rows weights hot   two stages of two members
"""

import argparse
from collections import Counter
from functools import partial

import torch
from torch import distributed, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd as exchange

from rpc_pipe import Pipeline, Training

WAYS = {
    "rows": lambda rows, weights: False,
    "weights": lambda rows, weights: True,
    "hot": lambda rows, weights: rows > weights,
}
HOMES = {"blocks": lambda expert, count, members: expert * members // count, "turns": lambda n, _, members: n % members}
went = Counter()  # how often rows went to an expert, and how often the expert to rows


def gate(logits, capacity, k=2):
    """Return experts and weights by row and choice, where weight 0 means dropped, and the auxiliary loss."""
    shares = logits.softmax(-1)
    weight, which = shares.topk(k, -1)
    weight = weight / weight.sum(-1, keepdim=True)
    chosen = nn.functional.one_hot(which.t().flatten(), logits.shape[-1])  # first choices of all rows, then second
    place = ((chosen.cumsum(0) - 1) * chosen).sum(-1).view(k, -1).t()
    first = nn.functional.one_hot(which[:, 0], logits.shape[-1]).float().mean(0)
    return which, weight * (place < capacity), logits.shape[-1] * (shares.mean(0) * first).sum()


class Expert(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x)))


class Gated(nn.Module):
    """Takes and hands on (rows, auxiliary loss so far); `compute` has the experts."""

    def __init__(self, width, count=4, capacity=1.25):
        super().__init__()
        self.gate, self.count, self.capacity, self.mesh = nn.Linear(width, count, bias=False), count, capacity, None

    def forward(self, given):
        x, aux = given
        which, weight, new = gate(self.gate(x), int(self.capacity * 2 * len(x) / self.count))
        rows, choice = weight.nonzero(as_tuple=True)
        order = which[rows, choice].argsort(stable=True)
        rows, choice = rows[order], choice[order]
        y = self.compute(x[rows], which[rows, choice].bincount(minlength=self.count))
        return x + torch.zeros_like(x).index_add(0, rows, y * weight[rows, choice][:, None]), aux + new

    def of_members(self, counts, mesh):
        """Return how many rows each member has for each expert."""
        table = [torch.empty_like(counts) for _ in range(mesh.size())]
        distributed.all_gather(table, counts, group=mesh.get_group())
        return torch.stack(table)


class Experts(Gated):
    def __init__(self, width=16, residual=False):
        super().__init__(width)
        self.experts = nn.ModuleDict({str(n): Expert(width) for n in range(self.count)})
        self.every = Expert(width) if residual else None

    def forward(self, given):
        x, aux = super().forward(given)
        return x if self.every is None else x + self.every(given[0]), aux

    def compute(self, x, counts):
        """Return outputs for rows that are sorted by expert."""
        parts = list(x.split(counts.tolist()))
        if self.mesh is None:
            return torch.cat([self.experts[str(n)](part) for n, part in enumerate(parts)])
        table = self.of_members(counts, self.mesh)  # alike on all members, and so are decisions by it
        sent = [n for n in range(self.count) if self.is_sent(int(table[:, n].sum()), x.shape[1])]
        went.update("experts" if n in sent else "rows" for n in range(self.count))
        done = self.visit(parts, table, sent)
        for n in sent:
            done[n] = torch.func.functional_call(self.blank, self.fetched(n), (parts[n],))
        return torch.cat([done[n] for n in range(self.count)])

    def is_sent(self, rows, width):
        size, weights = self.mesh.size(), sum(p.numel() for p in self.blank.parameters())
        return self.way(4 * rows * width * (size - 1) / size, 2 * weights * (size - 1))

    def visit(self, parts, table, sent):
        """Return outputs by expert: rows go to the experts that are not sent, and come back."""
        members, me, group = range(len(table)), self.mesh.get_local_rank(), self.mesh.get_group()
        homes = [[n for n in range(self.count) if self.homes[n] == m and n not in sent] for m in members]
        order = [n for home in homes for n in home]
        out, got = ([int(table[a][home].sum()) for a, home in pairs] for pairs in (
            [(me, home) for home in homes], [(m, homes[me]) for m in members]))  # fmt: skip
        rows = exchange(torch.cat([parts[n] for n in order] or [parts[0][:0]]), got, out, group)
        pieces = rows.split([int(table[m][n]) for m in members for n in homes[me]])
        mine = [self.experts[str(n)](torch.cat(pieces[i :: len(homes[me])])) for i, n in enumerate(homes[me])]
        split = [y.split(table[:, n].tolist()) for y, n in zip(mine, homes[me], strict=True)]
        back = exchange(torch.cat([y[m] for m in members for y in split] or [rows]), out, got, group)
        return dict(zip(order, back.split(table[me][order].tolist()), strict=True))

    def fetched(self, n):
        """Return the weights of an expert that may be another member's; gradients go back to it, added up."""
        owned = str(n) in self.experts
        named = (self.experts[str(n)] if owned else self.blank).named_parameters()
        return {k: From.apply(p if owned else p.detach().requires_grad_(), self.homes[n], self.mesh) for k, p in named}


class From(torch.autograd.Function):
    """A tensor of one member on all members."""

    @staticmethod
    def forward(ctx, tensor, home, mesh):
        ctx.home, ctx.group, found = home, mesh.get_group(), tensor.detach().clone()
        distributed.broadcast(found, group=ctx.group, group_src=home)
        return found

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone(memory_format=torch.contiguous_format)
        distributed.reduce(grad, group=ctx.group, group_dst=ctx.home)
        return grad, None, None


def divide(layer, mesh, way, homes):
    """Leave the experts that have their home here."""
    if isinstance(layer, Experts):
        layer.mesh, layer.way, layer.homes = mesh, way, [homes(n, layer.count, mesh.size()) for n in range(layer.count)]
        layer.__dict__["blank"] = Expert(layer.gate.in_features)  # no part of the model: its values are never used
        for n, home in enumerate(layer.homes):
            if home != mesh.get_local_rank():
                del layer.experts[str(n)]


class Begin(nn.Linear):
    def forward(self, x):
        return super().forward(x), x.new_zeros(())


def loss_fn(output, y):
    return nn.functional.mse_loss(output[0], y) + 0.01 * output[1]


def train(name, layers, shard, rows, steps):
    """Train, and print the last loss, the norm of its gradients, and the loss of an evaluation."""
    training = Training(partial(torch.optim.SGD, lr=0.5), max_grad_norm=0.4)
    shard.rows = rows
    went.clear()
    with Pipeline(layers, loss_fn, num_microbatches=4, shard=shard, training=training) as pipe:
        x = torch.randn(256, 16, generator=torch.Generator().manual_seed(0))
        while pipe.steps_done < steps:
            loss = pipe.step((x, x.flip(0)))
        told = f"{name}: loss {loss:.7f}, norm {pipe.grad_norm:.7f}, held out {pipe.evaluate((x, x)):.7f}"
        print(f"{told}; {went['rows']} times rows went to experts, {went['experts']} times experts to rows")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=["rows"])
    parser.add_argument("--homes", choices=HOMES, default="blocks")
    parser.add_argument("--steps", type=int, default=4)
    options = parser.parse_args()
    for name in options.ways:
        layers = [partial(Begin, 16, 16), partial(Experts, residual=True), Experts, Experts]
        shard = partial(divide, way=WAYS[name], homes=HOMES[options.homes])
        train(name, layers, shard, True, options.steps)


if __name__ == "__main__":
    main()
