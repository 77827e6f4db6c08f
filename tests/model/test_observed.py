"""Models as they are, cut and run stage by stage in one process: every number is that of the uncut model."""

from __future__ import annotations

import random
from typing import Any

import numpy
import pytest
import torch
import unsplit_models as models
from in_turn import ALL_ONES, CASES, PADDED, Outcome, assert_same, floats, ids, in_turn, stages_of, uncut
from refusals import refused
from torch import Tensor, nn
from unkind_layers import WIDTH, Penalty

from rpc_pipe.model.observed_model import observe
from rpc_pipe.model.sharding import cut
from rpc_pipe.workers.compute.modules.randomness import preserved, python_too


@pytest.mark.parametrize("case", CASES)
def test_every_number_is_that_of_the_uncut_model(case):
    make, args, kwargs = CASES[case]
    torch.manual_seed(0)
    model = make()
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    observed = observe(model, args, kwargs)
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())
    counts = {1, observed.num_blocks}  # three stages: test_whole.py
    outcomes = [in_turn(stages_of(observed, count), *args, **kwargs) for count in counts]
    expected = uncut(model, *args, **kwargs)
    for count, outcome in zip(counts, outcomes, strict=True):
        # Each stage sums the uses of a block of its own, before the stages' sums are added.
        several = observed.shared(cut(observed.num_blocks, count)) if case.startswith("repeated block") else ()
        assert_same(outcome, expected, several)


def seeded(position: int, number: int) -> None:
    torch.manual_seed(1000 * position + number)


def assert_any_cut_is_the_same(model: nn.Module, *args: Any, **kwargs: Any) -> Outcome:
    observed = observe(model, args, kwargs)
    whole = in_turn(stages_of(observed, 1), *args, seed=python_too(seeded), **kwargs)
    for count in (2, observed.num_blocks):
        assert_same(in_turn(stages_of(observed, count), *args, seed=python_too(seeded), **kwargs), whole)
    return whole


def test_dropout_in_and_around_the_blocks_depends_on_the_place_alone():
    model = models.Tied(dropout=0.3)
    batch = {"ids": ids(2, 5), "labels": ids(2, 5)}
    whole = assert_any_cut_is_the_same(model, **batch)
    assert not torch.equal(whole.loss, uncut(model.eval(), **batch).loss)


def test_checkpointed_blocks_compute_again_with_the_same_random_numbers():
    model = models.Checkpointed(reentrant=False)
    x = floats(3, 8)
    whole = assert_any_cut_is_the_same(model, x)
    plain = models.Checkpointed(reentrant=False)
    plain.load_state_dict(model.state_dict())
    plain.checkpointed = False
    assert_same(assert_any_cut_is_the_same(plain, x), whole)


def test_reentrant_checkpoints_around_blocks_of_other_stages_are_refused():
    model, x = models.Checkpointed(reentrant=True), floats(3, 8)
    observed = observe(model, [x])
    with refused("model"):
        in_turn(stages_of(observed, 2), x)


@pytest.mark.filterwarnings("ignore")
def test_compiled_blocks_stay_compiled():
    model, x = models.Nested(), floats(3, 6)
    seen = []

    def backend(graph: Any, inputs: Any) -> Any:
        seen.append(graph)
        return graph.forward

    expected = uncut(model, x)
    for stage in model.stages:
        for i, block in enumerate(stage):
            stage[i] = torch.compile(block, backend=backend)
    observed = observe(model, [x])
    assert observed.num_blocks == 6
    assert not seen
    found = in_turn(stages_of(observed, 3), x)
    assert seen
    grads = {name.replace("_orig_mod.", ""): grad for name, grad in found.grads.items()}
    assert_same(Outcome(found.output, found.loss, grads), expected)


def test_numbers_drawn_by_python_depend_on_the_place_alone():
    class Noisy(models.Nested):
        def forward(self, x: Tensor) -> Tensor:
            kept = [random.random() < 0.5 for _ in range(6)]
            return super().forward(x * torch.tensor(kept)) * random.random() + float(numpy.random.rand())

    with preserved(torch.device("cpu")):
        assert_any_cut_is_the_same(Noisy(), floats(3, 6))


