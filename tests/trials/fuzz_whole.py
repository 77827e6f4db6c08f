"""Random models with a forward of their own, for `fuzz.py --whole`: what people write around blocks, mixed."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from rpc_pipe.workers.transport.payload import Tree, tensors_of
from trials.fuzz_idioms import Held
from trials.fuzz_layers import WIDTH, linear
from trials.fuzz_models import first

#: what a forward has at hand: the hidden states `x`, the tree that the last block returned, what came in, what was
#: saved on the way, and what adds to the loss
State = Any


def _saved(s: State) -> Tensor:
    """Return what was saved some time ago, in the type of what is at hand."""
    found: Tensor = s.saved[len(s.saved) // 2].to(s.x.dtype)
    return found


def _set(name: str, change: Callable[[Any, State], Any]) -> Callable[[Wild, State], None]:
    return lambda model, s: setattr(s, name, change(model, s))


def _means(tree: Tree) -> list[Tensor]:
    return [t.mean() / 100 for t in tensors_of(tree) if t.is_floating_point() and t.numel()]


def _decided(model: Any, s: State) -> None:
    """Go one way or another, as the batch says."""
    if bool(s.batch.sum() > 0):
        s.x = s.x * 0.9
    else:
        s.x = model.norm(s.x)


def _asked(model: Any, s: State) -> None:
    if s.x.requires_grad and s.x.dim() == 2 and len(s.x) > 1:
        s.x = s.x / s.x.shape[1] * WIDTH


def _hooked(model: Any, s: State) -> None:
    if s.x.requires_grad:
        s.x = s.x * 1
        s.x.register_hook(lambda grad: grad * 0.5)


def _written(model: Any, s: State) -> None:
    s.x = s.x * 1
    s.x += _saved(s)
    s.x[:, :2] *= 0.5


def _counted(model: Any, s: State) -> None:
    s.x = s.x * (1 + int(model.count) % 2)
    if model.training:
        model.count += 1


def _without(model: Any, s: State) -> None:
    with torch.no_grad():
        shift = model.scale.detach().exp() + s.x.mean()
    s.x = s.x + shift / 10


def _cast(model: Any, s: State) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        s.x = (s.x @ model.stem.weight).to(s.x.dtype)


def _halves(model: Any, s: State) -> None:
    some, other = s.x.chunk(2, 1)
    s.x = torch.cat([other, some.tanh()], 1)


def _popped(model: Any, s: State) -> None:
    """Take from a stack what an earlier block put there, as the way up of a U-Net does."""
    if s.stack:
        s.x = (s.x + s.stack.pop().to(s.x.dtype)) / 2


def _frozen(model: Any, s: State) -> None:
    with torch.no_grad():
        s.x = s.x + first(model.blocks[-1](s.x)).to(s.x.dtype) / 4


def _kept(model: Any, s: State) -> None:
    """Leave it in an attribute of the model, and use what this forward left there."""
    if s.own:
        s.x = s.x + model.feature.to(s.x.dtype) / 4
    model.feature = s.x
    s.own = True


def _cached(model: Any, s: State) -> None:
    """Keep what it made in a dict by its number, as caches of keys do."""
    s.cache.setdefault(len(s.cache) % 2, []).append(s.x)
    s.x = torch.stack([t.to(s.x.dtype) for t in s.cache[0]]).mean(0)


def _held(model: Any, s: State) -> None:
    s.held = replace(s.held, x=s.x, gate=s.x.sigmoid()) if s.held else Held(s.x)
    if s.held.gate is not None:
        s.x = s.held.x * s.held.gate


def _decayed(model: Any, s: State) -> None:
    """All weights count in the loss."""
    s.more.append(sum(p.abs().square().sum() for p in model.parameters() if not p.is_complex()) / 1000)


def _average(model: Any, s: State) -> None:
    """Move an average of the model's own, as soon as it is at hand, and use it."""
    if model.training:
        with torch.no_grad():
            model.mean.lerp_(s.x.detach().mean(0).to(model.mean.dtype), 0.1)
    s.x = s.x - model.mean


def _penalty(model: Any, s: State) -> None:
    """Ask for a gradient in the forward."""
    if torch.is_grad_enabled() and s.x.requires_grad:
        (grad,) = torch.autograd.grad(model.beside(s.x).tanh().sum(), s.x, create_graph=True)
        s.more.append(grad.square().mean() / 100)


def _in_evaluation(model: Any, s: State) -> None:
    """Call a block in evaluation mode, and put that back."""
    block = model.blocks[0]
    mode = block.training
    block.eval()
    s.x = s.x + first(block(s.x)).to(s.x.dtype) / 4
    block.train(mode)


