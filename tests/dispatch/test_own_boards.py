"""What a real pipeline of this process writes for those who watch."""

from concurrent.futures import Future
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from training_options import pipeline_with

from rpc_pipe.boards import own_boards, run_folders
from rpc_pipe.boards.remote import Copy, Peer
from rpc_pipe.boards.run_boards import Board, RunBoards, headers_in
from rpc_pipe.boards.view import View
from rpc_pipe.dispatch.rows import describe, worker_rows
from rpc_pipe.dispatch.watcher import scalars_of
from rpc_pipe.drawing.svg import draw_svg
from rpc_pipe.drawing.timeline import idle
from rpc_pipe.tracing.lost_time import lost_time
from rpc_pipe.tracing.run_summary import figures, sentence
from rpc_pipe.tracing.trace import recent_trace, trace_of
from rpc_pipe.workers.transport.call import Call
from rpc_pipe.workers.transport.local import local_carriers


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(own_boards, "_folder", lambda: tmp_path)
    monkeypatch.setattr(own_boards, "_offer_stacks", lambda _: None)  # for the life of a process
    return tmp_path


def pipeline(num_workers=2, **options):
    layers = [partial(nn.Linear, 4, 4) for _ in range(8)]
    optimizer = partial(torch.optim.SGD, lr=0.1)
    return pipeline_with(layers, nn.functional.mse_loss, optimizer=optimizer, num_workers=num_workers, **options)


def steps(pipe, *counts):
    for count in counts:
        pipe.step(microbatches=[(torch.ones(1, 4), torch.ones(1, 4))] * count)
    own_boards.write_out()


def test_a_step_is_written_when_its_worker_waits_in_the_next_one(folder):
    boards, pipe = RunBoards(folder), pipeline(num_microbatches=2)
    batch = torch.ones(2, 4), torch.ones(2, 4)
    for seen in ([], [1], [1, 2]):
        pipe.step(batch)
        view = View()
        view.take(RunBoards(folder).look())
        assert view.complete_steps(0) == seen
    own_boards.write_out()
    view.take(boards.look())
    assert view.complete_steps(0) == [1, 2, 3]


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v", "chimera"])
def test_steps_of_any_number_of_microbatches_are_recorded(folder, schedule):
    """With more than `num_microbatches`, as to accumulate, nothing was recorded: boards had no room for it."""
    view, boards = View(), RunBoards(folder)
    pipe = pipeline(num_microbatches=2, schedule=schedule)
    view.take(boards.look())
    steps(pipe, 40, 40, 40)
    view.take(boards.look())
    assert view.complete_steps(0) == [1, 2, 3] and lost_time(view, fresh=True) is not None and view.latest.dropped == 0
    steps(pipe, 2, 6, 4)
    view.take(boards.look())
    assert view.complete_steps(0) == list(range(1, 7)) and view.latest.dropped == 0
    for step, count in enumerate([40, 40, 40, 2, 6, 4], 1):
        trace = trace_of(view, [step])
        assert trace is not None and trace.spec.num_microbatches == count
        ran, planned = ({(s.worker, s.action) for s in spans} for spans in (trace.spans(), trace.simulated().spans))
        assert ran == planned


def test_the_next_pipeline_of_a_process_replaces_the_one_before(folder):
    view, boards = View(), RunBoards(folder)
    steps(pipeline(num_microbatches=4), 4, 8)
    view.take(boards.look())
    assert {found["microbatches"] for found in view.latest.listings.values()} == {8}
    steps(pipeline(num_microbatches=2, schedule="gpipe"), 2)
    view.take(boards.look())
    assert {found["microbatches"] for found in view.latest.listings.values()} == {2} and view.complete_steps(0) == [1]
    assert type(recent_trace(view).spec).__name__ == "gpipe"


class Network:
    """A carrier to a worker of another machine whose clock is 5 ms behind."""

    worker, num_workers, serve_board = 0, 2, None

    def look(self, peer, seen):
        future = Future()
        future.set_result(own_boards._boards[peer].since(seen))
        return future

    def clock_offset(self, peer):
        return -5_000_000, 1000