def test_shapes_and_ways_may_change_with_every_microbatch():
    model = models.Tied()
    observed = observe(model, [ids(2, 5)], {"mask": PADDED})
    stages = stages_of(observed, 3)
    for mask in (PADDED, ALL_ONES, PADDED, torch.ones(3, 7), torch.ones(1, 2), None, PADDED):
        tokens = ids(2, 5) if mask is None else ids(*mask.shape)
        assert_same(in_turn(stages, tokens, mask=mask), uncut(model, tokens, mask=mask))


def test_what_is_chosen_by_the_numbers_of_a_field_may_have_any_size():
    class Chosen(models.Nested):
        def forward(self, x: Tensor, rows: Tensor) -> Tensor:  # type: ignore[override]
            y = super().forward(x[rows.nonzero()[:, 0]])
            return y * rows.sum().item() + self.between(y)[: int(rows.sum())]

    model = Chosen()
    stages = stages_of(observe(model, [floats(4, 6), torch.ones(4)]), 3)
    for rows in ([1.0, 1, 1, 1], [1, 0, 0, 1], [0, 0, 1, 0], [1, 0, 0, 1]):
        args = floats(4, 6), torch.tensor(rows)
        assert_same(in_turn(stages, *args), uncut(model, *args))


class Around(nn.Module):
    """Does something at the border of two stages, with what the batch is."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, batch: Tensor) -> Tensor:
        x = self.layers[1](self.layers[0](batch))
        return self.layers[3](self.layers[2](self.around(x, batch)))

    def around(self, x: Tensor, batch: Tensor) -> Tensor:
        raise NotImplementedError


def test_stages_come_to_a_decision_behind_which_something_else_crosses():
    class Decides(Around):
        def around(self, x: Tensor, batch: Tensor) -> Tensor:
            return x * 0.9 if bool(batch.sum() > 0) else self.norm(x)

    class Chooses(Around):
        def around(self, x: Tensor, batch: Tensor) -> Tensor:
            return x * 0.9 if batch.sum().nonzero().numel() else self.norm(x)

    class Skips(Around):
        def forward(self, batch: Tensor) -> Tensor:
            y = self.layers[0](batch)
            x = self.layers[1](y)
            short = (y * 2).sum()  # only on one of the ways it is less than what it is made of
            x = self.layers[2](x)
            if bool(batch.sum() > 0):
                x = x + y
            return self.layers[3](x + short if bool(batch[0, 0] > 0) else x)

    minus = -torch.ones(3, WIDTH)
    for make, other in ((Decides, minus), (Chooses, torch.zeros(3, WIDTH)), (Skips, minus)):
        model = make()
        stages = stages_of(observe(model, [torch.ones(3, WIDTH)]), 2)
        for batch in (torch.ones(3, WIDTH), other, torch.ones(3, WIDTH), other):
            assert_same(in_turn(stages, batch), uncut(model, batch))


def test_what_asks_for_a_gradient_in_its_forward_sees_hooks_of_the_stage_before():
    class Hangs(Around):
        def __init__(self) -> None:
            super().__init__()
            self.layers[2] = Penalty()

        def around(self, x: Tensor, batch: Tensor) -> Tensor:
            x = x * 1
            x.register_hook(lambda grad: grad * 0.5)
            return x

    model, x = Hangs(), floats(3, WIDTH)
    for count in (2, 4):
        assert_same(in_turn(stages_of(observe(model, [x], blocks="layers"), count), x), uncut(model, x))


def test_evaluation_is_the_same_too():
    model = models.ImageNet()
    images = floats(4, 3, 8, 8)
    stages = stages_of(observe(model, [images]), 3)
    model.eval()
    for stage in stages:
        stage.module.eval()
    with torch.no_grad():
        payload: Any = ()
        for stage in stages:
            payload = stage.run(payload, [images], {})
        assert torch.equal(payload, model(images))


def test_autocast_around_the_forward_is_the_same_too():
    model = models.Tied()
    batch = {"ids": ids(2, 5), "labels": ids(2, 5)}
    stages = stages_of(observe(model, (), batch), 3)
    with torch.autocast("cpu", torch.bfloat16):
        assert_same(in_turn(stages, **batch), uncut(model, **batch))


def test_inputs_that_the_model_writes_are_left_to_the_other_stages():
    class Centred(models.Nested):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.sub_(x.mean())) + x.sum()

    model, x = Centred(), floats(3, 6)
    stages = stages_of(observe(model, [x]), 3)
    assert torch.equal(x, floats(3, 6))
    found = in_turn(stages, x)
    assert torch.equal(x, floats(3, 6))
    assert_same(found, uncut(model, x))


def test_a_block_that_needs_numbers_to_be_observed_gets_some():
    """JetMoE sizes what its experts get by a list of numbers."""

    class Sizes(models.Block):
        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            count = (x.sum(1) > 0).long().bincount(minlength=2).tolist()
            first, second = x.split(count)
            return super().forward(torch.cat([first, second]))

    model = models.Nested()
    model.stages[1] = nn.ModuleList([Sizes() for _ in range(3)])
    x = floats(3, 6)
    observed = observe(model, [x])
    assert observed.num_blocks == 6
    assert_same(in_turn(stages_of(observed, 3), x), uncut(model, x), ["between.weight", "between.bias"])


def test_a_decision_beside_the_blocks_may_stay_in_a_block_of_its_own():
    """I-BERT quantizes its embeddings by their numbers."""

    class Decides(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            x = super().forward(x)
            return x * 2 if x.min() < -100 else x

    model = models.Nested()
    model.stem = Decides(6, 8)
    x = floats(3, 6)
    observed = observe(model, [x])
    assert observed.blocks[0].name == "stem"
    assert_same(in_turn(stages_of(observed, 3), x), uncut(model, x), ["between.weight", "between.bias"])


def test_a_first_forward_may_change_the_model_for_good():
    """BigBird takes another attention for good when it has seen that its input is short."""

    class Settles(models.Nested):
        settled = False

        def forward(self, x: Tensor) -> Tensor:
            if not self.settled:
                self.settled = True
                x = x + torch.zeros(1)
            return super().forward(x)

    model, x = Settles(), floats(3, 6)
    stages = stages_of(observe(model, [x]), 2)
    assert_same(in_turn(stages, x), uncut(model, x), ["between.weight", "between.bias"])


def test_tensors_that_a_block_makes_of_nothing_may_leave_it():
    """T5's cross-attention makes its bias of zeros and hands it to the other blocks."""

    class Zeros(models.Block):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
            return super().forward(x), torch.zeros(1, 8)

    class Hands(models.Nested):
        def forward(self, x: Tensor) -> Tensor:
            x, zeros = self.stages[0][0](self.stem(x))
            for block in self.stages[1]:
                x = block(x + zeros)
            return x

    model = Hands()
    model.stages[0][0] = Zeros()
    x = floats(3, 6)
    assert_same(in_turn(stages_of(observe(model, [x]), 3), x), uncut(model, x))


def test_a_forward_that_is_run_again_has_written_its_buffers_once():
    """Classifiers of Hugging Face note behind their blocks, in the first forward, what kind of labels they see."""

    class Notes(models.ImageNet):
        kind = None

        def forward(self, *args: Any) -> Any:
            output = super().forward(*args)
            if self.kind is None:
                self.kind = "noted"
                output = output + torch.zeros(1)
            return output

    model, images = Notes(), floats(4, 3, 8, 8)
    observed = observe(model, [images])
    ranges = cut(observed.num_blocks, 2)
    stages = [observed.build(stage, ranges) for stage in range(2)]
    in_turn(stages, images)
    uncut(model, images)
    state = {}
    for stage in stages:
        named = dict(stage.module.named_buffers())
        state |= {name: named[name] for name in observed.own_buffers(stage.index, ranges)}
    for name, buffer in model.named_buffers():
        assert torch.equal(state[name], buffer), name
