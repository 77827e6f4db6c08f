"""Boards: what is written is read, torn and late reads are noticed."""

import json
import math
import os
import struct
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rpc_pipe.boards import board as boards
from rpc_pipe.boards.board import HEAD, BoardWriter, Live, State, encode_record, json_line
from rpc_pipe.boards.run_boards import Board, BoardFile, decode_record, unpack_live
from rpc_pipe.dependency import Action, B, F, Kind, Pulled
from rpc_pipe.workers.hooks import Arrived, Blocked, Record, StepRecord

times = st.integers(0, 2**62)
actions = st.builds(Action, st.integers(0, 2**16 - 1), st.sampled_from(list(Kind.all())), st.integers(0, 10**9 - 1))
records = st.builds(
    StepRecord,
    worker=st.integers(0, 1000),
    step=times,
    start_ns=times,
    end_ns=times,
    actions=st.lists(st.builds(Record, actions, times, times), max_size=5),
    arrivals=st.lists(st.builds(Arrived, actions, st.integers(0, 1000), times, times), max_size=5),
    loss=st.floats(allow_nan=False),
    rows=times,
    tokens=times,
    peak_bytes=times,
    outbox=times,
    num_microbatches=times,
)


def record(step, worker=0):
    return StepRecord(worker, step, 10, 20, [Record(F(0, 1), 11, 19)], [Arrived(F(0, 1), 1, 64, 11)])


def board_at(path):
    return Board(BoardFile(path).since)


def board_of(path, **header):
    return BoardWriter(path, {"microbatches": 4, **header}, lambda count: {"microbatches": count})


def finish(writer, record):
    writer.step_finished(record)
    writer.write_out()


def live(board):
    board.look()
    return board.live


@pytest.fixture
def writer(tmp_path):
    return board_of(tmp_path / "worker-0", name="ä")


@given(records)
def test_a_record_is_read_as_it_was_written(record):
    assert decode_record(json.loads(json.dumps(encode_record(record)))) == record


def test_clocks_are_put_right_when_read():
    read = decode_record(encode_record(record(1)), offset_ns=1000)
    assert (read.start_ns, read.end_ns) == (1010, 1020)
    assert read.actions == [Record(F(0, 1), 1011, 1019)] and read.arrivals[0].at_ns == 1011


def test_kinds_of_a_schedule_of_ones_own_are_read_where_its_code_is_not(tmp_path, monkeypatch):
    """A watcher, or the launcher after a failure, ended in KeyError: 'X'."""
    monkeypatch.setattr(Kind, "_rows", dict(Kind._rows))
    made = Kind("X", "exchange halos", resource="copy", colour="#123456")
    written = board_of(tmp_path / "worker-0", kinds=[made.row])
    written.action_started(3, made(1, 2))
    finish(written, StepRecord(0, 3, 10, 20, [Record(made(0, 1), 11, 19)]))
    del Kind._rows["X"]
    board = board_at(tmp_path / "worker-0")
    assert str(board.look()[0].actions[0].action) == "0X1" and str(board.live) == "running 1X2, step 3"
    assert Kind.of("X").row == made.row and Kind.of("X").resource == "copy"
    Kind.learn([made.row])  # is known


def test_what_a_worker_does_is_read_live(writer, tmp_path):
    board = board_at(tmp_path / "worker-0")
    assert live(board).state is State.STARTING and board.header["name"] == "ä"
    writer.action_started(3, F(1, 2))
    assert str(live(board)) == "running 1F2, step 3"
    writer.waiting(3, lambda: Blocked(B(1, 0), [Pulled(B(2, 0), 4, True), Pulled(F(0, 9), 5, True)]))
    assert str(live(board)) == "waiting for 2B0 of worker 4 to run 1B0, step 3" and board.live.peer == 4
    writer.waiting(3, lambda: Blocked(None, []))
    assert str(live(board)) == "waiting for the result of step 3"
    finish(writer, record(3))
    writer.idle(3)
    assert str(live(board)) == "between steps, after step 3"
    writer.close()
    assert live(board).state is State.LEFT


def test_a_slow_reader_misses_steps_and_knows_how_many(writer, tmp_path, monkeypatch):
    board = board_at(tmp_path / "worker-0")
    for step in range(3):
        finish(writer, record(step))
    assert [r.step for r in board.look()] == [0, 1, 2] and board.dropped == 0
    monkeypatch.setattr(boards, "MOST_BYTES", 2**15)
    for step in range(3, 1003):
        finish(writer, record(step))
    steps = [r.step for r in board.look()]
    assert steps == sorted(set(steps)) and steps[-10:] == list(range(993, 1003))  # of the first file, and the last
    assert board.dropped == 1000 - len(steps) > 0
    late = board_at(tmp_path / "worker-0")
    assert late.look()[-1].step == 1002 and late.dropped == 0  # what was before the first look has not been missed


