"""Pairs of dimensions: each that is not refused trains as one process does, and each that is refused says so."""

import pytest
import torch
import torch._dynamo
from crossings import DEFAULTS, FEATURES, covering, described, tried
from refusals import refused

from rpc_pipe.dependency.crossings import NOT_TOGETHER, refuse_together

# A warning inside of torch.compile is an error of it.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute")


@pytest.mark.parametrize("case", [each for each in covering() if each["members"] == "1"], ids=described)
def test_pairs_of_dimensions_train_as_one_process_does(case):
    """Faults live where two dimensions meet, each of which was tested alone.

    Weights of zero=1 came too late behind a step that only adds up gradients; norms were taken of gradients that had
    not left. Cases with members need processes: `tests/trials/crossings.py` runs them.
    """
    end = tried(case)
    assert end.how == "same", end


def test_compiled_slices_hand_gradients_to_earlier_ones_in_each_replica():
    """The first replica's slices are observed, so not compiled at first; the second one lost gradients of states."""
    torch._dynamo.reset()
    end = tried({**DEFAULTS, "slices": "2", "compile": "eager", "replicas": "2"})
    assert end.how == "same", end


@pytest.mark.parametrize("row", NOT_TOGETHER, ids=lambda row: f"{row.first}, {row.second}")
def test_every_pair_of_the_table_is_refused(row):
    """The table is what the product reads: a row that no option reaches would promise a refusal that never comes."""
    having = {feature: pair for pair, features in FEATURES.items() for feature in features}
    if row.first in having and row.second in having and having[row.first][0] != having[row.second][0]:
        pairs = [having[row.first], having[row.second]]
        case = {**DEFAULTS, **dict(pairs), **({"replicas": "2"} if ("zero", "1") in pairs else {})}
        if case["members"] == "1":
            assert tried(case).how == "refused"
    else:
        with refused("this"):
            refuse_together({row.first: "this", row.second: "that"})
