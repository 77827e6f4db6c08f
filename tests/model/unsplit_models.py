"""Models as people write them: none of them knows that it will be cut."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.nn import functional


class Block(nn.Module):
    def __init__(self, width: int = 8, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        y = self.dropout(self.down(functional.gelu(self.up(self.norm(x)))))
        return x + (y if mask is None else y * mask)


class Tied(nn.Module):
    """Language model: tied embedding, a mask or None by keyword, a table that all blocks share, the loss inside."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList([Block(dropout=dropout) for _ in range(5)])
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("positions", torch.linspace(0, 1, 64)[:, None], persistent=False)

    def forward(self, ids: Tensor, mask: Tensor | None = None, labels: Tensor | None = None) -> Any:
        x = self.dropout(self.embed(ids) + self.positions[: ids.shape[1]])
        if mask is not None:
            mask = None if mask.all() else mask.to(x.dtype)[..., None]
        for block in self.blocks:
            x = block(x, mask=mask)
        x = functional.dropout(self.norm(x), self.dropout.p, self.training)
        logits = self.head(x)
        if labels is None:
            return {"logits": logits}
        return {"loss": functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


class Nested(nn.Module):
    """A list of lists, of different lengths, with something between them."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 8)
        self.stages = nn.ModuleList([nn.ModuleList([Block() for _ in range(n)]) for n in (1, 3, 2)])
        self.between = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for stage in self.stages:
            for block in stage:
                x = block(x)
            x = self.between(x).relu_()
        return x


class EncoderDecoder(nn.Module):
    """Two lists; one embedding for both and for the output; what the encoder gives goes to every decoder block."""

    class Cross(Block):
        def forward(self, x: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
            x = x + (x @ memory.transpose(1, 2)).softmax(-1) @ memory
            return super().forward(x), x.mean()

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.encoder = nn.ModuleList([Block() for _ in range(3)])
        self.encoder_norm = nn.LayerNorm(8)
        self.decoder = nn.ModuleList([self.Cross() for _ in range(3)])

    def forward(self, source: Tensor, target: Tensor) -> dict[str, Any]:
        memory = self.embed(source)
        for block in self.encoder:
            memory = block(memory)
        memory = self.encoder_norm(memory)
        x = self.embed(target)
        means = ()
        for block in self.decoder:
            x, mean = block(x, memory=memory)
            means += (mean,)
        return {"logits": x @ self.embed.weight.T, "memory": memory, "means": means}


class UNet(nn.Module):
    """Skips: what goes down is taken again on the way up, through concatenation."""

    def __init__(self) -> None:
        super().__init__()
        self.downs = nn.ModuleList([nn.Conv2d(2 * 2**i, 4 * 2**i, 3, padding=1) for i in range(3)])
        self.middle = nn.Conv2d(16, 16, 1)
        self.ups = nn.ModuleList([nn.Conv2d(32 // 2**i, 8 // 2**i, 3, padding=1) for i in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for down in self.downs:
            x = down(x).relu()
            skips.append(x)
            x = functional.max_pool2d(x, 2)
        x = self.middle(x)
        for up in self.ups:
            x = functional.interpolate(x, scale_factor=2)
            x = up(torch.cat([x, skips.pop()], 1)).relu()
        return x


class Repeated(nn.Module):
    """One block, called several times, and a gate of its own for each call."""

    def __init__(self) -> None:
        super().__init__()
        self.groups = nn.ModuleList([Block()])
        self.gates = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        for i in range(6):
            x = x + self.gates[i] * self.groups[0](x)
        return x


@dataclass
class Output:
    last: Tensor
    hidden: tuple[Tensor, ...]
    loss: Tensor | None = None


class LeftInADict(nn.Module):
    """A block, called several times, that goes by what its call before has left in a dict of its own."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.left = nn.Linear(8, 8), {"mean": torch.zeros(())}

        def forward(self, x: Tensor) -> Tensor:
            y, before = self.linear(x), self.left["mean"]
            self.left["mean"] = y.mean()
            return (y + before).tanh()

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([self.Layer(), nn.Linear(8, 8), nn.Linear(8, 8)])

    def forward(self, x: Tensor) -> Tensor:
        self.layers[0].left["mean"] = torch.zeros(())
        for layer in self.layers[1:]:
            x = layer(self.layers[0](x))
        return self.layers[0](x)


class ChangesTheirDicts(nn.Module):
    """Blocks that return dicts, to which the model adds and from which it takes."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            y = self.linear(x)
            return {"y": y, "beside": y.tanh()}

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([self.Layer() for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        total = torch.zeros_like(x)
        for layer in self.layers:
            output = layer(x)
            output["sum"] = output["beside"] + output["y"]
            total = total + output.pop("beside")
            x = output["sum"]
        return x + total


class Experts(nn.Module):
    """Experts chosen by numbers; what the router says bypasses the blocks on its way to the loss.

    Args:
        way: how it gets there: `return`, `hook` of a module inside, or `attribute`.
    """

    class Layer(nn.Module):
        def __init__(self, way: str) -> None:
            super().__init__()
            self.router = nn.Linear(8, 3)
            self.experts = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])
            self.way = way

        def forward(self, x: Tensor) -> Any:
            logits = self.router(x)
            weights, chosen = logits.softmax(-1).max(-1)
            y = torch.zeros_like(x)
            for number in chosen.unique():  # as many rounds as experts were chosen
                rows = (chosen == number).nonzero(as_tuple=True)
                y = y.index_put(rows, self.experts[int(number)](x[rows]) * weights[rows][:, None])
            if self.way == "attribute":
                self.balance = logits.softmax(-1).mean((0, 1)).square().sum()
            return (x + y, logits) if self.way == "return" else x + y

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.layers = nn.ModuleList([self.Layer(way) for _ in range(4)])
        self.seen: list[Tensor] = []
        if way == "hook":
            for layer in self.layers:
                layer.router.register_forward_hook(self._see)

    def _see(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self.seen.append(output)

    def forward(self, x: Tensor) -> Output:
        self.seen.clear()
        hidden: tuple[Tensor, ...] = (x,)
        for layer in self.layers:
            x = layer(x)
            if self.way == "return":
                x, logits = x
                self.seen.append(logits)
            hidden += (x,)
        if self.way == "attribute":
            balance = sum(layer.balance for layer in self.layers)
        else:
            balance = torch.cat(self.seen, 1).softmax(-1).mean((0, 1)).square().sum()
        return Output(x, hidden, x.square().mean() + 0.1 * balance)


class SharedBias(nn.Module):
    """Something made of parameters before the blocks that every block takes."""

    class Layer(Block):
        def forward(self, x: Tensor, bias: dict[str, Any]) -> Tensor:  # type: ignore[override]
            return super().forward((x @ x.transpose(1, 2) + bias["of"][0]).softmax(-1) @ x)

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 1)
        self.scale = nn.Parameter(torch.ones(()))
        self.layers = nn.ModuleList([self.Layer() for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1])
        bias = self.table((places[:, None] - places).clamp(-4, 4) + 4)[..., 0] * self.scale
        for layer in self.layers:
            x = layer(x, {"of": (bias, None)})
        return x


class InPlace(nn.Module):
    """Changes in place: by blocks, between them, and of a tensor that collects what they return."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.act = nn.ReLU(inplace=True)
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(self.act(x))

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 8)
        self.layers = nn.ModuleList([self.Layer() for _ in range(4)])

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        collected = torch.zeros(4, *x.shape)
        x = self.stem(x)
        x += 1
        for i, layer in enumerate(self.layers):
            x = layer(x)
            collected[i] = x
            x = x.clone().mul_(2)
        return x, collected


