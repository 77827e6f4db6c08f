"""Models whose compute is real: layers to cut, their data, and what they cost on this machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from importlib.util import find_spec
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from rpc_pipe.demo.corpus import default_text
from rpc_pipe.demo.gpt import VOCABULARY, gpt_layers, next_byte_loss
from rpc_pipe.demo.settings import GPTConfig
from rpc_pipe.dependency import Action, B, F, I, Kind, R, W
from rpc_pipe.planning.unequal import group_rows

from .measured_layers import measure_layers
from .systems import Microbatch, Workload

#: ms by kind, of each layer
Costs = list[Mapping[Kind, float]]

#: targets that no loss counts
_IGNORED = -100


@dataclass(frozen=True)
class Model:
    """Layers, data and loss."""

    name: str
    layers: Sequence[Callable[[], nn.Module]]
    loss: Callable[[Any, Any], Any]
    batch: Callable[[int], list[Microbatch]]
    padded: Callable[[int], list[Microbatch]] | None = None
    summed: bool = False

    def workload(self, cut: Callable[[int], Sequence[int]]) -> Workload:
        """Cut the layers into as many stages as asked; `cut(count)` says how many layers each has."""

        def stage(index: int, count: int) -> nn.Module:
            sizes = cut(count)
            start = sum(sizes[:index])
            return nn.Sequential(*(self._build(i) for i in range(start, start + sizes[index])))

        return Workload(stage, self.loss, self.batch, self.padded, self.summed)

    def _build(self, index: int) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(index)
            return self.layers[index]()

    def costs(self, padded: bool = False) -> list[Costs]:
        """Measure each layer alone, on one thread, for each microbatch of the first batch: ms by kind."""
        torch.set_num_threads(1)
        modules = [self._build(i) for i in range(len(self.layers))]
        batch = self.padded(0) if padded and self.padded else self.batch(0)
        found: dict[torch.Size, Costs] = {}
        for x, y in batch:
            if x.shape not in found:
                measured = measure_layers(modules, x, target=y, loss_fn=self.loss, repeats=5)
                found[x.shape] = [cost.times for cost in measured]
        return [found[x.shape] for x, _ in batch]

    def num_parameters(self) -> list[int]:
        """Count each layer's parameters."""
        return [sum(p.numel() for p in self._build(i).parameters()) for i in range(len(self.layers))]


def balanced(weights: Sequence[float], count: int) -> list[int]:
    """Cut into `count` runs of layers so that the heaviest is as light as can be."""
    sums = [0.0, *accumulate(weights)]

    @lru_cache(None)
    def best(end: int, parts: int) -> tuple[float, tuple[int, ...]]:
        if parts == 1:
            return sums[end], (end,)
        found = []
        for start in range(parts - 1, end):
            heaviest, sizes = best(start, parts - 1)
            found.append((max(heaviest, sums[end] - sums[start]), (*sizes, end - start)))
        return min(found)

    return list(best(len(weights), count)[1])


def stage_cost(costs: Sequence[Costs], sizes: Sequence[int]) -> Callable[[Action], float]:
    """Return what an action costs, given each microbatch's costs, when the stages have `sizes` layers."""
    ends = list(accumulate(sizes))

    def cost(action: Action) -> float:
        kind = F if action.kind is R else action.kind
        if kind not in (F, B, I, W):
            return 0
        end = ends[action.stage]
        return sum(layer[kind] for layer in costs[action.microbatch][end - sizes[action.stage] : end])

    return cost


# --- BERT


class _Embeddings(nn.Module):
    def __init__(self, vocabulary: int, width: int, positions: int) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(positions, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        out: Tensor = self.norm(self.words(tokens) + self.positions(places))
        return out


def _encoder_layer(width: int, heads: int) -> nn.Module:
    if find_spec("transformers") is None:
        return nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, "gelu", batch_first=True)
    from transformers import BertConfig
    from transformers.models.bert.modeling_bert import BertLayer

    config = BertConfig(
        hidden_size=width,
        num_attention_heads=heads,
        intermediate_size=4 * width,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    config._attn_implementation = "sdpa"
    layer: nn.Module = BertLayer(config)
    return layer


class _MaskedLanguageHead(nn.Module):
    def __init__(self, width: int, vocabulary: int) -> None:
        super().__init__()
        self.transform = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width))
        self.decoder = nn.Linear(width, vocabulary)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.decoder(self.transform(x))
        return out


