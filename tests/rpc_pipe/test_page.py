import json
import re
from dataclasses import replace
from itertools import pairwise

import pytest
from browser import needs_browser, shown

from rpc_pipe.dependency import B, F, Kind
from rpc_pipe.drawing.page import Picture, draw_page
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


def embedded(page):
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    return json.loads(found[1])


def test_the_page_holds_every_span_from_zero_on():
    data = embedded(draw_page([picture(comm=0.5, at=1000, unit="ms")]))
    (drawn,) = data["pictures"]
    assert len(drawn["spans"]) == 4 * 8 * 2 + 4
    assert drawn["spans"][0][:6] == [0, 0, "F", 0, 0, 1]
    assert drawn["about"].startswith("4 workers, makespan") and " ms, bubble" in drawn["about"]
    assert data["palette"]["F"] == [F.colour, F.ink, F.word]


def test_a_wait_names_its_cause():
    (drawn,) = embedded(draw_page([picture(comm=0.5)]))["pictures"]
    spans = drawn["spans"]
    first = next(span for span in spans if span[:4] == [1, 1, "F", 0])
    assert first[6] == 1.5 and spans[first[7]][:4] == [0, 0, "F", 0]
    assert len(spans[0]) == 6


def test_names_cannot_break_out_of_the_data():
    name = "</script><script>alert(1)</script><!-- @DATA@ & 'quotes'"
    page = draw_page([picture(name=name, unit="</script>")])
    assert embedded(page)["pictures"][0]["name"] == name
    assert page.count("</script>") == draw_page([]).count("</script>")
    assert "alert(1)" not in re.sub(r"(?s)<script type=.application/json.*?</script>", "", page)


def test_the_page_loads_nothing():
    page = draw_page([picture()])
    assert not re.search(r"https?:|src=|<link|@import|fetch\(|import\(", page)
    assert page == draw_page([picture()])


def test_times_that_are_no_numbers_are_refused():
    with pytest.raises(ValueError):
        draw_page([Picture("actual", [Span(0, F(0, 0), 0.0, float("nan"))], 1)])


@needs_browser
def test_a_browser_draws_zooms_and_explains(tmp_path):
    page = draw_page([picture(), picture(name="actual </script>", comm=0.5)])
    result = shown(page, tmp_path, """
        const [planned, actual] = drawn, press = key => dispatchEvent(new KeyboardEvent("keydown", {key}));
        const paint = () => { drawn.forEach(drawPicture); return planned.shown; };
        const colour = (p, span) => { const ratio = devicePixelRatio, c = p.canvas.getContext("2d");
          const at = c.getImageData((place(p, span.start) + 2) * ratio, (span.worker * p.pitch + 3) * ratio, 1, 1).data;
          return "#" + [...at].slice(0, 3).map(v => v.toString(16).padStart(2, "0")).join(""); };
        const found = {all: paint(), names: [...document.querySelectorAll("h2")].map(h => h.textContent),
          legend: [...document.querySelectorAll("li")].map(li => li.textContent)};
        found.colours = ["F", "B"].map(kind => colour(planned, planned.spans.find(s => s.kind === kind)));
        found.pitch = planned.pitch;
        found.aligned = place(planned, 5) === place(actual, 5);
        const span = actual.spans.find(s => s.worker === 1 && s.kind === "B");
        const box = actual.canvas.getBoundingClientRect();
        const hover = moment => { actual.canvas.dispatchEvent(new PointerEvent("pointermove",
          {clientX: box.left + place(actual, moment), clientY: box.top + span.worker * actual.pitch + 4}));
          return [...hint.children].map(line => line.textContent); };
        found.onSpan = hover(span.start + 0.5);
        found.onGap = hover(span.start - 0.2);
        const x = Math.round(box.left + place(actual, span.start)), under = shareAt(actual, x - box.left);
        actual.canvas.dispatchEvent(new WheelEvent("wheel", {clientX: x, clientY: box.top + 4, deltaY: -500}));
        found.kept = Math.abs(shareAt(actual, x - box.left) - under) < 1e-9;
        found.zoomed = paint();
        press("ArrowRight"); found.panned = view.from; press("0"); found.reset = [view.from, view.to];
        press("+"); found.closer = view.to - view.from; press("-"); found.back = [view.from, view.to];
        report(found);
    """)  # fmt: skip
    assert result["all"] == 64 and 0 < result["zoomed"] < 64
    assert result["names"] == ["planned", "actual </script>"]
    assert result["legend"] == ["F forward", "B backward", "U update", "bubble", "critical path"]
    assert result["colours"] == [F.colour, B.colour]
    assert 40 <= result["pitch"] <= 96, "few rows use the height that the window leaves"
    assert result["aligned"] and result["kept"]
    assert result["onSpan"] == result["onGap"]
    assert result["onSpan"][:2] == ["1B0 backward", "worker 1, stage 1, microbatch 0"]
    assert re.fullmatch(r"waited [\d.]+ for 2B0 of worker 2, which ended 0.5 before", result["onSpan"][3])
    assert result["panned"] > 0 and result["reset"] == [0, 1]
    assert result["closer"] == pytest.approx(0.7) and result["back"] == pytest.approx([0, 1])