def _seeded(model: Any, s: State) -> None:
    """Draw the same each time, and leave the generator as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        s.x = s.x + torch.randn_like(s.x) / 8


def _chosen(model: Any, s: State) -> None:
    s.x = s.x * (0.5 + random.random()) if model.training else s.x


def _registered(model: Any, s: State) -> None:
    """Make a buffer when it is missing, or too small."""
    if len(model.limits) < len(s.x):
        model.register_buffer("limits", torch.arange(len(s.x), dtype=torch.get_default_dtype()), persistent=False)
    s.x = s.x + model.limits[: len(s.x), None] / 8


def _followed(model: Any, s: State) -> None:
    """Let one layer of the model's own follow another, and compare."""
    with torch.no_grad():
        if model.training:
            model.teacher.weight.lerp_(model.beside.weight, 0.2)
        wanted = model.teacher(s.x)
    s.x = s.x + wanted / 4


def _watched(model: Any, s: State) -> None:
    """Ask for the gradient of what goes in, and keep it."""
    if s.x.requires_grad:
        s.x = s.x.clone()
        s.x.retain_grad()
        s.x.register_hook(lambda grad: grad.clamp(-1, 1))


#: what may stand before a block
AROUND: dict[str, Callable[[Any, State], None]] = {
    "save": lambda model, s: s.saved.append(s.x),
    "save a view": lambda model, s: s.saved.append(s.x.view_as(s.x)),
    "skip": _set("x", lambda model, s: s.x + _saved(s)),
    "skip in place": _written,
    "gate": _set("x", lambda model, s: s.x * model.scale.sigmoid()),
    "norm": _set("x", lambda model, s: model.norm(s.x)),
    "dropout": _set("x", lambda model, s: functional.dropout(s.x, 0.2, model.training)),
    "noise": _set("x", lambda model, s: s.x + torch.randn_like(s.x) / 8),
    "mask": _set("x", lambda model, s: s.x.masked_fill(s.mask, 0)),
    "table": _set("x", lambda model, s: s.x + model.table[: s.x.shape[1]]),
    "made of weights": _set("x", lambda model, s: s.x + model.made(model.table).tanh()),
    "tie": _set("x", lambda model, s: s.x @ model.stem.weight),
    "block's weight": _set("x", lambda model, s: s.x + next(model.blocks[0].parameters(), model.scale).real.mean()),
    "more loss": lambda model, s: s.more.append(s.x.square().mean() / 100),
    "all loss": lambda model, s: s.more.extend(_means(s.tree)),
    "detached": _set("x", lambda model, s: s.x + s.x.detach().tanh()),
    "decided": _decided,
    "asked": _asked,
    "hook": _hooked,
    "count": _counted,
    "no grad": _without,
    "cast": _cast,
    "halves": _halves,
    "turned": _set("x", lambda model, s: s.x.T.contiguous().T.reshape(len(s.batch), WIDTH)),
    "batch": _set("x", lambda model, s: s.x + s.batch.to(s.x.dtype) / 4),
    "stacked": _set("x", lambda model, s: torch.stack([s.x, *(t.to(s.x.dtype) for t in s.saved)]).mean(0)),
    "chosen": _set("x", lambda model, s: s.x[:, s.mask.long().sum(0).argsort()]),
    "checkpoint": _set("x", lambda model, s: checkpoint(model.beside, s.x, use_reentrant=False)),
    "beside": _set("x", lambda model, s: model.beside(s.x)),
    "in evaluation": _in_evaluation,
    "seeded": _seeded,
    "by chance": _chosen,
    "registered": _registered,
    "followed": _followed,
    "watched": _watched,
    "push": lambda model, s: s.stack.append(s.x),
    "pop": _popped,
    "frozen": _frozen,
    "kept": _kept,
    "cached": _cached,
    "dataclass": _held,
    "decay": _decayed,
    "average": _average,
    "penalty": _penalty,
    "again": _set("x", lambda model, s: s.x + first(model.blocks[0](s.x)).to(s.x.dtype) / 4),
    "functional": _set(
        "x", lambda model, s: functional_call(model.beside, {"weight": model.stem.weight.detach()}, s.x)
    ),
    "named": _set("x", lambda model, s: sum(part(s.x) for part in model.named.values())),
    "gradient scaled": _set("x", lambda model, s: s.x * 0.5 + s.x.detach() * 0.5),
    "attention": _set(
        "x", lambda model, s: functional.scaled_dot_product_attention(s.x, s.x, s.saved[0].to(s.x.dtype))
    ),
    "einsum": _set("x", lambda model, s: torch.einsum("bi,bj->bj", s.x.softmax(1), s.x)),
    "position": _set("x", lambda model, s: s.x + torch.arange(len(s.x), dtype=s.x.dtype)[:, None] / 8),
    "captured": lambda model, s: s.more.extend(t.mean() / 50 for t in model.captured[-1:]),
}


