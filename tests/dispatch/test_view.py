"""What a view makes of news: rows, the terminal's screen, stalls."""

import io
import json
import math
from dataclasses import replace

import pytest
from rich.console import Console
from synthetic import COST, news_of, records_of, view_of

from rpc_pipe.boards.board import Live, State
from rpc_pipe.boards.run_boards import RunBoards, RunUpdate
from rpc_pipe.boards.run_folders import tell_event
from rpc_pipe.boards.view import View
from rpc_pipe.dependency import B, F
from rpc_pipe.dispatch.rows import describe, link_rows, worker_rows
from rpc_pipe.dispatch.terminal import Screen
from rpc_pipe.planning.specs import make_spec
from rpc_pipe.schedules import SCHEDULES
from rpc_pipe.tracing.lost_time import lost_time
from rpc_pipe.tracing.run_summary import figures
from rpc_pipe.tracing.trace import recent_trace

SPEC = make_spec("1f1b", 4, 8, {})


def shown(view, width=80, height=24):
    console = Console(file=io.StringIO(), width=width, height=height, force_terminal=False)
    console.print(Screen(view, "run-1"))
    return console.file.getvalue().splitlines()


def test_rows_say_what_each_worker_does():
    lives = {
        0: Live(State.RUNNING, 4, F(0, 3), since_ns=1),
        1: Live(State.WAITING, 4, F(1, 3), F(0, 3), 0, since_ns=1),
        2: Live(State.WAITING, 4, since_ns=1),
        3: Live(State.BETWEEN, 3, since_ns=1),
    }
    rows = worker_rows(view_of(lives=lives))
    assert [(r.state, r.action, r.waits_for) for r in rows] == [
        ("runs", "0F3", ""), ("waits", "", "0F3 of 0"), ("waits", "", "the result"), ("between", "", ""),
    ]  # fmt: skip
    assert [r.stages for r in rows] == ["0", "1", "2", "3"]
    assert rows[0].action_ms == pytest.approx((8 * 10 + 8 * 20 + 1) / 17)
    assert 0.2 < rows[0].bubble < 0.35 and rows[0].peak_mb == 1000 and rows[0].outbox == 2


def test_figures_of_the_run():
    view = view_of()
    assert view.complete_steps(2) == [2, 3] and view.losses[-1] == (3, pytest.approx(2.7))
    assert view.step_ms() == pytest.approx(33 * 10 + 6 * 0.5 + 1, rel=0.02)
    assert view.throughput() == (pytest.approx(1e3 * 1024 / view.step_ms()), "tokens")
    (first, *_) = link_rows(view)
    assert (first.source, first.target, first.payloads) == (0, 1, 32) and first.ms == pytest.approx(0.5)


@pytest.mark.parametrize("workers", [2, 4, 16, 64])
@pytest.mark.parametrize("height", [24, 60])
def test_nothing_wraps_at_80_columns(workers, height):
    view = view_of(workers, 8)
    view.note("a long warning that goes on and on " * 5, warning=True)
    lines = shown(view, 80, height)
    assert max(map(len, lines)) <= 80 and len(lines) <= height
    text = "\n".join(lines)
    assert "1f1b on" in text and "work " in text and "long warning" in text
    assert all(f"{worker} " in text for worker in range(workers))


def test_a_screen_without_workers_says_so():
    assert shown(View()) == ["run-1: no worker can be seen yet"]


def test_a_run_of_which_only_some_workers_can_be_seen_says_so():
    news, view = news_of(SPEC, records_of(SPEC)), View()
    news.headers = {w: news.headers[w] for w in (0, 1)}
    news.records = [r for r in news.records if r.worker < 2]
    view.take(news)
    assert "1f1b on 2 of 4 workers" in shown(view)[0] and view.complete_steps(5) == []


