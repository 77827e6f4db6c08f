"""Stages of a model run in turn, in one process, and the uncut model that they must equal."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
import unsplit_models as models
from torch import Tensor, nn

from rpc_pipe.model.observe.trees import leaves, tensors
from rpc_pipe.model.observed_model import ObservedModel
from rpc_pipe.model.replay.observed_stage import ObservedStage
from rpc_pipe.model.sharding import cut


@dataclass
class Outcome:
    output: Any
    loss: Tensor
    grads: dict[str, Tensor]


def loss_of(output: Any) -> Tensor:
    """Return the loss that the model gave, or one that every output has a part in."""
    loss = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if loss is None:
        loss = sum((t.square() * 0.5).mean() for t in tensors(output) if t.requires_grad)
    return loss


def uncut(model: nn.Module, *args: Any, **kwargs: Any) -> Outcome:
    model.zero_grad()
    output = model(*args, **kwargs)
    loss = loss_of(output)
    loss.backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return Outcome(output, loss.detach(), grads)


def in_turn(stages: list[ObservedStage], *args: Any, seed: Any = None, **kwargs: Any) -> Outcome:
    """Run forward and backward as a pipeline does: what passes between stages has no graph."""
    payload: Any = ()
    kept = []
    for stage in stages:
        arrived = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in payload]
        payload = stage.run(arrived, args, kwargs, seed)
        kept.append((arrived, payload))
    output = payload
    loss = loss_of(output)
    grads: list[Tensor | None] = []
    for stage, (arrived, handed) in reversed(list(zip(stages, kept, strict=True))):
        if stage is stages[-1]:
            loss.backward()
        else:
            pairs = [(t, grad) for t, grad in zip(handed, grads, strict=True) if grad is not None]
            torch.autograd.backward([tensor for tensor, _ in pairs], [grad for _, grad in pairs])
        grads = [tensor.grad for tensor in arrived]
    total: dict[str, Tensor] = {}
    for stage in reversed(stages):
        for name, parameter in stage.named_parameters():
            if parameter.grad is not None:
                total[name] = total[name] + parameter.grad if name in total else parameter.grad
            parameter.grad = None
    return Outcome(output, loss.detach(), total)


def stages_of(observed: ObservedModel, count: int) -> list[ObservedStage]:
    ranges = cut(observed.num_blocks, count)
    return [observed.build(stage, ranges) for stage in range(count)]


def assert_same(found: Outcome, expected: Outcome, summed_otherwise: Collection[str] = ()) -> None:
    """Compare bit for bit; but gradients that are summed in another order to the float's rounding."""
    assert torch.equal(found.loss, expected.loss)
    assert found.grads.keys() == expected.grads.keys()
    for name in summed_otherwise:
        torch.testing.assert_close(found.grads[name], expected.grads[name], rtol=1e-6, atol=1e-7)
    exact = expected.grads.keys() - summed_otherwise
    different = [name for name in exact if not torch.equal(found.grads[name], expected.grads[name])]
    assert not different
    outputs, wanted = dict(leaves(found.output)), dict(leaves(expected.output))
    assert outputs.keys() == wanted.keys()
    assert all(torch.equal(tensor, outputs[path]) for path, tensor in wanted.items())


def floats(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def ids(*shape: int) -> Tensor:
    return torch.randint(11, shape, generator=torch.Generator().manual_seed(sum(shape)))


ALL_ONES, PADDED = torch.ones(2, 5), torch.tensor([[1.0] * 5, [1, 1, 1, 0, 0]])
CASES = {
    "tied": (models.Tied, [ids(2, 5)], {"mask": PADDED, "labels": ids(2, 5)}),
    "mask of ones": (models.Tied, [ids(2, 5)], {"mask": ALL_ONES}),
    "no mask": (models.Tied, [], {"ids": ids(2, 5), "mask": None}),
    "nested lists": (models.Nested, [floats(3, 6)], {}),
    "encoder and decoder": (models.EncoderDecoder, [ids(2, 5), ids(2, 4)], {}),
    "skips": (models.UNet, [floats(2, 2, 8, 8)], {}),
    "repeated block": (models.Repeated, [floats(2, 8)], {}),
    "repeated block that leaves a dict": (models.LeftInADict, [floats(2, 8)], {}),
    "dicts that the model changes": (models.ChangesTheirDicts, [floats(2, 8)], {}),
    "experts, returned": (lambda: models.Experts("return"), [floats(2, 5, 8)], {}),
    "experts, by a hook": (lambda: models.Experts("hook"), [floats(2, 5, 8)], {}),
    "experts, by an attribute": (lambda: models.Experts("attribute"), [floats(2, 5, 8)], {}),
    "shared bias": (models.SharedBias, [floats(2, 5, 8)], {}),
    "in place": (models.InPlace, [floats(2, 8)], {}),
    "a function of one's own": (models.OwnFunction, [floats(2, 8)], {}),
    "a hook on a skip": (models.HookedSkip, [floats(2, 8)], {}),
    "no list": (models.NoList, [floats(2, 8)], {"y": floats(8)}),
    "images": (models.ImageNet, [floats(2, 3, 8, 8)], {}),
    "sequence": (lambda: nn.Sequential(*(nn.Linear(8, 8) for _ in range(5))), [floats(2, 8)], {}),
}