def _lower(block: nn.Module, x: Tensor) -> Tree:
    with torch.autocast("cpu", torch.bfloat16, enabled=torch.get_default_dtype() is torch.float32):
        return block(x)


def _without_grad(block: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        return first(block(x))


#: how a block is called
CALLS: dict[str, Callable[[Any, nn.Module, State], Tree]] = {
    "tensor": lambda model, block, s: block(s.x),
    "tree": lambda model, block, s: block(s.tree if first(s.tree) is s.x else s.x),
    "with what was saved": lambda model, block, s: block((s.x, _saved(s))),
    "with the mask": lambda model, block, s: block((s.x, s.mask)),
    "by name": lambda model, block, s: block(tree={"x": s.x, "none": None}),
    "twice": lambda model, block, s: block(first(block(s.x))),
    "checkpoint": lambda model, block, s: checkpoint(block, s.x, use_reentrant=False),
    "closure": lambda model, block, s: checkpoint(
        lambda x: first(block(x * model.scale.sigmoid())) + model.beside(x), s.x, use_reentrant=False
    ),
    "autocast": lambda model, block, s: _lower(block, s.x),
    "no grad": lambda model, block, s: _without_grad(block, s.x),
    "teacher": lambda model, block, s: first(block(s.x)) + _without_grad(block, s.x),
    "in rows": lambda model, block, s: torch.cat([first(block(rows)) for rows in s.x.split(2)]),
    "under func": lambda model, block, s: functional_call(block, dict(block.named_parameters()), s.x),
}
#: what is returned
OUTPUTS: dict[str, Callable[[Tensor, list[Tensor]], Tree]] = {
    "tensor": lambda x, more: x + sum(more),
    "tuple": lambda x, more: (x, *more),
    "dict": lambda x, more: {"x": x, "more": more, "none": None},
}


class Drawn:
    """What stands where in a forward, drawn from a seed.

    Args:
        count: of blocks.
    """

    def __init__(self, seed: int, count: int) -> None:
        draw = random.Random(f"whole {seed}")
        few = draw.sample(list(AROUND), draw.choice([2, 4, 8]))
        calls = ["tensor", *draw.sample(list(CALLS), draw.choice([0, 1, 2]))]
        self.around = [[draw.choice(few) for _ in range(draw.choice([0, 1, 1, 2]))] for _ in range(count + 1)]
        self.calls = [draw.choice(calls) for _ in range(count)]
        self.returns = draw.choice(list(OUTPUTS))
        self.tied, self.stemless = draw.random() < 0.2, draw.random() < 0.1

    def __str__(self) -> str:
        places = [
            f"{'+'.join(around)} > {call}" for around, call in zip(self.around, [*self.calls, "end"], strict=True)
        ]
        return f"tied={self.tied} stemless={self.stemless} returns={self.returns} ({' | '.join(places)})"


class Wild(nn.Module):
    """A stem, blocks with anything around them, and a head."""

    table: Tensor
    count: Tensor
    mean: Tensor
    limits: Tensor

    def __init__(self, makers: Sequence[Callable[[], nn.Module]], seed: int) -> None:
        super().__init__()
        self.stem, self.head, self.beside = linear(), linear(), linear()
        self.norm, self.made = nn.LayerNorm(WIDTH), linear()
        self.scale = nn.Parameter(torch.zeros(WIDTH))
        self.register_buffer("table", torch.linspace(-1, 1, WIDTH))
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("limits", torch.zeros(1), persistent=False)
        self.teacher = copy.deepcopy(self.beside).requires_grad_(False)
        self.named = nn.ModuleDict({"a": linear(), "b": nn.Tanh()})
        self.blocks = nn.ModuleList(make() for make in makers)
        self.drawn = Drawn(seed, len(makers))
        if self.drawn.tied:
            self.head.weight = self.stem.weight
        self.captured: list[Tensor] = []
        if any("captured" in around for around in self.drawn.around):
            for block in self.blocks:
                block.register_forward_hook(self._capture)

    def _capture(self, module: nn.Module, args: Any, output: Any) -> None:
        self.captured.append(first(output))

    def forward(self, x: Tensor) -> Tree:
        self.captured.clear()
        drawn = self.drawn
        s = SimpleNamespace(batch=x, mask=x > 0.5, saved=[], more=[], stack=[], cache={}, held=None, own=False)
        s.tree = s.x = x if drawn.stemless else self.stem(x)
        s.saved.append(s.x)
        for around, call, block in zip(drawn.around, drawn.calls, self.blocks, strict=False):
            for name in around:
                AROUND[name](self, s)
            s.tree = CALLS[call](self, block, s)
            s.x = first(s.tree).to(torch.get_default_dtype())
        for name in drawn.around[-1]:
            AROUND[name](self, s)
        return OUTPUTS[drawn.returns](self.head(s.x), s.more)
