"""Backward in two equals backward in one, bit for bit, runs nothing twice and frees what it can."""

import pytest
import torch
from torch import nn

from rpc_pipe.workers.compute.split_backward import Saved, backward_inputs


class Product(torch.autograd.Function):
    """A user's own function: makes both gradients at once, and counts."""

    calls = 0

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx, grad):
        Product.calls += 1
        x, weight = ctx.saved_tensors[0], ctx.saved_tensors[1]  # read twice
        return grad @ weight.T, x.flatten(0, -2).T @ grad.flatten(0, -2)


class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 16) / 4)
        self.scale = nn.Parameter(torch.randn(16))

    def forward(self, x):
        return Product.apply(x, self.weight) * self.scale


class Shared(nn.Module):
    """One weight in three places; sums of three depend on their order."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(16, 16)

    def forward(self, x):
        again = nn.functional.linear(x, self.a.weight * self.a.bias)
        return self.a(torch.relu(self.a(x))) + again


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
        return torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False)


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


MODULES = {
    "linear": (lambda: nn.Linear(16, 8), (4, 5, 16)),
    "attention": (encoder, (2, 5, 16)),
    "convolution": (convolution, (2, 3, 8, 8)),
    "own function": (Own, (2, 5, 16)),
    "shared weight": (Shared, (2, 5, 16)),
    "recurrent": (Recurrent, (2, 5, 16)),
    "checkpointed": (Checkpointed, (2, 5, 16)),
    "weight norm": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(16, 16)), (2, 16)),
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


def forward(module, inputs, saved=None):
    """Return the input, the outputs that owe a gradient, and gradients for them."""
    x = inputs.clone().requires_grad_(inputs.is_floating_point())
    if saved is None:
        outputs = module(x)
    else:
        with saved.hooks():
            outputs = module(x)
    outputs = [y for y in (outputs if isinstance(outputs, tuple) else (outputs,)) if y.requires_grad]
    generator = torch.Generator().manual_seed(1)
    return x, outputs, [torch.randn(y.shape, generator=generator) for y in outputs]


@pytest.mark.parametrize("name", MODULES)
def test_equals_backward_in_one(name):
    build, shape = MODULES[name]
    torch.manual_seed(0)
    module = build()
    microbatches = [torch.randn(shape) if shape else torch.randint(10, (2, 5)) for _ in range(3)]
    expected_inputs, found_inputs = [], []
    for inputs in microbatches:
        x, outputs, grads = forward(module, inputs)
        torch.autograd.backward(outputs, grads)
        expected_inputs.append(x.grad)
    expected = [dense(p.grad) for p in module.parameters()]
    module.zero_grad()
    Product.calls = 0
    deferred = []
    for inputs in microbatches:
        saved = Saved()
        x, outputs, grads = forward(module, inputs, saved)
        found, later = backward_inputs(outputs, grads, [x] if x.requires_grad else [], saved)
        found_inputs += found or [None]
        deferred.append(later)
    assert all(p.grad is None for p in module.parameters()), "I adds nothing to the weights"
    for later in deferred:
        later.run()
    assert all(map(equal, found_inputs, expected_inputs))
    assert all(map(equal, (dense(p.grad) for p in module.parameters()), expected))
    if name == "own function":
        assert Product.calls == len(microbatches)


def dense(grad):
    return grad.to_dense() if grad is not None and grad.is_sparse else grad


def equal(found, expected):
    return found is expected is None or torch.equal(found, expected)


class Counting(torch.utils._python_dispatch.TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.products = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.products += function.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm)
        return function(*args, **(kwargs or {}))


def test_no_product_is_computed_twice_and_i_does_its_half():
    module = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
    saved = Saved()
    x, outputs, grads = forward(module, torch.randn(4, 16), saved)
    with Counting() as inputs:
        _, later = backward_inputs(outputs, grads, [x], saved)
    with Counting() as weights:
        later.run()
    assert (inputs.products, weights.products) == (2, 2)


def test_after_i_only_what_w_reads_is_held():
    """Of a feed-forward block: the inputs of its two products; not those of the norm, the GELU or the dropout."""
    module = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.5), nn.Linear(64, 16))
    saved = Saved()
    x, outputs, grads = forward(module, torch.randn(8, 16), saved)
    weights = {p.data_ptr() for p in module.parameters()}

    def held():
        tensors = [handle.tensor for handle in saved._handles if handle.tensor is not None]
        return sorted(t.numel() for t in tensors if t.data_ptr() not in weights)

    assert len(held()) > 4
    _, later = backward_inputs(outputs, grads, [x], saved)
    assert held() == [8 * 16, 8 * 64]
    assert x.numel() == 0, "the input, which nobody reads any more, is let go"
    later.run()


def test_a_change_in_place_is_said_not_computed_with():
    module = nn.Linear(4, 4)
    saved = Saved()
    x = torch.randn(2, 4, requires_grad=True)
    with saved.hooks():
        middle = x * 2
        y = module(middle)
    with torch.no_grad():
        middle += 1
    with pytest.raises(RuntimeError, match="changed in place after it was used"):
        backward_inputs([y], [torch.ones_like(y)], [x], saved)[1].run()
