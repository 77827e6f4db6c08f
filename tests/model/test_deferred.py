"""Models made by a function: each stage computes its own parameters, and only those."""

from __future__ import annotations

import copy

import numpy
import torch
import unsplit_models as models
from processes import python
from refusals import refused
from torch import Tensor, nn

from rpc_pipe.model.deferred import DeferredModel
from rpc_pipe.model.observe.placeholder import Placeholder
from rpc_pipe.model.observed_model import observe


class Elaborate(nn.Module):
    """Initialises itself in every way that people do."""

    def __init__(self, width: int = 160) -> None:
        super().__init__()
        rates = [rate.item() for rate in torch.linspace(0, 0.1, 4)]
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(width, width), nn.Dropout(rate)) for rate in rates])
        self.layers.append(copy.deepcopy(self.layers[0]))
        self.scaled = nn.Parameter(torch.randn(width, width) * width**-0.5)
        self.orthogonal = nn.Parameter(nn.init.orthogonal_(torch.empty(width, width)))
        self.embed = nn.Embedding(width, width, padding_idx=1)
        self.tied = nn.Linear(width, width, bias=False)
        self.tied.weight = self.embed.weight
        self.of_numbers = nn.Parameter(torch.from_numpy(numpy.random.rand(width, width)).float())
        self.rounded = nn.Linear(width, width).to(torch.bfloat16)
        self.register_buffer("table", torch.arange(width)[:, None] / torch.arange(1, width + 1), persistent=False)
        self.chosen = {"signs": torch.randn(width, width).sign()}
        for layer in self.layers:
            nn.init.trunc_normal_(layer[0].weight, std=0.02)
            with torch.no_grad():
                layer[0].weight[:3].fill_(2)
                layer[0].weight[3] = self.scaled[3]

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x) @ self.scaled @ self.orthogonal + self.of_numbers.mean() + self.rounded.weight.float().mean()
        for layer in self.layers:
            x = layer(x)
        return self.tied(x) * self.chosen["signs"][0] + self.table[0]


def test_each_stage_computes_what_the_model_would_be():
    ids = torch.randint(160, (2, 3))
    observed = observe(Elaborate, [ids], seed=3)
    ranges = [range(2), range(2, 4), range(4, 5)]
    whole = dict(observed.build(0, [range(5)]).named_parameters())
    parts = [dict(observed.build(stage, ranges).named_parameters()) for stage in range(3)]
    for part in parts:
        assert all(torch.equal(parameter, whole[name]) for name, parameter in part.items())
    assert set().union(*parts) == set(whole) == {name for name, _ in Elaborate().named_parameters()}
    weight = whole["layers.2.0.weight"]
    assert torch.equal(weight[:3], torch.full((3, 160), 2.0))
    assert torch.equal(weight[3], whole["scaled"][3])
    assert 0.018 < weight[4:].std() < 0.022
    assert not torch.equal(weight, whole["layers.3.0.weight"])
    assert torch.equal(whole["layers.0.0.bias"], whole["layers.4.0.bias"])  # a copy, made after it was filled
    assert torch.allclose(whole["orthogonal"] @ whole["orthogonal"].T, torch.eye(160), atol=1e-5)
    assert not whole["embed.weight"][1].any()
    assert whole["rounded.weight"].dtype is torch.bfloat16
    other = observe(Elaborate, [ids], seed=4).build(0, [range(5)])
    assert not torch.equal(dict(other.named_parameters())["scaled"], whole["scaled"])


def test_what_is_no_parameter_is_there_on_every_stage():
    made = DeferredModel(Elaborate, 0).model
    assert isinstance(made.layers[0][0].weight, Placeholder)
    assert torch.equal(made.table, Elaborate().table)
    assert made.chosen["signs"].abs().min() == 1


def test_a_function_leaves_the_generators_as_they_were():
    torch.manual_seed(1)
    numpy.random.seed(1)
    expected = torch.rand(2), numpy.random.rand()
    torch.manual_seed(1)
    numpy.random.seed(1)
    DeferredModel(Elaborate, 0)
    assert torch.equal(torch.rand(2), expected[0])
    assert numpy.random.rand() == expected[1]


def test_what_has_no_numbers_is_refused_unless_it_is_to_be_loaded():
    def on_meta() -> nn.Module:
        with torch.device("meta"):
            return models.Nested()

    x, cut = torch.randn(2, 6), [range(6)]
    for model in (on_meta, on_meta()):
        observed = observe(model, [x])
        with refused("model"):
            observed.build(0, cut)
        stage = observed.build(0, cut, initialise=False)
        for name, parameter in models.Nested().named_parameters():
            dict(stage.named_parameters())[name].data.copy_(parameter.data)
        assert stage.run((), [x], {}).isfinite().all()
    with refused("model"):
        observe(lambda: torch.ones(2), [x])


MEASURE = """
import torch
from torch import nn
from rpc_pipe.model.observed_model import observe

def make(width):
    return lambda: nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(16)))

def build(width):
    observed = observe(make(width), [torch.randn(1, width)])
    return observed.build(1, [range(4 * i, 4 * i + 4) for i in range(4)])

def status(key):
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith(key)) * 1024

torch.set_num_threads(1)
build(256)
before = status("VmRSS")
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")  # the peak counts from here
stage = build(1024)
share = sum(parameter.nbytes for _, parameter in stage.named_parameters())
print((status("VmHWM") - before) / share)
"""


def test_the_peak_while_building_is_little_more_than_the_own_share():
    done = python("-c", MEASURE)
    assert done.returncode == 0, done.stderr
    assert 1 < float(done.stdout) < 1.3
