"""Modules whose backward is split in two: each has an edge of a graph that the split could get wrong."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from unkind_layers import Product


class Counted(Product):
    """A user's own function: makes both gradients at once, and counts."""

    calls = 0

    @staticmethod
    def backward(ctx, grad):
        Counted.calls += 1
        x, weight = ctx.saved_tensors[0], ctx.saved_tensors[1]  # read twice
        return grad @ weight.T, x.flatten(0, -2).T @ grad.flatten(0, -2)


class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 16) / 4)
        self.scale = nn.Parameter(torch.randn(16))

    def forward(self, x):
        return Counted.apply(x, self.weight) * self.scale


class Shared(nn.Module):
    """One weight in three places; sums of three depend on their order."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(16, 16)

    def forward(self, x):
        again = nn.functional.linear(x, self.a.weight * self.a.bias)
        return self.a(torch.relu(self.a(x))) + again


class HandedOn(nn.Module):
    """A weight, and what is made of one, used here and handed on, as T5's position bias is; the sum had one part."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(16, 16) / 4), nn.Parameter(torch.randn(16))

    def forward(self, x):
        scale = self.b.exp()
        y = nn.functional.linear(x * scale, self.a, self.b)
        return nn.functional.linear(y, self.a.t()), self.a, scale, self.b.view(4, 4), scale + self.b


class Twice(nn.Module):
    """One tensor returned twice, and a norm whose two weights are one: an edge that is met twice."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Parameter(torch.randn(16))

    def forward(self, x):
        y = nn.functional.layer_norm(self.a(x), (16,), self.b, self.b.exp())
        return y, y, self.b, y


class Hooked(nn.Module):
    """Hooks on what a product and a weight's own path return: twice as often they would scale twice."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(16, 16)
        self.a.weight.register_hook(lambda grad: grad / 2)
        self.a.bias.register_post_accumulate_grad_hook(lambda bias: setattr(bias, "grad", bias.grad * 3))

    def forward(self, x):
        y, scale = self.a(x), self.a.bias.exp()
        for tensor in (y, scale):
            tensor.register_hook(lambda grad: grad * 3)
        return y * scale


class Slices(nn.Module):
    """A bias that is put together in place."""

    def __init__(self):
        super().__init__()
        self.a = nn.Parameter(torch.randn(16))

    def forward(self, x):
        bias = torch.zeros(2, 16)
        bias[0].add_(self.a)
        bias[1].copy_(self.a).mul_(self.a)
        return nn.functional.linear(x, bias)


class Outputs(nn.Module):
    """Several outputs: one from the input, one from weights alone, one that needs no gradient."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16))

    def forward(self, x):
        return x * 2, self.weight.exp(), torch.zeros(2)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(16, 16, batch_first=True)

    def forward(self, x):
        return self.lstm(x)[0]


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=False)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.heads = nn.MultiheadAttention(16, 4, batch_first=True)

    def forward(self, x):
        return self.heads(x, x, x)[0]


def encoder():
    return nn.TransformerEncoderLayer(16, 4, 64, batch_first=True, dropout=0)


def convolution():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=2), nn.GroupNorm(2, 8)
    )


class Views(nn.Module):
    """Gives back its input, and a view of it."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x):
        return x, x.view(-1, 4, 4), self.linear(x)


class Sparse(nn.Module):
    def __init__(self):
        super().__init__()
        self.bag = nn.EmbeddingBag(10, 16, sparse=True, mode="sum")

    def forward(self, x):
        return x + self.bag(torch.arange(4).view(2, 2))


class Autocast(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return self.inner(x).float()


class InPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x):
        h = self.b(self.a(x).relu_())
        h += 1
        return h.mul_(2)


class Products(nn.Module):
    """Batched, with a bias; and a product of two weights."""

    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.randn(2, 1, 8))
        self.a, self.b = nn.Parameter(torch.randn(2, 16, 8) / 4), nn.Parameter(torch.randn(8, 8) / 4)

    def forward(self, x):
        return torch.baddbmm(self.bias, x, self.a) @ (self.b @ self.b)


class Equilibrium(nn.Module):
    """A fixed point, with a gradient that is one as well: a hook runs a graph of its own again and again."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(16, 16), nn.Linear(16, 16)
        nn.init.normal_(self.inner.weight, std=0.1)

    def forward(self, x):
        found = torch.tanh(self.inner(self.outer(x)) + self.outer(x))
        at = found.detach().requires_grad_()
        after = torch.tanh(self.inner(at) + self.outer(x.detach()))

        def solve(grad):
            total = grad
            for _ in range(3):
                total = torch.autograd.grad(after, at, total, retain_graph=True)[0] + grad
            return total

        found.register_hook(solve)
        return found


class Implicit(torch.autograd.Function):
    """The same in a user's own function."""

    @staticmethod
    def forward(ctx, x, weight):
        with torch.enable_grad():
            ctx.leaves = [tensor.detach().requires_grad_() for tensor in (x, weight)]
            ctx.after = torch.tanh(ctx.leaves[0] @ ctx.leaves[1])
        return ctx.after.detach()

    @staticmethod
    def backward(ctx, grad):
        for _ in range(3):
            found = torch.autograd.grad(ctx.after, ctx.leaves, grad, retain_graph=True)
        return found


class ImplicitLayer(Own):
    def forward(self, x):
        return Implicit.apply(x, self.weight) * self.scale


MODULES = {
    "linear": (lambda: nn.Linear(16, 8), (4, 5, 16)),
    "attention": (encoder, (2, 5, 16)),
    "convolution": (convolution, (2, 3, 8, 8)),
    "own function": (Own, (2, 5, 16)),
    "shared weight": (Shared, (2, 5, 16)),
    "recurrent": (Recurrent, (2, 5, 16)),
    "checkpointed": (Checkpointed, (2, 5, 16)),
    "weight norm": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(16, 16)), (2, 16)),
    "handed on": (HandedOn, (2, 16)),
    "twice": (Twice, (2, 16)),
    "hooked": (Hooked, (2, 16)),
    "equilibrium": (Equilibrium, (2, 16)),
    "implicit": (ImplicitLayer, (2, 16)),
    "slices": (Slices, (2, 16)),
    "several outputs": (Outputs, (2, 16)),
    "embedding": (lambda: nn.Embedding(10, 16), None),
    "views": (Views, (2, 16)),
    "sparse": (Sparse, (2, 16)),
    "autocast": (Autocast, (2, 5, 16)),
    "in place": (InPlace, (2, 16)),
    "products": (Products, (2, 5, 16)),
    "heads": (Attention, (2, 5, 16)),
    "no weights": (nn.GELU, (2, 16)),
    "passes on": (nn.Identity, (2, 16)),
    "frozen": (lambda: nn.Linear(16, 16).requires_grad_(False), (2, 16)),
}
