"""Tensor parallelism in one to three dimensions: one linear layer of four moves, and a table of five rows.

`y = x @ w` is divided over members by four moves, each along an axis of their mesh: gather x, gather w, multiply, and
scatter the sum y. A row of WAYS says which axis cuts or moves what. Backward follows, as a gather and a scattered sum
are each other's backward. The rows: FSDP (Zhao et al. 2023), Megatron-LM with sequence parallelism (Korthikanti et al.
2022), Optimus (Xu et al. 2021), Tesseract (Wang et al. 2021), 3D (Bian et al. 2021, after Agarwal et al. 1995).

Numbers that a member receives in the forward of a layer of R rows from h to k columns, and as many in its backward, by
n members, a mesh of side q, and d = n / q**2:

    fsdp   (n - 1) / n * h * k
    1d     (n - 1) / n * R * h      in the second of two layers k instead of h
    2d     (q - 1) / q * (R * h + h * k) / q
    2.5d   (q - 1) / q * (R * h / d + h * k) / q
    3d     (q - 1) / q * (R * h + h * k + R * k) / q**2

A member holds 1 / n of activations between layers, and 1 / n of weights, gradients and optimizer states (2.5d: d / n).

python linear_nd.py                                                      in one process, undivided
rpc-pipe run linear_nd.py --workers 8 --members 4 -- --ways fsdp 1d 2d   two stages of four members
rpc-pipe run linear_nd.py --workers 8 --members 8 -- --ways 2.5d 3d
"""

import argparse
import logging
from collections import Counter
from functools import cache, partial
from typing import NamedTuple

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from rpc_pipe import Pipeline, Training


class Moves(NamedTuple):
    w_in: str  # axes that cut the rows and the columns of w
    w_out: str
    gather_x: tuple = ()  # dimension and axis
    gather_w: str = ""
    scatter_y: str = ""


class Way(NamedTuple):
    axes: str  # of the mesh, a letter each
    rows: str  # axes that cut rows and columns of activations between layers
    columns: str
    first: Moves
    second: Moves  # of the layers in `Block.second`, which hand on to the residual


_FSDP, _2D = Moves("t", "", gather_w="t"), Moves("i", "j", (-1, "j"), "i")
WAYS = {
    "fsdp": Way("t", "t", "", _FSDP, _FSDP),
    "1d": Way("t", "t", "", Moves("", "t", (0, "t")), Moves("t", "", scatter_y="t")),
    "2d": Way("ij", "i", "j", _2D, _2D),
    "2.5d": Way("dij", "di", "j", _2D, _2D),
    "3d": Way("cba", "ab", "c", Moves("ca", "b", (0, "b"), "a", "c"), Moves("ba", "c", (0, "c"), "a", "b")),
}
logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)  # it advises one collective along two axes
received = Counter()  # numbers that a member has received in linear layers
grid = cache(lambda kind, shape, axes: init_device_mesh(kind, shape, mesh_dim_names=tuple(axes)))


def gathered(part, dim, mesh, when):
    part = part.contiguous()
    parts = [torch.empty_like(part) for _ in range(mesh.size())]
    distributed.all_gather(parts, part, group=mesh.get_group())
    received[when] += part.numel() * (mesh.size() - 1)
    return torch.cat(parts, dim)


def scattered(summand, dim, mesh, when):
    parts = [part.contiguous() for part in summand.chunk(mesh.size(), dim)]
    part = torch.empty_like(parts[0])
    distributed.reduce_scatter(part, parts, group=mesh.get_group())
    received[when] += part.numel() * (mesh.size() - 1)
    return part


class Move(torch.autograd.Function):
    """Gathers, or scatters a sum, along an axis; backward does the other one."""

    @staticmethod
    def forward(ctx, x, dim, mesh, way, back):
        ctx.back = partial(back, dim=dim, mesh=mesh, when="backward")
        return way(x, dim, mesh, "forward")

    @staticmethod
    def backward(ctx, grad):
        return ctx.back(grad), None, None, None, None


def gather(x, dim, mesh):
    return Move.apply(x, dim, mesh, gathered, scattered)


def scatter(x, dim, mesh):
    return Move.apply(x, dim, mesh, scattered, gathered)


def cuts(mesh, *axes_and_dims):
    """Return what a DTensor calls placements: each axis of the mesh cuts a dimension, or none."""
    return [next((Shard(dim) for axes, dim in axes_and_dims if a in axes), Replicate()) for a in mesh.mesh_dim_names]


def parameter(whole, mesh, *axes_and_dims):
    """Return a member's part; a DTensor tells its layout to norms, checkpoints and sums of gradients."""
    return nn.Parameter(distribute_tensor(whole.detach(), mesh, cuts(mesh, *axes_and_dims), src_data_rank=None))