def bert(microbatches: int) -> Model:
    """BERT-base's shape at a third of its width and half its depth, sequences of 128, two rows a microbatch."""
    width, heads, depth, vocabulary, length, rows = 256, 4, 6, 8192, 128, 2
    layers: list[Callable[[], nn.Module]] = [partial(_Embeddings, vocabulary, width, length)]
    layers += [partial(_encoder_layer, width, heads)] * depth
    layers += [partial(_MaskedLanguageHead, width, vocabulary)]

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    @lru_cache(1)
    def batch(_: int) -> list[Microbatch]:
        draw = torch.Generator().manual_seed(0)

        def tokens() -> Tensor:
            return torch.randint(vocabulary, (rows, length), generator=draw)

        return [(tokens(), tokens()) for _ in range(microbatches)]

    return Model("bert", layers, loss, lambda _: batch(0))


# --- ResNet


class _Bottleneck(nn.Module):
    """He et al. 2016, with batch normalisation."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        inner = after // 4
        self.body = nn.Sequential(
            nn.Conv2d(before, inner, 1, bias=False), nn.BatchNorm2d(inner), nn.ReLU(),
            nn.Conv2d(inner, inner, 3, stride, 1, bias=False), nn.BatchNorm2d(inner), nn.ReLU(),
            nn.Conv2d(inner, after, 1, bias=False), nn.BatchNorm2d(after),
        )  # fmt: skip
        self.shortcut: nn.Module = nn.Identity()
        if before != after or stride != 1:
            self.shortcut = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.body(x) + self.shortcut(x))


def _bottleneck(before: int, after: int, stride: int) -> nn.Module:
    if find_spec("transformers") is None:
        return _Bottleneck(before, after, stride)
    from transformers.models.resnet.modeling_resnet import ResNetBottleNeckLayer

    layer: nn.Module = ResNetBottleNeckLayer(before, after, stride=stride)
    return layer


def resnet(microbatches: int) -> Model:
    """ResNet-50's stack of bottlenecks (3, 4, 6, 3) at half its width, four images of 64 x 64 a microbatch."""
    widths, depths, rows, classes = (128, 256, 512, 1024), (3, 4, 6, 3), 4, 100
    layers: list[Callable[[], nn.Module]] = [
        lambda: nn.Sequential(
            nn.Conv2d(3, 32, 7, 2, 3, bias=False), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(3, 2, 1)
        )
    ]
    before = 32
    for width, depth in zip(widths, depths, strict=True):
        for i in range(depth):
            layers.append(partial(_bottleneck, before, width, 2 if i == 0 and width > 128 else 1))
            before = width
    layers.append(lambda: nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], classes)))

    @lru_cache(1)
    def batch(_: int) -> list[Microbatch]:
        draw = torch.Generator().manual_seed(0)
        return [
            (torch.randn(rows, 3, 64, 64, generator=draw), torch.randint(classes, (rows,), generator=draw))
            for _ in range(microbatches)
        ]

    return Model("resnet", layers, functional.cross_entropy, lambda _: batch(0))


# --- GPT


def bytewise_gpt(microbatches: int) -> Model:
    """The demo's GPT over bytes with six blocks of 192, sequences of 128, four rows a microbatch."""
    config, rows = GPTConfig(width=192, depth=6, heads=4, context=128), 4

    @lru_cache(1)
    def batch(_: int) -> list[Microbatch]:
        draw = torch.Generator().manual_seed(0)
        text = torch.randint(VOCABULARY, (microbatches, rows, config.context + 1), generator=draw)
        return [(rows[:, :-1].contiguous(), rows[:, 1:].contiguous()) for rows in text]

    return Model("gpt", gpt_layers(config), next_byte_loss, lambda _: batch(0))


# --- ragged text

_ROWS, _LONGEST, _BATCHES = 4, 256, 8


def ragged(microbatches: int) -> Model:
    """A byte-level GPT on lines of real text, four lines a microbatch, of at most 256 bytes.

    Microbatches are made of lines of like length and padded only to their own longest.
    """

    @lru_cache(None)
    def own_length(b: int) -> list[Microbatch]:
        return [_tensors(lines, max(map(len, lines)) - 1) for lines in _by_four(microbatches, b)]

    @lru_cache(None)
    def one_length(b: int) -> list[Microbatch]:
        length = max(len(line) for batch in _lines(microbatches) for line in batch) - 1
        return [_tensors(lines, length) for lines in _by_four(microbatches, b)]

    return Model("ragged", gpt_layers(_text_config()), _summed_loss, own_length, one_length, summed=True)


