"""The order of unequal microbatches, and the choice of their rows."""

import random

import pytest
from refusals import refused

from rpc_pipe.commands.main import main
from rpc_pipe.dependency import F, U
from rpc_pipe.dependency.pipeline_options import Options
from rpc_pipe.planning.pipe_options import apply_plan
from rpc_pipe.planning.relation import Relation
from rpc_pipe.planning.specs import make_spec
from rpc_pipe.planning.unequal import balanced, by_microbatch, group_rows, mountain, span_of

WORKERS, MICROBATCHES = 4, 16


def drawn(seed, count=MICROBATCHES):
    """Return lengths as of real text."""
    numbers = random.Random(seed)
    return [numbers.lognormvariate(0, 0.7) for _ in range(count)]


def mean_span(schedule, order, **options):
    """Return the mean time of a step, over the busiest worker's work."""
    spec = make_spec(schedule, WORKERS, MICROBATCHES, options)
    relation, spans = Relation(spec), []
    for seed in range(4):
        seconds = drawn(seed)
        work = 3 * sum(seconds) * spec.num_stages / WORKERS
        spans.append(span_of(relation, seconds, order(spec, seconds)) / work)
    return sum(spans) / len(spans)


def given(spec, seconds):
    return list(range(len(seconds)))


@pytest.mark.parametrize("schedule, gain", [("1f1b", 1.25), ("zb-h1", 1.2), ("zb-v", 1.05), ("chimera", 1.2)])
def test_long_microbatches_in_the_middle_are_quicker_than_as_they_come(schedule, gain):
    assert gain * mean_span(schedule, balanced) <= mean_span(schedule, given)


def test_a_balanced_zb_v_takes_little_more_than_the_work_of_its_busiest_worker():
    assert mean_span("zb-v", balanced) <= 1.15


def test_replicas_get_long_microbatches_in_turn():
    # As they come one replica waits for the other's longest ones, and each fills its pipeline with whatever is first.
    assert 1.25 * mean_span("1f1b", balanced, replicas=2) <= mean_span("1f1b", given, replicas=2)


def test_a_search_finds_the_same_order_again_and_none_that_is_slower():
    spec, seconds = make_spec("zb-h1", WORKERS, MICROBATCHES), drawn(5)
    found = balanced(spec, seconds, 1.0)
    assert found == balanced(spec, seconds, 1.0) and sorted(found) == list(range(MICROBATCHES))
    relation = Relation(spec)
    assert span_of(relation, seconds, found) < span_of(relation, seconds, mountain(seconds))


def test_a_search_knows_stages_that_images_cost_more():
    """One time was taken for all stages, so the order was that of texts of the same total time."""
    spec = make_spec("1f1b", WORKERS, 8)
    numbers = random.Random(6)
    text, images = ([numbers.choice(choices) for _ in range(8)] for choices in ((1, 2, 4, 8), (0, 0, 0, 12)))

    def relative(action, number):
        return text[number] + images[number] * (action.stage == 0)

    seconds = [4 * words + image for words, image in zip(text, images, strict=True)]
    blind, found = balanced(spec, seconds, 1.0), balanced(spec, seconds, 1.0, relative=relative)
    spans = [span_of(Relation(spec), seconds, order, relative) for order in (blind, found)]
    assert spans[1] < spans[0]


def test_equal_microbatches_stay_where_they_are():
    assert balanced(make_spec("1f1b", 2, 4), [3, 3, 3, 3], 1.0) == [0, 1, 2, 3]


def test_a_step_may_have_fewer_microbatches_than_its_schedule():
    assert sorted(balanced(make_spec("chimera", 2, 8), [3, 1, 2, 4], 1.0)) == [0, 1, 2, 3]


def test_lengths_are_factors_of_times_in_every_step_of_a_stream():
    _, factor = by_microbatch(make_spec("pipedream", 2, 3), lengths=[1, 5, 2], order="balanced")
    assert [factor(F(0, m)) for m in range(6)] == [1, 5, 2, 1, 5, 2] and factor(U(0, 4)) == 1
    _, sliced = by_microbatch(make_spec("1f1b", 2, 3, slices="2"), lengths=[1, 5, 2], order="given")
    assert [sliced(F(0, m)) for m in range(6)] == [1, 1, 5, 5, 2, 2]


@pytest.mark.parametrize("command", ["simulate", "compare"])
def test_there_is_a_length_for_each_microbatch(command, capsys):
    asked = [command, "--microbatches", "3", "--microbatch-order", "balanced"]
    assert main([*asked, "--lengths", "1,3,2", "--json"]) == 0
    for wrong in ([*asked, "--lengths", "1,2"], asked):
        assert main(wrong) == 2
    capsys.readouterr()


def test_a_plan_carries_the_order_to_its_pipelines():
    plan = {"schedule": "1f1b", "cut": [1, 1], "num_microbatches": 2}
    for said in ("given", "balanced"):
        assert apply_plan(Options(plan=plan, microbatch_order=said)).microbatch_order == said
    planned = apply_plan(Options(plan={**plan, "microbatch_order": "balanced"}))
    assert planned.microbatch_order == "balanced"


def test_rows_of_similar_length_share_a_microbatch_within_its_memory():
    lengths = [int(100 * length) + 1 for length in drawn(1, 64)]
    groups = group_rows(lengths, lambda rows, length: 50 + rows * length, most_tokens=800, num_stages=4)
    assert sorted(row for group in groups for row in group) == list(range(64))
    padded = sum(len(group) * max(lengths[row] for row in group) for group in groups)
    assert all(len(group) * max(lengths[row] for row in group) <= 800 for group in groups)
    assert padded < 1.2 * sum(lengths)


def test_a_limit_below_one_row_is_refused_with_the_least_that_works():
    with refused("most_tokens"):
        group_rows([3, 9], lambda rows, length: rows * length, most_tokens=8, num_stages=2)
