from rpc_pipe.dependency import NO_REDUCTIONS, B, F, U
from rpc_pipe.drawing.chrome import write_chrome
from rpc_pipe.planning.relation import Relation
from rpc_pipe.planning.simulator import Link, simulate, uniform
from rpc_pipe.planning.span import Span, Wait, waits
from rpc_pipe.schedules import SCHEDULES

SPEC = SCHEDULES["1f1b"](num_workers=2, num_microbatches=2)


def test_a_wait_is_the_gap_and_its_cause_the_need_that_ended_last():
    spans = simulate(SPEC, uniform({F: 1, B: 2})).spans
    # worker 0  F0F1··B0  ··B1      0 to 1, 1 to 2, 4: B0 needs its own F and 1B0, which ended at 4
    # worker 1  ··F0B0  F1B1        B0 ends at 4
    found = {str(span.action): (wait.time, str(wait.cause.action)) for span, wait in waits(SPEC, spans).items()}
    assert found == {"1F0": (1, "0F0"), "0B0": (2, "1B0"), "0B1": (1, "1B1")}


def test_a_span_is_paired_with_the_latest_run_of_its_need():
    step = [Span(0, F(0, 0), 0, 1), Span(1, F(1, 0), 2, 3)]
    later = [Span(s.worker, s.action, s.start + 10, s.end + 10) for s in step]
    found = waits(SPEC, [*later, *step])
    assert found[step[1]] == Wait(2, step[0])
    assert found[later[1]] == Wait(9, later[0])


def test_clocks_that_disagree_do_not_pair_with_the_step_before():
    before, need = Span(0, F(0, 0), 0, 1), Span(0, F(0, 0), 10, 11.2)
    late = Span(1, F(1, 0), 11, 12)
    assert waits(SPEC, [before, need, late])[late].cause == before
    assert waits(SPEC, [before, need, late], slack=0.5)[late].cause == need


def test_a_need_that_is_missing_is_no_cause():
    own, late = Span(0, F(0, 0), 0, 1), Span(0, B(0, 0), 3, 4)
    assert waits(SPEC, [own, late]) == {late: Wait(2, own)}
    alone = Span(1, F(1, 0), 5, 6)
    assert waits(SPEC, [own, alone]) == {alone: Wait(5, own)}
    assert waits(SPEC, [Span(0, U(0, 0), 0, 1), alone]) == {alone: Wait(5, None)}
    assert waits(SPEC, []) == {}


def test_what_overlaps_leaves_no_gap():
    spans = [Span(0, F(0, 0), 0, 5), Span(0, F(0, 1), 1, 2), Span(0, B(0, 0), 5, 6)]
    assert waits(SPEC, spans) == {}


def test_a_trace_of_gradients_that_stages_share_is_drawn(tmp_path):
    """A recorded step has exchanges of tied parameters and of buckets, and a schedule alone knows of neither."""
    divided = NO_REDUCTIONS._replace(tied=(((0, 1), 0),))
    links = {(1, 0): Link(bandwidth=1)}
    spans = simulate(
        Relation(SPEC, reductions=divided), uniform({F: 1, B: 2, U: 1}), links=links, payload=lambda _: 3
    ).spans
    assert {"1G0", "0S0"} <= {str(span.action) for span in spans}
    found = waits(SPEC, spans)
    write_chrome(tmp_path / "trace", SPEC, {0: spans})
    assert any(span.action.kind is U for span in found) and (tmp_path / "trace").stat().st_size