def ragged_by_length(microbatches: int) -> Model:
    """The same lines, grouped by their lengths: as many tokens in a microbatch as the longest one of four lines."""

    @lru_cache(None)
    def grouped(b: int) -> list[Microbatch]:
        lines = _lines(microbatches)[b % _BATCHES]
        lengths = [len(line) - 1 for line in lines]
        fixed = sum(lengths) / 32  # as `batches_by_length` has it for two stages
        groups = group_rows(
            lengths, lambda rows, length: fixed + rows * length, most_tokens=_ROWS * max(lengths), num_stages=2
        )
        return [_tensors([lines[row] for row in group], max(lengths[row] for row in group)) for group in groups]

    return Model("ragged", gpt_layers(_text_config()), _summed_loss, grouped, summed=True)


def ragged_packed(microbatches: int) -> Model:
    """The same lines, packed first-fit into rows of at most 256 bytes, which attend inside of lines alone."""

    @lru_cache(None)
    def packed(b: int) -> list[Microbatch]:
        rows: list[list[bytes]] = []
        for line in sorted(_lines(microbatches)[b % _BATCHES], key=len, reverse=True):
            fitting = (row for row in rows if sum(len(each) - 1 for each in row) + len(line) - 1 <= _LONGEST)
            row = next(fitting, None)
            if row is None:
                rows.append(row := [])
            row.append(line)
        return [_packed(rows[at : at + 1]) for at in range(len(rows))]

    config = _text_config()
    layers = gpt_layers(config)
    layers = [
        partial(_PackedEmbedding, layers[0]),
        *(partial(_PackedBlock, block) for block in layers[1:-1]),
        partial(_PackedHead, layers[-1]),
    ]
    return Model("ragged", layers, _summed_loss, packed, summed=True)


def _text_config() -> GPTConfig:
    return GPTConfig(width=192, depth=6, heads=4, context=_LONGEST)


@lru_cache(1)
def _lines(microbatches: int) -> list[list[bytes]]:
    """Return the lines of each batch."""
    text = b"".join(path.read_bytes() for path in default_text()[:40])
    lines = [line[: _LONGEST + 1] for line in text.splitlines() if len(line.strip()) > 1]
    draw = torch.Generator().manual_seed(0)
    size = microbatches * _ROWS
    chosen = torch.randperm(len(lines), generator=draw)[: _BATCHES * size].tolist()
    return [[lines[i] for i in chosen[b * size : (b + 1) * size]] for b in range(_BATCHES)]


def _by_four(microbatches: int, b: int) -> list[list[bytes]]:
    own = sorted(_lines(microbatches)[b % _BATCHES], key=len)
    return [own[m * _ROWS : (m + 1) * _ROWS] for m in range(microbatches)]


def _tensors(lines: list[bytes], length: int) -> Microbatch:
    x = torch.zeros(len(lines), length, dtype=torch.long)
    y = torch.full((len(lines), length), _IGNORED)
    for row, line in enumerate(lines):
        ids = torch.frombuffer(bytearray(line), dtype=torch.uint8).long()
        x[row, : len(ids) - 1], y[row, : len(ids) - 1] = ids[:-1], ids[1:]
    return x, y


def _packed(rows: list[list[bytes]]) -> Microbatch:
    """Return tokens, positions in their lines and numbers of lines as one tensor, and targets."""
    length = max(sum(len(line) - 1 for line in row) for row in rows)
    x, y = torch.zeros(len(rows), 3, length, dtype=torch.long), torch.full((len(rows), length), _IGNORED)
    x[:, 2] = -1
    for number, row in enumerate(rows):
        at = 0
        for which, line in enumerate(row):
            ids = torch.frombuffer(bytearray(line), dtype=torch.uint8).long()
            count = len(ids) - 1
            x[number, 0, at : at + count], y[number, at : at + count] = ids[:-1], ids[1:]
            x[number, 1, at : at + count], x[number, 2, at : at + count] = torch.arange(count), which
            at += count
    return x, y


def _summed_loss(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    total = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=_IGNORED, reduction="sum")
    return total, (targets != _IGNORED).sum()


class _PackedEmbedding(nn.Module):
    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.inner: Any = make()

    def forward(self, packed: Tensor) -> tuple[Tensor, Tensor]:
        tokens, positions, lines = packed.unbind(1)
        causal = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool).tril()
        mask = (lines[:, None, :, None] == lines[:, None, None, :]) & causal
        return self.inner.token(tokens) + self.inner.position(positions), mask


class _PackedBlock(nn.Module):
    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.inner: Any = make()
        del self.inner._modules["attention"]
        self.inner.__dict__["attention"] = self._attend

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, None]:
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=self._mask), None

    def forward(self, given: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x, self._mask = given
        return self.inner(x), given[1]


class _PackedHead(nn.Module):
    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.inner: Any = make()

    def forward(self, given: tuple[Tensor, Tensor]) -> Tensor:
        out: Tensor = self.inner(given[0])
        return out
