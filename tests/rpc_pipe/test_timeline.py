from rpc_pipe.dependency import B, F, U
from rpc_pipe.drawing.timeline import draw
from rpc_pipe.planning.simulator import simulate, uniform
from rpc_pipe.planning.span import Span
from rpc_pipe.schedules import GPipe


def lines(spans, workers, **options):
    return [line.rstrip() for line in str(draw(spans, workers, **options)).splitlines()]


def test_equal_times_get_equal_columns():
    spec = GPipe(num_workers=2, num_microbatches=3)
    result = simulate(spec, uniform({F: 1, B: 2}))
    assert lines(result.spans, 2, width=100) == [
        "worker 0 F0 F1 F2 ·········B2    B1    B0",
        "worker 1 ···F0 F1 F2 B2    B1    B0    ······",
    ]


def test_a_narrow_picture_drops_the_letter_and_then_the_number():
    spec = GPipe(num_workers=2, num_microbatches=12)
    narrow = lines(simulate(spec, uniform({F: 1, B: 1})).spans, 2, width=36)
    assert all(len(line) <= 36 for line in narrow)
    assert narrow[0] == "worker 0 0123456789FF··BB9876543210"


def test_gaps_are_bubbles_and_short_actions_do_not_shift_the_rest():
    spans = [Span(0, F(0, 0), 0.0, 1.0), Span(0, U(0, 0), 1.0, 1.001), Span(0, B(0, 0), 3.0, 4.0)]
    assert lines(spans, 1, width=49) == ["worker 0 F0        ····················B0"]


def test_nothing_is_drawn_of_nothing():
    assert str(draw([], 1)) == "nothing ran"
