import re
from itertools import pairwise
from xml.etree import ElementTree

import pytest

from rpc_pipe.dependency import B, F, Kind, U
from rpc_pipe.drawing import svg
from rpc_pipe.drawing.svg import Picture, nice_step
from rpc_pipe.drawing.timeline import bubble, tell
from rpc_pipe.planning.simulator import simulate, uniform
from rpc_pipe.planning.span import Span
from rpc_pipe.schedules import SCHEDULES

SVG = "{http://www.w3.org/2000/svg}"


def draw_svg(spans, workers, title="", **more):
    return svg.draw_svg(Picture(title, spans, workers, **more))


def run(name, workers, microbatches, **options):
    spec = SCHEDULES[name](num_workers=workers, num_microbatches=microbatches, **options)
    return simulate(spec, uniform({F: 1, B: 2}))


def cells(picture):
    """Return (x, y, width, height, kind, hint, label) of every cell, in pixels of the picture."""
    found = []
    for row in ElementTree.fromstring(picture).iter(f"{SVG}g"):
        place = re.fullmatch(r"translate\(([\d.]+),([\d.]+)\)", row.get("transform", ""))
        for cell in row.findall(f"{SVG}g") if place else ():
            rect, text = cell.find(f"{SVG}rect"), cell.find(f"{SVG}text")
            x, width, height = (float(rect.get(key)) for key in ("x", "width", "height"))
            label = None if text is None else (text.text, float(text.get("font-size", row.get("font-size"))))
            hint = cell.find(f"{SVG}title").text
            found.append((float(place[1]) + x, float(place[2]), width, height, rect.get("class"), hint, label))
    return found


def test_every_kind_has_a_colour_of_its_own():
    drawn = [kind.colour for kind in Kind.all() if kind.resource == "compute"]
    assert len(set(drawn)) == len(drawn)


def test_the_bubble_is_the_simulators():
    result = run("1f1b", 4, 8)
    assert bubble(result.spans, 4) == pytest.approx(result.bubble)
    assert bubble([Span(0, F(0, 0), 0, 4), Span(0, U(0, 0), 1, 2)], 2) == 0.5  # overlapping time counts once
    assert bubble([], 2) == 0


def test_a_cell_is_where_and_when_its_span_is():
    result = run("1f1b", 4, 8)
    spans = [span for span in result.spans if span.end > span.start]
    found = {hint: (x, y, width, kind) for x, y, width, _, kind, hint, _ in cells(draw_svg(result.spans, 4))}
    assert len(found) == len(spans)
    left, top = found["0F0, stage 0, 0 to 1"][:2]
    unit = found["0F0, stage 0, 0 to 1"][2]
    pitch = found["1F0, stage 1, 1 to 2"][1] - top
    for span in spans:
        x, y, width, kind = found[f"{span.action}, stage {span.action.stage}, {span.start} to {span.end}"]
        assert kind == span.action.kind.letter
        assert x == pytest.approx(left + span.start * unit, abs=0.4)
        assert width == pytest.approx((span.end - span.start) * unit, abs=0.02)
        assert y == pytest.approx(top + span.worker * pitch)


def test_what_takes_no_time_is_a_tick_and_no_cell():
    picture = draw_svg([Span(0, F(0, 3), 5, 6), Span(0, U(0, 0), 6, 6)], 1)
    assert [cell[5] for cell in cells(picture)] == ["0F3, stage 0, 0 to 1"]
    ticks = [path for path in ElementTree.fromstring(picture).iter(f"{SVG}path") if "tick" in path.get("class", "")]
    assert [tick.find(f"{SVG}title").text for tick in ticks] == ["0U0, stage 0, 1 to 1"]


@pytest.mark.parametrize("workers, microbatches", [(4, 8), (8, 32), (64, 64)])
def test_cells_and_labels_stay_inside(workers, microbatches):
    picture = draw_svg(run("1f1b", workers, microbatches).spans, workers)
    width, height = (float(ElementTree.fromstring(picture).get(key)) for key in ("width", "height"))
    rows = sorted({(cell[1], cell[3]) for cell in cells(picture)})
    assert len(rows) == workers
    assert width <= 1400 and rows[-1][0] + rows[-1][1] < height <= 900
    assert all(upper[0] + upper[1] <= lower[0] for upper, lower in pairwise(rows))
    for x, _, wide, high, _, _, label in cells(picture):
        assert x + wide <= width
        if label is not None:
            text, size = label
            assert size >= 7 and size <= high and len(text) * size * 0.6 <= wide


