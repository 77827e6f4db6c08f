"""Rules of kinds and of recomputation: each says what is wrong."""

import re

import pytest
from refusals import refused

from rpc_pipe.dependency import Kind
from rpc_pipe.planning.specs import make_spec


@pytest.mark.parametrize("letter", ["F", "f", "FF", ""])
def test_a_kind_has_a_letter_of_its_own(letter):
    with pytest.raises(ValueError, match=f"kind '{letter}': must be a capital letter; taken are F, B, I"):
        Kind(letter, "forward")


@pytest.mark.parametrize(
    "row, says",
    [
        ({"resource": "gpu"}, "kind X: resource 'gpu': must be one of compute, copy, link"),
        ({"holds": 2}, "kind X: holds 2: must be one of 1, 0, -1"),
        ({"index": "stage"}, "kind X: index 'stage': must be one of microbatch, route"),
        ({"colour": "red"}, "kind X: colour 'red': must be such as #56b4e9"),
    ],
)
def test_a_row_that_cannot_be_is_refused_where_it_is_made(row, says):
    """A resource that there is not was met in the middle of a compile: 'tuple.index(x): x not in tuple'."""
    with pytest.raises(ValueError, match=re.escape(says)):
        Kind("X", "exchange", **row)
    assert all(kind.letter != "X" for kind in Kind.all())


@pytest.mark.parametrize(
    "schedule, says",
    [
        ("gpipe-recompute", "recompute: schedule gpipe-recompute recomputes by itself; leave it out"),
        ("pipedream", "recompute: schedule pipedream lets steps overlap; only synchronous ones recompute"),
    ],
)
def test_what_cannot_recompute_says_so(schedule, says):
    with refused("recompute"):
        make_spec(schedule, 2, 4, {"recompute": "all"})