class Narrowed(torch.autograd.Function):
    """A mean with a backward of its own, which is not that of what it computes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.mean(-1, keepdim=True).expand_as(x) * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 3


narrowed = Narrowed.apply


class OwnFunction(nn.Module):
    """An `autograd.Function` between the blocks, in which the fewest bytes would cross a cut."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + narrowed(layer(x))
        return x


class HookedSkip(nn.Module):
    """A hook that bounds a gradient which comes together from several stages."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        x = skip = self.layers[0](x)
        if x.requires_grad:
            x.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
        for layer in self.layers[1:]:
            x = layer(x).tanh() + skip
        return x


class NoList(nn.Module):
    """Children and no list."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = Block(), Block(), Block()
        self.last = nn.Linear(8, 2)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.first(x) + y
        return self.last(self.third(self.second(x)))


class ImageNet(nn.Module):
    """Convolutions in sequences, with batch normalisation inside and around the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3)
        self.norm = nn.BatchNorm2d(8)
        self.features = nn.Sequential(
            *(nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True)) for _ in range(4))
        )
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5))

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.features(self.norm(self.stem(images)).relu()))


class Checkpointed(nn.Module):
    """Blocks of which only the inputs are kept."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 8)
        self.blocks = nn.ModuleList([Block(dropout=0.2) for _ in range(4)])
        self.reentrant = reentrant
        self.checkpointed = True

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            if self.checkpointed:
                x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=self.reentrant)
            else:
                x = block(x)
        return x
