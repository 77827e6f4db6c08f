"""Functions of autograd behind a cut: an input that their forward does not read still gets a gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from refusals import refused
from test_whole import SGD, assert_trains_alike, made
from torch import Tensor, nn
from torch.autograd import Function
from torch.utils.checkpoint import checkpoint

from rpc_pipe import Pipeline, Training
from rpc_pipe.dependency import WorkerFailure


class Packed(Function):
    """Eight bits for the forward, and a handle without numbers of its own for the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        codes = (x * 8).to(torch.int8)
        ctx.mark_non_differentiable(codes)
        return codes, x.new_zeros(()).expand(x.shape)

    @staticmethod
    def backward(ctx: Any, _: Any, grad: Tensor) -> Any:
        return grad


class Unpacked(Function):
    @staticmethod
    def forward(ctx: Any, codes: Tensor, handle: Tensor) -> Any:
        return codes / 8

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return None, grad


class Scaled(Function):
    """Return the input itself; the gradient is scaled by a tensor that only backward reads."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, by: Tensor) -> Any:
        ctx.save_for_backward(by)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * ctx.saved_tensors[0], None


class Injected(Function):
    """An auxiliary loss that adds nothing but a gradient."""

    @staticmethod
    def forward(x: Tensor, loss: Tensor) -> Any:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.shape = inputs[1].shape

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, grad.new_full(ctx.shape, 0.1)


class Silent(Function):
    """A straight-through estimator with no gradient for one of its inputs, which is the only one of its stage."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        return x.round()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return None


class Split(nn.Module):
    """`first` ends the second of four layers; `second` begins the third, or stands before it."""

    def __init__(self, first: Callable[..., Any], second: Callable[..., Any], around: bool) -> None:
        super().__init__()
        self.layers, self.around = nn.ModuleList(nn.Linear(8, 8) for _ in range(4)), around
        if not around:
            self.layers[2].register_forward_pre_hook(lambda _, args: second(*args))
        self.layers[1].register_forward_hook(lambda _, args, output: first(output.tanh()))
        self.second = second

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = layer(self.second(x) if self.around and number == 2 else x)
        return x


def with_loss(x: Tensor) -> Any:
    return x, x.square().mean()


CASES: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "codes and a handle": (Packed.apply, lambda x: Unpacked.apply(*x)),
    "a scale of gradients": (lambda x: (x, x.detach().abs()), lambda x: Scaled.apply(*x)),
    "an injected gradient": (with_loss, lambda x: Injected.apply(*x)),
    "in a checkpoint": (with_loss, lambda x: checkpoint(lambda *x: Injected.apply(*x).sin(), *x, use_reentrant=False)),
    "no gradient": (lambda x: x, Silent.apply),
}


@pytest.mark.parametrize("around", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_an_input_of_a_function_that_it_does_not_read_gets_its_gradient(case, around):
    """It crossed no cut, so the stages before the function were not trained, or otherwise, and the loss went on."""
    model = made(lambda: Split(*CASES[case], around))
    pipe = Pipeline(model, nn.functional.mse_loss, training=Training(SGD), num_microbatches=2, num_workers=2)
    alone = made(lambda: Split(*CASES[case], around))
    assert_trains_alike(pipe, alone, torch.randn(4, 8, generator=torch.Generator().manual_seed(1)))


class Noted(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, kept: dict[str, float]) -> Tensor:
        ctx.kept = kept
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.kept["norm"] = grad.norm().item()
        return grad, None


class ByNorm(nn.Linear):
    """Its scale is the norm of the gradient before, in a dict."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.kept = {"norm": 1.0}

    def forward(self, x: Tensor) -> Tensor:
        return Noted.apply(super().forward(x) * self.kept["norm"], self.kept)  # type: ignore[no-untyped-call, no-any-return]


def test_a_backward_that_writes_into_a_dict_which_forwards_read_is_refused() -> None:
    """Forwards of later microbatches had read the number of an earlier one, in silence."""
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(1))
    how: dict[str, Any] = {"training": Training(SGD), "num_microbatches": 4}
    assert Pipeline(made(lambda: [ByNorm(), ByNorm()]), nn.functional.mse_loss, **how, num_workers=1).step((x, x))
    with refused("layer", WorkerFailure):
        Pipeline(made(lambda: [ByNorm(), ByNorm()]), nn.functional.mse_loss, **how, num_workers=2).step((x, x))