def test_a_board_of_another_machine_is_mirrored_with_all_that_is_listed_later(folder, tmp_path_factory):
    here = tmp_path_factory.mktemp("here")
    pipe, view, boards = pipeline(num_microbatches=2), View(), RunBoards(here)
    copy = Copy(Peer(Network(), 1), here / "copy-1")
    steps(pipe, 2)
    for _ in range(2):
        copy.refresh()
    steps(pipe, 6, 4)
    for _ in range(4):
        copy.refresh()
        view.take(boards.look())
    there = Board(own_boards._boards[1].since).look()
    seen = [view._steps[step][1] for step in (1, 2, 3)]
    assert [r.start_ns for r in seen] == [r.start_ns + 5_000_000 for r in there]
    assert [(r.step, r.num_microbatches) for r in seen] == [(1, 2), (2, 6), (3, 4)] and view.latest.dropped == 0
    assert {found["microbatches"] for found in view.latest.listings.values()} == {
        6
    } and view.latest.clock_error_ms == 1e-3


def test_a_fork_leaves_the_boards_of_its_parent(folder, monkeypatch):
    pipe = pipeline(num_microbatches=2)
    with monkeypatch.context() as fork:
        fork.setattr(own_boards, "_owner", 0)
        own_boards.leave()
    assert headers_in(folder).keys() == {0, 1}
    own_boards.leave()
    assert not headers_in(folder) and pipe.num_workers == 2


def test_a_run_that_is_not_watched_can_still_be_told_of(monkeypatch):
    monkeypatch.setattr(own_boards, "_folder", lambda: None)
    unseen, pipe = pipeline(num_microbatches=2), pipeline(num_microbatches=4)
    own_boards.record(pipe)
    steps(unseen, 2)
    steps(pipe, 4, 4, 4)
    history = own_boards.collect()
    assert history.complete_steps(0) == [1, 2, 3] and recent_trace(history).spec.num_microbatches == 4
    found = figures(history)
    assert (found["steps"], found["workers"]) == (3, 2) and sentence(found).startswith("3 steps on 2 workers: ")


def test_steps_of_the_process_before_are_not_those_of_a_resumed_one(folder, tmp_path):
    """After `--resume` from step 2 a run of one step was summarised as one of three steps."""
    pipe = pipeline(num_microbatches=4)
    steps(pipe, 4, 4)
    pipe.checkpoints.save(tmp_path / "checkpoints")
    resumed, view = pipeline(num_microbatches=4), View()
    resumed.checkpoints.load(tmp_path / "checkpoints")
    steps(resumed, 4)
    view.take(RunBoards(folder).look())
    found = figures(view)
    assert (found["steps"], found["first_step"], view.complete_steps(0)) == (1, 3, [3])


def test_boards_of_an_earlier_pipeline_with_more_workers_do_not_count(folder):
    steps(pipeline(num_microbatches=4, num_workers=4), 4)
    steps(pipeline(num_microbatches=4), 4, 4)
    view = View()
    view.take(RunBoards(folder).look())
    assert len(worker_rows(view)) == 2 and view.complete_steps(0) == [1, 2]


def test_a_worker_that_ends_alone_tells_it_before_it_waits_for_the_last_look(monkeypatch):
    """Under torchrun `sys.exit` in one worker's script held the others, and torchrun, up for 10 s and more."""
    ending, other = local_carriers(2)
    monkeypatch.delenv(run_folders.FOLDER, raising=False)
    monkeypatch.setattr(own_boards, "_carrier", ending)
    monkeypatch.setattr(own_boards, "_STAY_S", 300)
    other.begin(Call(1, "step 3"))
    other.pull(0, 1, ["0F0"])
    own_boards.end_calls()
    own_boards.stay()
    assert "worker 1 calls step 3, but worker 0 has ended its script" in str(other.poll((1,))[0].answer)


