"""Inputs of sizes that a model has not met: a script that was observed at a few sizes serves the others."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import unsplit_models as models
from in_turn import assert_same, floats, ids, in_turn, stages_of, uncut
from torch import Tensor, nn

from rpc_pipe import Pipeline, Training
from rpc_pipe.model.observed_model import observe
from rpc_pipe.model.replay import observed_stage
from rpc_pipe.model.replay.script_family import predictions
from rpc_pipe.tracing.run_summary import summary
from rpc_pipe.workers.compute.modules.module_state import ModuleState
from rpc_pipe.workers.hooks import Listener, StepRecord

WIDTH = 8


@pytest.fixture
def observed(monkeypatch):
    """The lengths of the inputs of each observation by a stage."""
    lengths: list[int] = []
    observe_forward = observed_stage.observe_forward

    def counted(skeleton: Any, args: Any, kwargs: Any) -> Any:
        given = (each for each in (*args, *kwargs.values()) if isinstance(each, Tensor) and each.dim() > 1)
        lengths.append(next(given).shape[1])
        return observe_forward(skeleton, args, kwargs)

    monkeypatch.setattr(observed_stage, "observe_forward", counted)
    return lengths


class Positions(nn.Module):
    """Asks for sizes around its blocks: of its inputs, and of results of blocks of other stages."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, WIDTH)
        self.blocks = nn.ModuleList(models.Block(WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, 11)

    def around(self, x: Tensor) -> Tensor:
        return x

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.around(self.embed(ids))
        for block in self.blocks:
            length = x.shape[1]
            x = block(x + torch.arange(length)[:, None] / (length + 1))
        logits = self.head(x)[:, -labels.shape[1] :]
        return nn.functional.cross_entropy(logits.reshape(-1, 11), labels[:, -logits.shape[1] :].reshape(-1))


def follow(model: nn.Module, shapes: Any, count: int = 2) -> None:
    """Compare stages with the uncut model, for ids and labels of one shape after another."""
    stages = stages_of(observe(model, [ids(2, 5), ids(2, 5)]), count)
    for shape in shapes:
        args = ids(*shape), ids(*shape)
        assert_same(in_turn(stages, *args), uncut(model, *args))


def test_a_length_that_is_new_is_not_observed_after_the_third(observed):
    follow(Positions(), [(2, length) for length in (5, 9, 7, 30, 2, 8, 100)])
    assert observed == [*[5] * 2, *[9] * 2, *[7] * 2]


def test_a_number_of_rows_is_known_after_the_third_too(observed):
    follow(Positions(), [(2, 5), (2, 9), (2, 8), (3, 6), (4, 7), (9, 11), (5, 4)])
    assert observed == [*[5] * 2, *[9] * 2, *[8] * 2, *[6] * 2, *[7] * 2]


def test_one_row_and_one_token_are_forms_of_their_own(observed):
    # torch broadcasts them, so a forward may do with them what it does with no other size.
    follow(Positions(), [(2, 5), (2, 9), (2, 7), (1, 8), (2, 1), (2, 6)])
    assert observed == [*[5] * 2, *[9] * 2, *[7] * 2, *[8] * 2, *[1] * 2]


def test_a_window_that_a_longer_sequence_exceeds_is_observed(observed):
    class Windowed(Positions):
        def around(self, x: Tensor) -> Tensor:
            return x[:, -10:]

    follow(Windowed(), [(2, length) for length in (5, 9, 7, 6, 12, 13)])
    assert 6 not in observed
    assert {12, 13} <= set(observed)


def test_another_way_for_longer_sequences_is_observed_and_then_known(observed):
    class Decides(Positions):
        def around(self, x: Tensor) -> Tensor:
            return x if x.shape[1] < 10 else x.flip(1)

    follow(Decides(), [(2, length) for length in (5, 9, 7, 12, 13, 14, 15, 6, 16)])
    assert sorted(set(observed)) == [5, 7, 9, 12, 13, 14]


def test_halves_are_observed_where_they_are_not_whole(observed):
    class Halves(Positions):
        def around(self, x: Tensor) -> Tensor:
            return x[:, : x.shape[1] // 2]

    follow(Halves(), [(2, length) for length in (4, 12, 8, 20, 9, 30)])
    assert not {20, 30} & set(observed[: observed.index(9)])
    assert 9 in observed


def test_a_block_that_leaves_the_line_does_not_train_on_a_guess(observed):
    class Prunes(models.Block):
        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x[:, :6])

    class Pruned(Positions):
        def __init__(self) -> None:
            super().__init__()
            self.blocks[0] = Prunes(WIDTH)

    follow(Pruned(), [(2, length) for length in (3, 4, 5, 9, 11, 2)])
    assert {9, 11} <= set(observed)


def test_an_int_among_the_inputs_is_a_size(observed):
    class Counted(models.Nested):
        def forward(self, x: Tensor, count: int) -> Tensor:  # type: ignore[override]
            return super().forward(x) / count

    model = Counted()
    stages = stages_of(observe(model, [floats(3, 6), 5]), 2)
    for count in (5, 7, 9, 11, 12):
        assert_same(in_turn(stages, floats(3, 6), count), uncut(model, floats(3, 6), count))
    assert observed == [6] * 4, "two counts show that no number depends on it"


def test_slices_of_new_lengths_are_not_observed(observed):
    torch.manual_seed(0)
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        num_hidden_layers=2, hidden_size=8, intermediate_size=8, num_attention_heads=2, vocab_size=32
    )
    training = Training(optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    pipe = Pipeline(
        transformers.LlamaForCausalLM(config), training=training, num_microbatches=1, num_workers=2, slices=2
    )
    counts = []
    for length in (16, 24, 40, 32):
        rows = torch.randint(32, (2, length))
        pipe.step({"input_ids": rows, "labels": rows})
        counts.append(len(observed))
    assert counts[-1] == counts[2]


def test_formulas_that_disagree_leave_a_number_open():
    seen = [[2, 20], [2, 30]]
    assert predictions(seen, {(64, 64)}, [2, 50]) == {(64, 64): 64}
    assert predictions(seen, {(20, 30)}, [2, 50]) is None, "by the length or its square"
    assert predictions([*seen, [2, 70]], {(40, 60, 140)}, [2, 50]) == {(40, 60, 140): 100}
    assert predictions([*seen, [2, 70]], {(40, 60, 140)}, [3, 50]) is None, "rows have not varied"
    assert predictions([[8, 20], [4, 40], [2, 80]], {(160, 160, 160)}, [3, 50]) is None, "always 160 tokens"
    crossed = list(itertools.product((2, 3), (20, 30, 50)))
    column = tuple(rows * length for rows, length in crossed)
    assert predictions([list(each) for each in crossed], {column}, [7, 11]) == {column: 77}


def test_a_summary_counts_what_was_observed():
    class Records(Listener):
        last = StepRecord(0, 0, 0, 0)

        def step_finished(self, record: StepRecord) -> None:
            self.last = record

    training = Training(optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    pipe, listener = Pipeline(Positions(), training=training, num_microbatches=1, num_workers=2), Records()
    pipe.listen(lambda worker: listener)
    for length in (5, 7, 9, 11):
        pipe.step((ids(2, length), ids(2, length)))
    assert listener.last.observations == 3
    assert listener.last.observed_ns > 0
    found = {"steps": 4, "workers": 2, "step_ms": 9.0, "loss": 1.0, "layout": "", "lost": {"line": "", "sentence": ""}}
    lines = [summary(found), summary({**found, "observations": 6, "observed_s": 1.23})]
    assert ["observed 6 times: 1.2 s of workers" in each for each in lines] == [False, True]


def test_a_known_length_needs_no_copy_of_all_attributes(monkeypatch):
    """Each new length copied the attributes of all modules, which with adapters took longer than the padding saved."""
    copied, made, model = [], ModuleState.__init__, Positions()

    def noting(self, modules, *more, **how):
        copied.extend([1] * (len(modules := list(modules)) == len(list(model.modules()))))
        made(self, modules, *more, **how)

    monkeypatch.setattr(ModuleState, "__init__", noting)
    stages = stages_of(observe(model, [ids(2, 5), ids(2, 5)]), 2)
    counts = []
    for length in (5, 9, 7, 30, 12, 100):
        args = ids(2, length), ids(2, length)
        assert_same(in_turn(stages, *args), uncut(model, *args))
        counts.append(len(copied))
    assert counts[0] and counts[2:] == [counts[2]] * 4