def here(whole):
    """Return the part that is here; members that hold the same part have a summand each of its gradient."""
    return whole.to_local(grad_placements=[p if p.is_shard() else Partial() for p in whole.placements])


class Linear(nn.Module):
    def __init__(self, linear, mesh, moves):
        super().__init__()
        self.mesh, self.moves = mesh, moves
        self.weight = parameter(linear.weight, mesh, (moves.w_out, 0), (moves.w_in, 1))
        self.bias = parameter(linear.bias, mesh, (moves.w_out, 0))

    def forward(self, x):
        moves, w = self.moves, here(self.weight)
        if moves.gather_x:
            x = gather(x, moves.gather_x[0], self.mesh[moves.gather_x[1]])
        y = x @ (gather(w, 1, self.mesh[moves.gather_w]) if moves.gather_w else w).t()
        return (scatter(y, 0, self.mesh[moves.scatter_y]) if moves.scatter_y else y) + here(self.bias)


class Norm(nn.Module):
    """A layer norm of some rows and, if an axis cuts them, of some columns."""

    def __init__(self, norm, mesh, columns):
        super().__init__()
        self.mesh, self.eps, self.width = mesh[columns] if columns else None, norm.eps, norm.normalized_shape[0]
        self.weight, self.bias = (parameter(p, mesh, (columns, 0)) for p in (norm.weight, norm.bias))

    def mean(self, x):
        total = x.sum(-1, keepdim=True)
        if self.mesh is not None:
            total = DTensor.from_local(total, self.mesh, [Partial()]).full_tensor(grad_placements=[Partial()])
        return total / self.width

    def forward(self, x):
        x = x - self.mean(x)
        return x * torch.rsqrt(self.mean(x.square()) + self.eps) * here(self.weight) + here(self.bias)


def enter(module, args, whole, *, mesh, way):
    layout = cuts(mesh, (way.rows, 0), (way.columns, whole.ndim - 1))
    return DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim).redistribute(placements=layout).to_local()


def leave(module, args, *, mesh, way):
    layout = cuts(mesh, (way.rows, 0), (way.columns, args[0].ndim - 1))
    return DTensor.from_local(args[0], mesh, layout).full_tensor()


def divide(layer, members, way):
    """Divide a block; the layers around blocks compute all rows on all members."""
    n, more = members.size(), len(way.axes) - 1
    side = round(n ** (1 / (more + 1)))
    depth = n // side**more
    if depth * side**more != n or (depth != side and way is not WAYS["2.5d"]):
        raise ValueError(f"--members {n}: must be the side of a mesh to the power of {more + 1}; 2.5d: times a depth")
    mesh = grid(members.device_type, (depth, *[side] * more), way.axes)
    if isinstance(layer, Embed):
        layer.register_forward_hook(partial(enter, mesh=mesh, way=way))
    elif isinstance(layer, Head):
        layer.register_forward_pre_hook(partial(leave, mesh=mesh, way=way))
    for name, part in list(layer.named_children()) if isinstance(layer, Block) else []:
        if isinstance(part, nn.Linear):
            setattr(layer, name, Linear(part, mesh, way.second if name in Block.second else way.first))
        else:
            setattr(layer, name, Norm(part, mesh, way.columns))


class Embed(nn.Embedding):
    pass


class Block(nn.Module):
    second = "out", "down"

    def __init__(self, width=16, heads=4):
        super().__init__()
        self.n1, self.n2, self.head = nn.LayerNorm(width), nn.LayerNorm(width), width // heads
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        y = self.n1(x)
        q, k, v = (project(y).unflatten(-1, (-1, self.head)).transpose(1, 2) for project in (self.q, self.k, self.v))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.out(y)
        return x + self.down(nn.functional.gelu(self.up(self.n2(x))))


class Head(nn.Linear):
    pass


def loss_fn(output, y):
    return nn.functional.cross_entropy(output.flatten(0, 1), y.flatten())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=["2d"])
    parser.add_argument("--steps", type=int, default=4)
    options = parser.parse_args()
    x = torch.randint(17, (16, 6), generator=torch.Generator().manual_seed(0))
    training = Training(partial(torch.optim.AdamW, lr=1e-2), max_grad_norm=0.2)
    layers = [partial(Embed, 17, 16), Block, Block, partial(Head, 16, 17)]
    for name in options.ways:
        received.clear()
        shard = partial(divide, way=WAYS[name])
        with Pipeline(layers, loss_fn, num_microbatches=2, shard=shard, training=training) as pipe:
            while pipe.steps_done < options.steps:
                loss = pipe.step((x, x.flip(1)))
            moved = f"received {received['forward']} and {received['backward']} numbers"
            print(f"{name}: loss {loss:.7f}, norm {pipe.grad_norm:.7f}, held out {pipe.evaluate((x, x)):.7f}, {moved}")


if __name__ == "__main__":
    main()