def test_cells_show_their_kind_and_microbatch_and_narrow_ones_the_microbatch():
    """Narrow cells had no kind where there was room for it."""
    spans = run("gpipe", 2, 3).spans
    labels = [label[0] for *_, kind, _, label in cells(draw_svg(spans, 2)) if kind == "F"]
    assert labels == ["F0", "F1", "F2", "F0", "F1", "F2"]
    narrow = [span._replace(start=span.start / 99, end=span.end / 99) for span in spans]
    labels = {label[0] for *_, label in cells(draw_svg([*narrow, Span(0, F(0, 3), 0.9, 1.9)], 2))}
    assert labels == {"0", "1", "2", "B0", "B1", "B2", "F3"}, "forwards are narrow"


def test_a_picture_of_eight_workers_is_small():
    assert len(draw_svg(run("1f1b", 8, 32).spans, 8)) < 100_000


def test_stages_of_a_worker_differ_by_a_stripe():
    result = run("interleaved", 2, 4)
    root = ElementTree.fromstring(draw_svg(result.spans, 2, num_stages=4))
    stripes = [path for path in root.iter(f"{SVG}path") if path.get("class") == "stripe"]
    second = [s for s in result.spans if s.action.stage >= 2 and s.end > s.start]
    assert len(stripes) == len(second)
    assert "4 stages" in root.get("aria-label")
    assert 'class="stripe"' not in draw_svg(run("1f1b", 2, 4).spans, 2)


def test_titles_are_escaped():
    picture = draw_svg(run("1f1b", 2, 2).spans, 2, title='<b> & "quotes"')
    root = ElementTree.fromstring(picture)
    assert root.get("role") == "img"
    assert root.get("aria-label") == '<b> & "quotes": 2 workers, makespan 9, bubble 33.3%'
    assert '<b> & "quotes"' in [text.text for text in root.iter(f"{SVG}text")]
    assert "<script" not in picture


def test_the_legend_names_what_occurs():
    words = [t.text for t in ElementTree.fromstring(draw_svg(run("1f1b", 2, 2).spans, 2)).iter(f"{SVG}text")]
    assert words[-4:] == ["F forward", "B backward", "U update", "bubble"]


def test_the_same_spans_give_the_same_picture():
    spans = run("1f1b", 4, 8).spans
    assert draw_svg(spans, 4, title="x") == draw_svg(tuple(reversed(spans)), 4, title="x")


def test_nothing_is_drawn_of_nothing():
    for spans in ([], [Span(0, U(0, 0), 2, 2)]):
        root = ElementTree.fromstring(draw_svg(spans, 3, title="empty"))
        assert float(root.get("height")) > 0
    assert "nothing ran" in draw_svg([], 3)


@pytest.mark.parametrize("length, step", [(33, 5), (117, 20), (0.5, 0.05), (10, 1), (7e4, 1e4)])
def test_ticks_stand_at_round_times(length, step):
    assert nice_step(length, 10) == pytest.approx(step)


def test_times_are_written_without_exponents():
    assert [tell(time) for time in (33, 0.25, 138.8333333, 1234567.8)] == ["33", "0.25", "138.833", "1234568"]


def test_a_long_picture_has_two_ends_and_a_mark():
    """Cells of 600 microbatches were less than a pixel wide."""
    spans = run("1f1b", 2, 600).spans
    whole, cut = draw_svg(spans, 2), draw_svg(spans, 2, ends=True)
    assert "left out" not in whole and "⋯ 48 to 1755 is left out" in cut
    drawn = [hint for *_, hint, _ in cells(cut)]
    assert "0F0, stage 0, 0 to 1" in drawn and "0B599, stage 0, 1801 to 1803" in drawn and len(drawn) < 160
    assert max(x + width for x, _, width, *_ in cells(cut)) <= float(ElementTree.fromstring(cut).get("width"))