def test_many_readers_do_not_disturb_each_other(writer, tmp_path):
    boards = [board_at(tmp_path / "worker-0") for _ in range(3)]
    finish(writer, record(0))
    assert [[r.step for r in board.look()] for board in boards] == [[0]] * 3


def test_a_record_that_is_being_written_is_left_for_later(writer, tmp_path):
    board, line = board_at(tmp_path / "worker-0"), json_line(kind="step", number=2, record=encode_record(record(0)))
    writer._file.write(line[:40])
    assert board.look() == []
    writer._file.write(line[40:])
    assert [r.step for r in board.look()] == [0]


def test_a_state_that_is_being_written_is_not_read(writer, tmp_path):
    board = board_at(tmp_path / "worker-0")
    writer.action_started(3, F(1, 2))
    struct.pack_into("<q", writer._head, HEAD.size - 8, 0)  # as if the worker stood still in the middle of it
    assert live(board) == Live()
    writer.action_started(4, F(1, 2))
    assert str(live(board)) == "running 1F2, step 4"


def large(step, num_actions=1000):
    return StepRecord(0, step, 0, 1, [Record(F(0, m), 0, 1) for m in range(num_actions)], loss=1.5)


def test_a_state_of_zeros_is_no_state(writer, monkeypatch):
    """`pack_into` clears a head before it fills it: a worker killed in between ended the launcher by a KeyError."""
    writer.action_started(1, F(0, 1))
    before = bytes(writer._head[:])
    assert unpack_live(bytes(HEAD.size), 0) == Live()

    def killed(*values):
        raise KeyboardInterrupt

    monkeypatch.setattr(boards, "HEAD", SimpleNamespace(size=HEAD.size, pack=killed))
    with pytest.raises(KeyboardInterrupt):
        writer.action_started(1, B(0, 1))
    assert writer._head[:] == before


def test_a_long_board_is_replaced_by_one_with_the_latest_steps_and_readers_go_on(writer, tmp_path, monkeypatch):
    monkeypatch.setattr(boards, "MOST_BYTES", 2**16)
    board, seen = board_at(tmp_path / "worker-0"), [large(0, 1), large(1), large(2, 1)]
    for step in seen:
        finish(writer, step)
    for step in range(3, 40):
        finish(writer, large(step, 2_000))
    writer.action_started(40, F(1, 2))
    steps = board.look()
    numbers = [r.step for r in steps]
    assert steps[:3] == seen and numbers == sorted(set(numbers)) and numbers[-2:] == [38, 39]  # of both files
    assert board.listing["microbatches"] == 4 and board.dropped == 40 - len(steps)
    assert str(board.live) == "running 1F2, step 40"


def test_a_step_that_there_is_no_room_for_is_left_out_and_the_run_goes_on(writer, tmp_path, monkeypatch):
    board = board_at(tmp_path / "worker-0")
    finish(writer, record(0))
    monkeypatch.setattr(writer, "_file", boards.File("/dev/full", "w"))
    finish(writer, record(1))
    monkeypatch.undo()
    finish(writer, record(2))
    assert [r.step for r in board.look()] == [0, 2] and board.dropped == 1
    assert [path.name for path in tmp_path.iterdir()] == ["worker-0"]


def test_what_is_no_board_is_read_as_an_empty_one(tmp_path):
    for content in (b"", b"x" * 10_000 + b"\n"):
        (tmp_path / "worker-1").write_bytes(content)
        board = board_at(tmp_path / "worker-1")
        assert board.look() == [] and not board.header


def test_a_loss_that_is_none_stays_none():
    assert math.isnan(decode_record(encode_record(record(0))).loss)
    assert str(Live()) == "starting up"


def test_a_board_that_another_one_follows_holds_no_file(tmp_path):
    """A process that made hundreds of pipelines had 2,300 descriptors: Python collects their cycles seldom."""
    before = len(os.listdir("/proc/self/fd"))
    first = board_of(tmp_path / "worker-0", name="first")
    first.detach()
    board_of(tmp_path / "worker-0", name="second")
    finish(first, record(0))
    assert len(os.listdir("/proc/self/fd")) == before
    board = board_at(tmp_path / "worker-0")
    board.look()
    assert board.header["name"] == "second"


def test_many_evaluations_leave_the_steps_on_the_board(writer):
    """The demo evaluates 100 batches at its end: its summary, trace and page found no step."""
    finish(writer, record(0))
    for _ in range(1_000):
        writer.evaluated(1, 2.5)
    found = Board(writer.since)
    assert [each.step for each in found.look()] == [0]
    assert found.evaluations[-1] == (1, 2.5)
