"""What slices of sequences cost, as measured, as priced, and as a plan says it."""

import json
from itertools import accumulate, pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rpc_pipe.commands.main import main
from rpc_pipe.dependency import B, F, W
from rpc_pipe.model.user_model import load_user_model
from rpc_pipe.pipeline import Pipeline
from rpc_pipe.planning.footprint import Size, peak_bytes
from rpc_pipe.planning.plan import read_plan
from rpc_pipe.planning.profile import LayerCost, LengthTerms, Machines, Profile
from rpc_pipe.planning.search import PlanRequest
from rpc_pipe.planning.simulator import simulate
from rpc_pipe.planning.slice_costs import SliceCosts
from rpc_pipe.planning.specs import make_spec

MODEL = """
import torch
from torch import nn

class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.LSTM(8, 8, batch_first=True)

    def forward(self, x, state=None):
        return self.cell(x, state)

def make():
    torch.manual_seed(0)
    x = torch.randn(8, 32, 8)
    return [Recurrent() for _ in range(4)], (x, x), nn.functional.mse_loss
"""


@pytest.fixture
def model(tmp_path):
    (tmp_path / "model.py").write_text(MODEL)
    return f"{tmp_path / 'model.py'}:make"


@given(st.floats(0, 0.3), st.floats(0, 0.7), st.integers(1, 16))
@example(0.0, 2e-16, 3)  # was cut 32, 32, 64
def test_balanced_slices_take_equally_long(fixed, attention, count):
    costs = SliceCosts(fixed, attention)
    sizes = costs.balanced(count)
    took = [costs.share(each) for each in pairwise(at / sum(sizes) for at in accumulate(sizes, initial=0))]
    assert len(sizes) == count and max(took) - min(took) <= 2 * (1 + attention) * count / sum(sizes) / count + 1e-9
    assert sum(took) == pytest.approx(1 + (count - 1) * fixed)


def test_times_by_length_price_slices():
    """A row of 100 tokens: half of its time is fixed, a fifth attention."""
    terms = LengthTerms({F: 5.0, B: 5.0}, {F: 30.0, B: 30.0}, {F: 200.0, B: 200.0})
    request = PlanRequest(Profile({1: [LayerCost({}, Size())]}, by_length=(terms,), length=100), Machines(2), 1, (1,))
    assert request.slicing == SliceCosts(pytest.approx(0.5), pytest.approx(0.2))


def test_slices_leave_state_from_the_first_forward_to_the_last_backward():
    """On one worker, the first microbatch alone: its activations slice by slice, and its keys and values whole."""
    spec = make_spec("1f1b", 1, 1, {}, "2")
    run = simulate(spec, lambda action: {F: 1.0, B: 2.0}.get(action.kind, 0.0))
    plain = peak_bytes(run, [Size(activations=100)])
    assert plain == (100,)
    # All activations but state, the state, and, when the first backward runs, the gradients of the state.
    assert peak_bytes(run, [Size(activations=100, state=20)]) == (80 + 20 + 20,)


def test_a_plan_chooses_slices_and_trains_by_them(model, tmp_path, capsys):
    told = str(tmp_path / "plan.json")
    asked = [
        "--workers",
        "2",
        "--alone",
        "--repeats",
        "1",
        "--microbatches",
        "2",
        "--schedule",
        "1f1b",
        "--no-searched",
    ]
    assert main(["plan", model, *asked, "--slices", "2,4", "--output", told]) == 0
    assert "slices=" in capsys.readouterr().out
    plan = read_plan(told)
    assert plan.num_microbatches == 2
    made = load_user_model(model)
    with Pipeline(made.model, made.loss_fn, plan=told) as pipe:
        assert len(pipe.spec.parallelism.slices) in (2, 4)
        assert pipe.step(made.batch) > 0
    assert main(["plan", model, *asked, "--slices", "64"]) == 2
    assert "--slices 64: sequences have 32 places; take at most 32" in capsys.readouterr().err


def test_sizes_with_commas_reach_a_run_by_its_plan(tmp_path):
    from rpc_pipe.commands.run import follow_plan

    path = tmp_path / "plan.json"
    content = {"schedule": "1f1b", "parameters": {"slices": "3,2"}, "cut": [1, 1], "num_microbatches": 2}
    path.write_text(json.dumps(content))
    typed = follow_plan({"plan": str(path)})
    assert typed["slices"] == "3,2" and not typed["set"]


@pytest.mark.parametrize("command", ["simulate --workers 2", "compare --workers 2", "verify gpt --transport local"])
def test_automatic_slices_come_from_a_plan(command, capsys):
    assert main([*command.split(), "--slices", "auto"]) == 2
    assert "--slices auto: must be a number" in capsys.readouterr().err


def test_weights_attend_to_nothing():
    share = SliceCosts(attention=0.5).time_share(make_spec("zb-h1", 2, 1, {}, "4"))
    assert share(W(1, 0)) == share(W(1, 3)) == 0.25 and share(F(1, 0)) < share(F(1, 3))
