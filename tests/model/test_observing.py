"""What is seen of a model that is observed, where it may be cut, and what is refused."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import unsplit_models as models
from in_turn import assert_same, floats, ids, in_turn, stages_of, uncut
from refusals import refused
from torch import Tensor, nn

from rpc_pipe.model.observed_model import observe


def test_a_stage_holds_what_it_needs_under_the_names_of_the_whole():
    model = models.EncoderDecoder()
    observed = observe(model, [ids(2, 5), ids(2, 4)])
    ranges = [range(3), range(3, 6)]
    assert observed.shared(ranges) == {"embed.weight": [0, 1]}
    assert [block.name for block in observed.blocks[:3]] == ["encoder.0", "encoder.1", "encoder.2"]
    assert [[(tensor.shape, tensor.num_bytes) for tensor in sent] for sent in observed.crossing(ranges)] == [
        [((2, 5, 8), 320)]
    ]
    held = [[name for name, stages in observed.holders(ranges).items() if i in stages] for i in range(2)]
    assert {name.split(".")[0] for name in held[1]} == {"embed", "decoder"}
    stages = [observed.build(i, ranges) for i in range(2)]
    assert [[name for name, _ in stage.named_parameters()] for stage in stages] == held
    own = dict(stages[0].named_parameters())
    assert all(own[name] is parameter for name, parameter in model.named_parameters() if name in own)
    # The second one trains a copy: whoever has both sums the gradients.
    assert dict(stages[1].named_parameters())["embed.weight"] is not model.embed.weight


def test_blocks_may_be_named():
    model, x = models.Nested(), floats(3, 6)
    assert observe(model, [x], blocks="stages.1").num_blocks == 3
    named = observe(model, [x], blocks=["stem", "stages.2"])
    assert [block.name for block in named.blocks][:2] == ["stem", "stages.2.0"]
    with refused("blocks"):
        observe(model, [x], blocks="stage")


@pytest.mark.parametrize("wide", [True, False])
def test_a_cut_moves_to_where_the_fewest_bytes_cross(wide):
    class Changing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([nn.Linear(24, 8) if wide else nn.Linear(8, 24) for _ in range(2)])

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(torch.cat([x, x, x], 1)) if wide else block(x)[:, 8:16]
            return x

    (sent,) = observe(Changing(), [floats(3, 8)]).crossing([range(1), range(1, 2)])
    assert [tensor.shape for tensor in sent] == [(3, 8)]


class Asks(models.Nested):
    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return x * 2 if x.sum() > 0 else x


class AsksWritten(models.Nested):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.ReLU(inplace=True), self.stem)

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y * 2 if x.sum() > 0 else y


class Explains(models.Nested):
    def forward(self, x: Tensor) -> Tensor:
        raise RuntimeError("Output 0 is a view. This behavior is forbidden.\nYou can fix this by cloning it.")


class Compiled(models.Nested):
    def __init__(self) -> None:
        super().__init__()
        self.stages[1][0].compile(backend="eager")


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (Asks, r"test_observing.py:\d+ needs numbers that depend on parameters"),
        (Explains, r"^model Explains: its forward raised .* when it was run on shapes: Output 0 is a view$"),
        (Compiled, r"stages.1.0 was compiled in its place"),
        (lambda: torch.compile(models.Nested(), backend="eager"), "is torch.compile of the whole"),
        (lambda: nn.Linear(6, 8), "has no parts to cut between"),
    ],
)
def test_what_cannot_be_cut_is_refused_with_its_place(make, says):
    with refused("model"):
        observe(make(), [floats(3, 6)])


def test_a_decision_by_what_a_block_has_written_is_refused_where_stages_lack_it():
    observed = observe(AsksWritten(), [floats(3, 6)], blocks=["stem", "stages.1"])
    stages_of(observed, 1)[0].run((), [floats(3, 6)], {})
    with refused("model"):
        stages_of(observed, 2)[1].run((), [floats(3, 6)], {})


def test_stages_that_go_different_ways_are_told_so():
    class Drifts(models.Nested):
        skips = True

        def forward(self, x: Tensor) -> Tensor:
            y = self.stages[1][0](self.stem(x))
            x = self.stages[1][1](y)
            return self.stages[1][2](x) + (y if self.skips else 0)

    first, second = stages_of(observe(Drifts(), [floats(3, 6)]), 2)
    payload = first.run((), [floats(3, 6)], {})
    second.module.skips = False
    with refused("model"):
        second.run(payload, [floats(3, 6)], {})


def test_a_forward_that_changes_its_way_by_itself_is_refused():
    class Alternates(models.Nested):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            type(self).calls += 1
            return super().forward(x.neg() if self.calls % 2 else x.abs())

    stage = observe(Alternates(), [floats(3, 6)]).build(0, [range(3), range(3, 6)])
    with refused("model"):
        stage.run((), [floats(3, 6)], {})


def test_a_block_that_returns_another_shape_than_observed_is_refused():
    torch.manual_seed(0)  # rows are kept and dropped

    class Prunes(models.Block):
        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x[x[:, 0] > 0])

    model = nn.Sequential(nn.Linear(8, 8), Prunes(), nn.Linear(8, 8), nn.Linear(8, 8))
    x = floats(6, 8)
    stages = stages_of(observe(model, [x]), 2)
    payload = stages[0].run((), [x], {})
    with refused("model"):
        stages[1].run(payload, [x], {})


def test_the_generators_of_whoever_observes_are_left_as_they_were():
    class Draws(models.Tied):
        def forward(self, ids: Tensor) -> Any:  # type: ignore[override]
            return super().forward(ids, mask=torch.rand(ids.shape))

    model = Draws(dropout=0.1)
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    observe(model, [ids(2, 5)])
    assert torch.equal(torch.rand(3), expected)


def test_more_blocks_are_looked_for_where_more_are_wanted():
    model = models.NoList()
    x, y = floats(2, 8), floats(8)
    few = observe(model, [x], {"y": y}).num_blocks
    more = observe(model, [x], {"y": y}, at_least=few + 2)
    assert more.num_blocks >= few + 2
    assert_same(in_turn(stages_of(more, few + 2), x, y=y), uncut(model, x, y=y))


def test_forms_that_have_not_come_for_long_are_forgotten(monkeypatch):
    monkeypatch.setattr("rpc_pipe.model.replay.observed_stage._MOST_FORMS", 2)
    (stage,) = stages_of(observe(models.Nested(), [floats(1, 6)]), 1)
    for rows in (1, 2, 1, 3, 1):
        stage.run((), [floats(rows, 6)], {})
    sizes = [sizes for *_, sizes in stage._scripts]
    assert sizes == [(3, 6), (6,)], "the one that was used last is kept longest"


def test_a_script_holds_no_graph_of_the_forward_it_was_made_from():
    # Each held the graph of a whole observed forward, and with it copies of the batch's masks: 35 MB of 4,096 tokens.
    x = floats(97, 6)
    stage = observe(models.Nested(), [x]).build(0, [range(2), range(2, 6)])
    stage.run((), (x,), {})
    gc.collect()
    found = (each for each in gc.get_objects() if type(each) is Tensor and not each.is_nested)
    alike = [each for each in found if each.shape == x.shape]
    assert [each is x for each in alike] == [True]
