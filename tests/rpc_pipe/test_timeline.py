from rpc_pipe.dependency import B, F, I, U, W
from rpc_pipe.drawing.timeline import draw
from rpc_pipe.planning.simulator import simulate, uniform
from rpc_pipe.planning.span import Span
from rpc_pipe.schedules import ZBV, GPipe


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


def test_stages_of_a_worker_are_told_apart_in_rows_of_time():
    """They were bare digits: of ZB-V nobody could say what ran where."""
    spec = ZBV(num_workers=2, num_microbatches=3)
    result = simulate(spec, uniform({F: 1, I: 1, W: 1}))
    assert lines(result.spans, 2, width=49, most_lines=60) == [
        "0 to 10",
        "worker 0 0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0",
        "worker 1 ····1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0",
        "10 to 20",
        "worker 0 0W0 3F2 3I2 3W2 0I1 0W1 ········0I2 0W2",
        "worker 1 2F2 2I1 2W1 1I1 1W1 2I2 2W2 1I2 1W2 ····",
    ]
    short = lines(result.spans, 2, width=49, most_lines=5)
    assert len(short) == 3 and "cells are too small for names" in short[2], "where that would be too long"


def test_of_a_long_timeline_the_first_and_the_last_rows_are_drawn():
    """One of 100 microbatches was a stripe of colours, and one of more than 4,000 actions was not drawn."""
    spec = GPipe(num_workers=1, num_microbatches=50)
    drawn = lines(simulate(spec, uniform({F: 1, B: 1})).spans, 1, width=49, most_lines=4)
    assert drawn == [
        "0 to 10",
        "worker 0 F0  F1  F2  F3  F4  F5  F6  F7  F8  F9",
        "⋯ 10 to 90 is left out",
        "90 to 100",
        "worker 0 B9  B8  B7  B6  B5  B4  B3  B2  B1  B0",
    ]


def test_an_action_goes_on_in_the_next_row():
    spans = [Span(0, F(0, 10), 0, 1), Span(0, B(0, 10), 1, 3), Span(0, F(0, 11), 3, 4)]
    assert lines(spans, 1, width=15, most_lines=9) == ["0 to 2", "worker 0 F10 B10", "2 to 4", "worker 0 …   F11"]


def test_of_a_worker_with_several_stages_the_later_are_underlined():
    spec = ZBV(num_workers=2, num_microbatches=12)
    drawn = draw(simulate(spec, uniform({F: 1, I: 1, W: 1})).spans, 2, width=100)
    later = {str(drawn)[span.start : span.end] for span in drawn.spans if "underline" in str(span.style)}
    assert later and len(str(drawn).splitlines()) == 2


def test_gaps_are_bubbles_and_short_actions_do_not_shift_the_rest():
    spans = [Span(0, F(0, 0), 0.0, 1.0), Span(0, U(0, 0), 1.0, 1.001), Span(0, B(0, 0), 3.0, 4.0)]
    assert lines(spans, 1, width=49) == ["worker 0 F0        ····················B0"]


def test_nothing_is_drawn_of_nothing():
    assert str(draw([], 1)) == "nothing ran"
