import re
from dataclasses import replace
from itertools import pairwise

import pytest
from browser import needs_browser, shown

from rpc_pipe.dependency import B, F, Kind
from rpc_pipe.drawing.svg import Picture, draw_page
from rpc_pipe.planning.simulator import simulate, uniform
from rpc_pipe.planning.span import Span, Wait, critical_path, waits
from rpc_pipe.schedules import SCHEDULES


def picture(workers=4, microbatches=8, *, name="planned", comm=0, at=0, unit=""):
    spec = SCHEDULES["1f1b"](num_workers=workers, num_microbatches=microbatches)
    spans = [
        Span(s.worker, s.action, s.start + at, s.end + at)
        for s in simulate(spec, uniform({F: 1, B: 2}), comm=comm).spans
    ]
    return Picture(name, spans, workers, unit, waits=waits(spec, spans))


def drawn(*pictures):
    """Return the pictures of a page, and the cells of its tables."""
    page = draw_page(pictures)
    rows = [re.findall(r"<t[hd]>(.*?)</t[hd]>", row) for row in re.findall(r"<tr>(.*?)</tr>", page)]
    return [text.split("</svg>")[0] for text in page.split("<svg ")[1:]], rows


def test_the_page_holds_every_span_from_zero_on():
    ((svg,), _) = drawn(picture(comm=0.5, at=1000, unit="ms"))
    assert svg.count("<title>") == 4 * 8 * 2 + 4
    assert "<title>0F0, stage 0, 0 to 1</title>" in svg and " ms, bubble" in svg


def test_a_wait_names_its_cause():
    ((svg,), _) = drawn(picture(comm=0.5))
    assert "<title>1F0, stage 1, 1.5 to 2.5; waited 1.5 for 0F0 of worker 0</title>" in svg
    assert "waited" not in drawn(replace(picture(), waits={}))[0][0]


def test_names_cannot_break_out_of_the_page():
    name = "</script><script>alert(1)</script><!-- @DATA@ & 'quotes'"
    page = draw_page([picture(name=name, unit="</script>")])
    assert page.count("</script>") == draw_page([]).count("</script>") and "<!--" not in page
    assert "@DATA@ &amp;" in page


def test_the_page_loads_nothing():
    page = draw_page([picture()])
    assert not re.search(r"https?:(?!//www.w3.org/2000/svg)|src=|<link|@import|import\(", page)
    assert page == draw_page([picture()])


def test_times_that_are_no_numbers_are_refused():
    with pytest.raises(ValueError):
        draw_page([Picture("actual", [Span(0, F(0, 0), 0.0, float("nan"))], 1)])


def test_pictures_of_one_unit_have_one_scale():
    """Equal times stand above each other."""
    one, other = drawn(picture(), picture(comm=0.5))[0]
    first = [re.search(r'<title>0F0.*?width="([0-9.]+)"', svg)[1] for svg in (one, other)]
    assert first[0] == first[1] and first[0] != re.search(r'<title>0F0.*?width="([0-9.]+)"', drawn(picture())[0][0])[1]


@needs_browser
def test_a_browser_shows_and_zooms_the_pictures(tmp_path):
    page = draw_page([picture(), picture(name="actual </script>", comm=0.5)])
    found = shown(page, tmp_path, """
        const wide = () => document.querySelector("svg").getBoundingClientRect().width, before = wide();
        byId("in").click(); const zoomed = wide(); byId("out").click();
        report({cells: document.querySelectorAll("svg title").length, factor: zoomed / before, back: wide() / before,
          hidden: byId("grid").hidden, text: document.body.innerText});
    """)  # fmt: skip
    assert found["cells"] == 2 * (4 * 8 * 2 + 4) and found["factor"] == pytest.approx(1.5) and found["hidden"]
    assert found["back"] == pytest.approx(1) and "critical path" in found["text"]


def test_where_there_is_nothing_the_page_says_so():
    assert "nothing ran" in draw_page([Picture("planned", [], 4)])
    assert "There is no timeline to show." in draw_page([])


def test_the_critical_path_goes_from_the_first_start_to_the_last_end():
    shown = picture(comm=0.5)
    path = critical_path(shown.spans, shown.waits)
    assert path[0].start == 0 and path[-1].end == max(span.end for span in shown.spans)
    assert all(before.end <= after.start for before, after in pairwise(path))
    travels = sum(after.start - before.end for before, after in pairwise(path))
    assert sum(span.end - span.start for span in path) + travels == path[-1].end
    ((svg,), _) = drawn(shown)
    assert svg.count('class="critical"') == sum(span.end > span.start for span in path) + 1  # and the legend


def test_a_circle_of_causes_ends():
    """Where clocks differ by more than a step takes, a cause was found behind its wait, and no page was written."""
    first, second = Span(0, F(0, 0), 0.0, 1.0), Span(1, F(1, 0), 0.5, 2.0)
    assert critical_path([second], {second: Wait(0.1, second)}) == [second]
    assert critical_path([first, second], {first: Wait(0.1, second), second: Wait(0.1, first)}) == [first, second]


def test_each_worker_has_its_idle_time_its_waits_and_its_peak():
    heading, first, last = drawn(picture(workers=2, microbatches=2, unit="ms"))[1]
    assert heading[1:] == ["bubble", "waited for, ms", "", "", "most activations held, in microbatches"]
    assert first == ["worker 0", "33.3%", "3: B of worker 1", "", "", "2"]  # of 9 ms 3: F 1 ends before B 0 has come
    assert last[0] == "worker 1" and last[5] == "1"


def test_no_worker_waits_for_itself():
    """A worker whose last need was its own action was shown as waiting for itself."""
    alone = picture(workers=2, microbatches=2, unit="ms")
    rows = [[span for span in sorted(alone.spans, key=lambda s: s.start) if span.worker == w] for w in range(2)]
    own = {after: Wait(1.0, before) for row in rows for before, after in pairwise(row)}
    assert all(row[2] == "" for row in drawn(replace(alone, waits=own))[1][1:])


def test_kinds_of_the_exchange_have_colours_of_their_own():
    """G, S, P and A had one colour, and words that the field does not use."""
    colours = {kind.colour for kind in Kind.all() if kind.letter in "GSPA"}
    assert len(colours) == 4 and {kind.word.partition(":")[0] for kind in Kind.all() if kind.letter in "GSPA"} == {
        "reduce-scatter", "all-gather"
    }  # fmt: skip