@needs_browser
def test_a_browser_says_that_there_is_nothing(tmp_path):
    words = "report([document.body.innerText, document.querySelectorAll('canvas').length])"
    text, canvases = shown(draw_page([Picture("planned", [], 4)]), tmp_path, words)
    assert "Nothing ran." in text and "wheel" not in text and canvases == 0
    assert "There is no timeline to show." in shown(draw_page([]), tmp_path, words)[0]


@needs_browser
def test_no_row_is_so_high_that_tables_leave_the_screen(tmp_path):
    """Rows of 180 pixels: four workers filled a window, and the tables were below it."""
    words = "report([drawn[0].pitch, Math.floor((innerHeight - 60 - AXIS - 46) / drawn[0].workers)])"
    pitch, fair = shown(draw_page([picture()]), tmp_path, words)
    assert pitch == min(60, fair)


def test_the_critical_path_goes_from_the_first_start_to_the_last_end():
    (drawn,) = embedded(draw_page([picture(comm=0.5)]))["pictures"]
    path = [drawn["spans"][i] for i in drawn["critical"]]
    assert path[0][4] == 0 and path[-1][5] == max(span[5] for span in drawn["spans"])
    assert all(before[5] <= after[4] for before, after in pairwise(path))
    travels = sum(after[4] - before[5] for before, after in pairwise(path))
    assert sum(span[5] - span[4] for span in path) + travels == path[-1][5]


def test_a_circle_of_causes_ends():
    """Where clocks differ by more than a step takes, a cause was found behind its wait, and no page was written."""
    first, second = Span(0, F(0, 0), 0.0, 1.0), Span(1, F(1, 0), 0.5, 2.0)
    assert critical_path([second], {second: Wait(0.1, second)}) == [second]
    assert critical_path([first, second], {first: Wait(0.1, second), second: Wait(0.1, first)}) == [first, second]


def test_each_worker_has_its_idle_time_its_waits_and_its_peak():
    (drawn,) = embedded(draw_page([picture(workers=2, microbatches=2, unit="ms")]))["pictures"]
    heading, first, last = drawn["table"]
    assert heading[1:] == ["bubble", "waited for, ms", "", "", "most activations held, in microbatches"]
    assert first == ["worker 0", "33.3%", "3: B of worker 1", "", "", "2"]  # of 9 ms 3: F 1 ends before B 0 has come
    assert last[0] == "worker 1" and last[5] == "1"
    assert max(number for _, number in drawn["held"][0]) == 2 and drawn["held"][0][-1][1] == 0


def test_no_worker_waits_for_itself():
    """A worker whose last need was its own action was shown as waiting for itself."""
    alone = picture(workers=2, microbatches=2, unit="ms")
    rows = [[span for span in sorted(alone.spans, key=lambda s: s.start) if span.worker == w] for w in range(2)]
    own = {after: Wait(1.0, before) for row in rows for before, after in pairwise(row)}
    (drawn,) = embedded(draw_page([replace(alone, waits=own)]))["pictures"]
    assert all(row[2] == "" for row in drawn["table"][1:])


def test_kinds_of_the_exchange_have_colours_of_their_own():
    """G, S, P and A had one colour, and words that the field does not use."""
    colours = {kind.colour for kind in Kind.all() if kind.letter in "GSPA"}
    assert len(colours) == 4 and {kind.word.partition(":")[0] for kind in Kind.all() if kind.letter in "GSPA"} == {
        "reduce-scatter", "all-gather"
    }  # fmt: skip