def test_a_stall_is_told_once_with_a_roll_call_and_ends():
    spec, records = SPEC, records_of(SPEC)
    start = max(r.end_ns for found in records.values() for r in found)
    lives = {w: Live(State.WAITING, 4, F(w, 0), F(w - 1, 0), w - 1, start) for w in (1, 2, 3)}
    lives[0] = Live(State.RUNNING, 4, F(0, 0), since_ns=start)
    view = View()
    for seconds in (0, 9, 11, 13):
        news = news_of(spec, records, lives)
        news.records = [] if seconds else news.records
        news.now_ns = start + seconds * 10**9
        view.take(news)
        assert view.stalled == (seconds > 10)
    texts = [text for _, text, _ in view.events]
    assert texts[0] == "nothing has finished for 11 s" and len(texts) == 6
    assert texts[-1].endswith("everybody waits for worker 0, which is running 0F0, step 4")
    assert view.culprit() == 0
    lives[0] = Live(State.RUNNING, 4, B(0, 0), since_ns=start + 14 * 10**9)
    view.take(RunUpdate(news.headers, news.listings, lives, now_ns=start + 14 * 10**9))
    assert not view.stalled


def test_a_slow_first_step_is_told_in_a_line():
    """A healthy job that looked at its model for 11 s printed a roll-call and stacks of the interpreter."""
    lives = {w: Live(State.WAITING, 1, F(w, 0), F(w - 1, 0), w - 1, 10**9) for w in (1, 2, 3)}
    lives[0] = Live(State.RUNNING, 1, F(0, 0), since_ns=10**9)
    view, told = View(), []
    for seconds in (5, 12, 30, 65):
        news = news_of(SPEC, records_of(SPEC), lives)
        news.records, news.now_ns = [], (1 + seconds) * 10**9
        view.take(news)
        told.append((bool(view.first_step_line), view.stalled))
    assert told == [(False, False), (True, False), (True, False), (True, True)]
    assert view.first_step_line.startswith("worker 0 runs its first step, for 12 s")


def test_a_worker_that_dies_is_told():
    view = view_of()
    news = RunUpdate(view.headers, view.latest.listings, view.latest.lives, gone=frozenset({2}))
    view.take(news)
    assert worker_rows(view)[2].state == "gone"
    assert view.events[-1][1:] == ("worker 2 has gone", True)


def test_steps_of_before_a_newcomer_stay():
    """The board of a newcomer is another process's: all steps of the run so far were forgotten."""
    view = view_of()
    comes = {rank: {**header, "clock_ns": 5, "newcomer": True} for rank, header in view.headers.items() if rank == 2}
    before, run = list(view.losses), view.pipelines
    view.take(RunUpdate(view.headers | comes, view.latest.listings, view.latest.lives))
    assert list(view.losses) == before and view.complete_steps(2) == [2, 3] and view.pipelines == run


def test_figures_are_of_the_workers_of_the_last_epoch():
    """After a death no step counted as complete, and the summary told of the steps of before alone."""
    view, whole = view_of(6), view_of(5)
    live = [0, 1, 3, 4, 5]
    headers = {
        rank: {
            **whole.headers[place],
            "rank": rank,
            "clock_ns": 7 + rank,
            "epoch": 1,
            "places": 6,
            "replicas": 1,
            "num_routes": 1,
        }
        for place, rank in enumerate(live)
    }
    records = [replace(each, step=each.step + 10) for step in range(4) for each in whole.records(step)]
    listings = {rank: whole.latest.listings[place] for place, rank in enumerate(live)}
    view.take(RunUpdate({2: view.headers[2], **headers}, listings, {}, records))
    assert view.complete_steps(0) == [10, 11, 12, 13] and view.first_step == 10 and view.numbers == live
    assert view.losses[0][0] == 0, "the curve of before stays"
    found = figures(view)
    assert (found["epoch"], found["workers"], found["steps"]) == (1, 5, 13)
    assert [row.worker for row in worker_rows(view)] == live and link_rows(view)[-1].source == 5
    assert recent_trace(view).rows[2].startswith("worker 3")


