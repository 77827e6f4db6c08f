"""Models as they are, cut and run stage by stage in one process: every number is that of the uncut model."""

from __future__ import annotations

import random
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy
import pytest
import torch
import unsplit_models as models
from torch import Tensor, nn

from rpc_pipe.dependency import ConfigError
from rpc_pipe.model.cut import cut
from rpc_pipe.model.observed import Observed, observe
from rpc_pipe.model.stage import Stage
from rpc_pipe.model.trees import leaves, tensors
from rpc_pipe.workers.compute.randomness import preserved


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


def in_turn(stages: list[Stage], *args: Any, seed: Any = None, **kwargs: Any) -> Outcome:
    """Run forward and backward as a pipeline does: what passes between stages has no graph."""
    payload: Any = ()
    kept = []
    for stage in stages:
        arrived = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in payload]
        payload = stage.forward(arrived, args, kwargs, seed)
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


def stages_of(observed: Observed, count: int) -> list[Stage]:
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


@pytest.mark.parametrize("case", CASES)
def test_every_number_is_that_of_the_uncut_model(case):
    make, args, kwargs = CASES[case]
    torch.manual_seed(0)
    model = make()
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    observed = observe(model, args, kwargs)
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())
    counts = 1, 2, 3, observed.num_blocks
    outcomes = [in_turn(stages_of(observed, count), *args, **kwargs) for count in counts]
    expected = uncut(model, *args, **kwargs)
    for count, outcome in zip(counts, outcomes, strict=True):
        # Each stage sums the uses of a block of its own, before the stages' sums are added.
        several = observed.shared(cut(observed.num_blocks, count)) if case == "repeated block" else ()
        assert_same(outcome, expected, several)


def seeded(position: int, number: int) -> None:
    torch.manual_seed(1000 * position + number)


def assert_any_cut_is_the_same(model: nn.Module, *args: Any, **kwargs: Any) -> Outcome:
    observed = observe(model, args, kwargs)
    whole = in_turn(stages_of(observed, 1), *args, seed=seeded, **kwargs)
    for count in (2, observed.num_blocks):
        assert_same(in_turn(stages_of(observed, count), *args, seed=seeded, **kwargs), whole)
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
    with pytest.raises(ConfigError, match="use_reentrant=False"):
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
            payload = stage.forward(payload, [images], {})
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


def test_a_stage_holds_what_it_needs_under_the_names_of_the_whole():
    model = models.EncoderDecoder()
    observed = observe(model, [ids(2, 5), ids(2, 4)])
    ranges = [range(3), range(3, 6)]
    assert observed.shared(ranges) == {"embed.weight": [0, 1]}
    first, second = observed.stages(ranges)
    assert [block.name for block in first.blocks] == ["encoder.0", "encoder.1", "encoder.2"]
    assert [(tensor.shape, tensor.num_bytes) for tensor in first.hands_on] == [((2, 5, 8), 320)]
    assert {name.split(".")[0] for name in second.parameters} == {"embed", "decoder"}
    assert not second.hands_on
    stages = [observed.build(i, ranges) for i in range(2)]
    assert [stage.names for stage in stages] == [first.parameters, second.parameters]
    own = dict(stages[0].named_parameters())
    assert all(own[name] is parameter for name, parameter in model.named_parameters() if name in own)
    # The second one trains a copy: whoever has both sums the gradients.
    assert dict(stages[1].named_parameters())["embed.weight"] is not model.embed.weight


def test_blocks_may_be_named():
    model, x = models.Nested(), floats(3, 6)
    assert observe(model, [x], blocks="stages.1").num_blocks == 3
    named = observe(model, [x], blocks=["stem", "stages.2"])
    assert [block.name for block in named.blocks][:2] == ["stem", "stages.2.0"]
    with pytest.raises(ConfigError, match=r"'stage': the model has no module of this name"):
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

    first, _ = observe(Changing(), [floats(3, 8)]).stages([range(1), range(1, 2)])
    assert [tensor.shape for tensor in first.hands_on] == [(3, 8)]


class Asks(models.Nested):
    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return x * 2 if x.sum() > 0 else x


class Lists(models.Nested):
    def forward(self, x: Tensor) -> Tensor:
        losses: list[Tensor] = []
        x = self.stem(x)
        for block in self.stages[1]:
            x = block(x, losses)
        return x + sum(losses)

    class Adds(models.Block):
        def forward(self, x: Tensor, losses: list[Tensor]) -> Tensor:  # type: ignore[override]
            losses.append(x.mean())
            return super().forward(x)

    def __init__(self) -> None:
        super().__init__()
        self.stages[1] = nn.ModuleList([self.Adds() for _ in range(3)])


class Compiled(models.Nested):
    def __init__(self) -> None:
        super().__init__()
        self.stages[1][0].compile(backend="eager")


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (Asks, r"test_observed.py:\d+ needs the numbers of a tensor that depends on the model's parameters"),
        (Lists, "made in block stages.1.0 and left it otherwise than by its return value"),
        (Compiled, r"stages.1.0 was compiled with .compile\(\)"),
        (lambda: nn.Linear(6, 8), "has no parts to cut between"),
    ],
)
def test_what_cannot_be_cut_is_refused_with_its_place(make, says):
    with pytest.raises(ConfigError, match=says):
        observe(make(), [floats(3, 6)])


def test_a_forward_that_changes_its_way_by_itself_is_refused():
    class Alternates(models.Nested):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            type(self).calls += 1
            return super().forward(x.neg() if self.calls % 2 else x.abs())

    stage = observe(Alternates(), [floats(3, 6)]).build(0, [range(3), range(3, 6)])
    with pytest.raises(ConfigError, match=r"goes another way each time .*it must depend on its inputs alone"):
        stage.forward((), [floats(3, 6)], {})


def test_a_block_that_returns_another_shape_than_observed_is_refused():
    class Prunes(models.Block):
        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x[x[:, 0] > 0])

    model = nn.Sequential(nn.Linear(8, 8), Prunes(), nn.Linear(8, 8), nn.Linear(8, 8))
    x = floats(6, 8)
    stages = stages_of(observe(model, [x]), 2)
    payload = stages[0].forward((), [x], {})
    with pytest.raises(ConfigError, match=r"1 gave a tensor of shape \(\d, 8\), and \(6, 8\) when it was observed"):
        stages[1].forward(payload, [x], {})


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


def test_more_blocks_are_looked_for_where_more_are_wanted():
    model = models.NoList()
    x, y = floats(2, 8), floats(8)
    few = observe(model, [x], {"y": y}).num_blocks
    more = observe(model, [x], {"y": y}, at_least=few + 2)
    assert more.num_blocks >= few + 2
    assert_same(in_turn(stages_of(more, few + 2), x, y=y), uncut(model, x, y=y))


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


def test_forms_that_have_not_come_for_long_are_forgotten(monkeypatch):
    monkeypatch.setattr("rpc_pipe.model.stage._MOST_FORMS", 2)
    (stage,) = stages_of(observe(models.Nested(), [floats(1, 6)]), 1)
    for rows in (1, 2, 1, 3, 1):
        stage.forward((), [floats(rows, 6)], {})
    shapes = [form[1][1][0] for form, _ in stage._scripts]
    assert shapes == [torch.Size([3, 6]), torch.Size([1, 6])], "the one that was used last is kept longest"