def test_the_layout_is_told_with_blocks_parameters_and_replicas(folder):
    """Nothing said which part of the model a worker of 2 stages x 2 replicas holds."""
    pipe = pipeline(4, num_microbatches=4, replicas=2, zero=1)
    steps(pipe, 4)
    view = View()
    view.take(RunBoards(folder).look())
    wanted = (
        "4 processes: 2 stages x 2 replicas, zero 1; stage 0: blocks 0-3, 80 parameters; "
        "stage 1: blocks 4-7, 80 parameters"
    )
    trace = recent_trace(view)
    planned, actual = trace.pictures()
    assert trace.layout == wanted and actual.notes == [wanted] and figures(view)["layout"] == wanted
    names = [f"worker {worker}: stage {worker // 2}, replica {worker % 2}" for worker in range(4)]
    assert planned.rows == actual.rows == names and all(f">{name}<" in draw_svg(actual) for name in names)


def test_a_worker_with_several_stages_names_them_in_its_row(folder):
    steps(pipeline(2, num_microbatches=4, schedule="zb-v"), 4)
    view = View()
    view.take(RunBoards(folder).look())
    assert recent_trace(view).rows == ["worker 0: stages 0, 3", "worker 1: stages 1, 2"]
    layout = "2 processes: 4 stages on 2 workers; stage 0: blocks 0-1, 40 parameters; "
    assert recent_trace(view).layout.startswith(layout)


def test_watchers_write_the_scalars_that_a_script_is_given(folder):
    """TensorBoard got neither learning rate nor norm, and its rates left out the time between steps."""
    pipe = pipeline(num_microbatches=2, max_grad_norm=1.0)
    logged, view = [], View()
    pipe.on_step(logged.append)
    steps(pipe, 2, 2)
    view.take(RunBoards(folder).look())
    found = [scalars_of(view, step) for step in (1, 2)]
    for report, scalars in zip(logged, found, strict=True):
        assert scalars["gradient norm"] == report.grad_norm and scalars["learning rate"] == report.learning_rate
        assert scalars["loss"] == report.loss and scalars["rows per s"] == pytest.approx(report.rows_per_s)
        assert "tokens per s" not in scalars


def test_watchers_see_evaluations_norm_and_learning_rate(folder):
    """The page had the loss of training alone, though scripts evaluate between steps."""
    batch = torch.ones(2, 4), torch.ones(2, 4)
    pipe, boards, view = pipeline(num_microbatches=2, log_grad_norm=True), RunBoards(folder), View()
    pipe.step(batch)
    first = [pipe.evaluate(batch), pipe.evaluate((2 * batch[0], batch[1]))]
    steps(pipe, 2)
    view.take(boards.look())
    second = pipe.evaluate(batch)
    pipe.evaluate(batch, metric=lambda output, target: output.sum())  # is no loss
    view.take(boards.look())
    expected = [(1, pytest.approx(sum(first) / 2)), (2, second)]
    assert view.held_out_losses == expected
    state = describe(view)
    assert state["held_out"] == expected
    assert state["grad_norm"] == pipe.grad_norm and state["learning_rate"] == pipe.learning_rate == 0.1


def test_idle_is_one_share_wherever_it_is_shown(folder):
    """The table, TensorBoard and the summary each had a share of another time."""
    pipe, view = pipeline(num_microbatches=2), View()
    steps(pipe, 2)
    view.take(RunBoards(folder).look())
    trace, rows, scalars = recent_trace(view, 0), worker_rows(view), scalars_of(view, 1)
    shares = [row.bubble for row in rows]
    assert shares == idle(trace.spans(), 2) == [scalars[f"bubble/worker {worker}"] for worker in (0, 1)]
    assert sum(shares) / 2 == pytest.approx(trace.bubble) == pytest.approx(figures(view)["bubble_actual"])


def test_the_carrier_of_an_old_epoch_is_not_held(monkeypatch):
    """Each death left seven descriptors behind: the boards held the carrier over which nobody was left."""
    old, new = SimpleNamespace(serve_board="board"), SimpleNamespace(serve_board=None)
    monkeypatch.setattr(own_boards, "_carrier", old)
    own_boards.follow_carrier(new)
    assert own_boards._carrier is new and new.serve_board == "board"