def test_watchers_read_each_event_of_a_launcher_once(tmp_path):
    boards = RunBoards(tmp_path)
    assert boards.look().events == []
    tell_event(tmp_path, "worker 2 is gone", warning=True)
    assert [event[1:] for event in boards.look().events] == [("worker 2 is gone", True)]
    assert boards.look().events == []


def test_a_slow_step_is_told():
    steps = {**records_of(SPEC, steps=10)}
    late = records_of(SPEC, lambda a: 5 * COST(a), steps=1)[0]
    view = View()
    view.take(news_of(SPEC, steps))
    offset = max(r.end_ns for r in steps[9])
    view.take(
        RunUpdate(
            view.headers, view.latest.listings, view.latest.lives,
            [replace(r, step=10, start_ns=r.start_ns + offset, end_ns=r.end_ns + offset) for r in late],
        )
    )  # fmt: skip
    assert "step 10: " in view.events[-1][1] and view.events[-1][2]


def test_a_step_of_fewer_microbatches_is_not_compared_with_the_others():
    fewer = records_of(make_spec("1f1b", 4, 3, {}), steps=6)[5]
    view = View()
    view.take(news_of(SPEC, {**records_of(SPEC, steps=5), 5: fewer}))
    assert view.complete_steps(1) == [5]
    assert sorted(recent_trace(view).steps) == [0, 1, 2, 3, 4] and lost_time(view) is not None
    few = View()
    few.take(news_of(SPEC, records_of(make_spec("1f1b", 4, 3, {}))))
    assert recent_trace(few).spec.num_microbatches == 3 and lost_time(few).parts["overhead"] < 0.1 * few.step_ms()
    many = View()
    many.take(news_of(SPEC, records_of(make_spec("1f1b", 4, 12, {}))))
    assert recent_trace(many) is None and lost_time(many) is None and worker_rows(many)[0].action_ms > 0


def test_a_loss_that_is_not_finite_is_told_and_shown():
    records, view = records_of(SPEC), View()
    records = {step: [replace(r, loss=math.nan if step > 1 else 1.0) for r in found] for step, found in records.items()}
    view.take(news_of(SPEC, records))
    assert "loss nan" in shown(view)[0] and [text for _, text, _ in view.events] == ["step 2: the loss is nan"]
    json.dumps(describe(view), allow_nan=False)


def test_another_pipeline_in_the_same_processes_begins_anew():
    view = view_of(steps=5)
    news = news_of(SPEC, records_of(SPEC, steps=2))
    news.headers = {worker: header | {"clock_ns": 1000 + worker} for worker, header in news.headers.items()}
    view.take(news)
    assert view.complete_steps(0) == [0, 1] and [step for step, _ in view.losses] == [0, 1]


def test_every_schedule_can_be_drawn_as_planned():
    for name, cls in SCHEDULES.items():
        if cls.synchronous:
            view = view_of(4, 8, name)
            trace = recent_trace(view, 2)
            assert len(trace.simulated(2).spans) == len(trace.spans())


def test_a_process_is_watched_by_its_rank_and_a_step_is_that_of_the_first_members():
    """Boards were kept by worker: of two members one board stood for both, and a hang named a process that waited."""
    spec = make_spec("1f1b", 2, 4, {})
    alone = news_of(spec, records_of(spec))
    headers = {rank: alone.headers[rank // 2] | {"rank": rank, "members": 2, "clock_ns": 7 + rank} for rank in range(4)}
    lives = {rank: Live(State.WAITING, 4, B(0, 1), B(1, 1), rank + 2) for rank in (0, 1)}
    lives |= {2: Live(State.WAITING, 4), 3: Live(State.RUNNING, 4, F(1, 3))}
    listings = {2 * worker: listing for worker, listing in alone.listings.items()}
    view = View()
    view.take(replace(alone, headers=headers, lives=lives, listings=listings))
    assert view.culprit() == 3 and len(view.complete_steps(0)) == len(records_of(spec))
    assert recent_trace(view) is not None and [row.worker for row in worker_rows(view)] == [0, 1, 2, 3]
