"""Boards: what is written is read, torn and late reads are noticed."""

import json
import math
import os
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rpc_pipe.dependency import Action, B, F, Kind, Pulled
from rpc_pipe.tracing import board as boards
from rpc_pipe.tracing.board import LINES_AT, MOST_STEPS, BoardWriter, Live, State, encode_record
from rpc_pipe.tracing.board_reader import Board, decode_record
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


@pytest.fixture
def writer(tmp_path):
    return BoardWriter(tmp_path / "worker-0", {"pid": 1, "name": "ä"})


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
    written = BoardWriter(tmp_path / "worker-0", {"kinds": [made.row]})
    written.action_started(3, made(1, 2))
    written.step_finished(StepRecord(0, 3, 10, 20, [Record(made(0, 1), 11, 19)]))
    del Kind._rows["X"]
    board = Board(tmp_path / "worker-0")
    assert str(board.live()) == "running 1X2, step 3" and str(board.records()[0].actions[0].action) == "0X1"
    assert Kind.of("X").row == made.row and Kind.of("X").resource == "copy"
    Kind.learn([made.row])  # is known


def test_what_a_worker_does_is_read_live(writer, tmp_path):
    board = Board(tmp_path / "worker-0")
    assert board.header == {"pid": 1, "name": "ä"} and board.live().state is State.STARTING
    writer.action_started(3, F(1, 2))
    assert str(board.live()) == "running 1F2, step 3"
    writer.waiting(3, lambda: Blocked(B(1, 0), [Pulled(B(2, 0), 4, True), Pulled(F(0, 9), 5, True)]))
    live = board.live()
    assert str(live) == "waiting for 2B0 of worker 4 to run 1B0, step 3" and live.peer == 4
    writer.waiting(3, lambda: Blocked(None, []))
    assert str(board.live()) == "waiting for the result of step 3"
    writer.step_finished(record(3))
    writer.idle(3)
    assert str(board.live()) == "between steps, after step 3"
    writer.close()
    assert board.live().state is State.LEFT


def test_a_slow_reader_misses_steps_and_knows_how_many(writer, tmp_path):
    board = Board(tmp_path / "worker-0")
    for step in range(3):
        writer.step_finished(record(step))
    assert [r.step for r in board.records()] == [0, 1, 2] and board.dropped == 0
    for step in range(3, 1003):
        writer.step_finished(record(step))
    after = Board(tmp_path / "worker-0", after=board)
    steps = [r.step for r in after.records()]
    assert steps == list(range(steps[0], 1003)) and MOST_STEPS // 2 <= len(steps) <= MOST_STEPS
    assert after.dropped == 1000 - len(steps)
    assert after.records() == []
    late = Board(tmp_path / "worker-0")
    assert late.records()[-1].step == 1002 and late.dropped == 0  # what was before the first look has not been missed


def test_many_readers_do_not_disturb_each_other(writer, tmp_path):
    boards = [Board(tmp_path / "worker-0") for _ in range(3)]
    writer.step_finished(record(0))
    assert [[r.step for r in board.records()] for board in boards] == [[0]] * 3


def test_a_record_that_is_being_written_is_left_for_later(writer, tmp_path):
    board, line = Board(tmp_path / "worker-0"), boards._line(kind="step", number=1, record=encode_record(record(0)))
    writer.file.append(line[:40])
    assert board.records() == []
    writer.file.append(line[40:])
    assert [r.step for r in board.records()] == [0]


def test_a_state_that_is_being_written_is_not_read(writer, tmp_path):
    board = Board(tmp_path / "worker-0")
    writer.action_started(3, F(1, 2))
    struct.pack_into("<q", writer._head, LINES_AT - 8, 0)  # as if the worker stood still in the middle of it
    assert board.live() == Live()
    writer.action_started(4, F(1, 2))
    assert str(board.live()) == "running 1F2, step 4"


def large(step, num_actions=1000):
    return StepRecord(0, step, 0, 1, [Record(F(0, m), 0, 1) for m in range(num_actions)], loss=1.5)


def test_a_long_board_is_replaced_by_one_with_the_latest_steps_and_readers_go_on(writer, tmp_path, monkeypatch):
    monkeypatch.setattr(boards, "_MOST_BYTES", 2**16)
    first, seen = Board(tmp_path / "worker-0"), [large(0, 1), large(1), large(2, 1)]
    writer.list_program({"microbatches": 4})
    for step in seen:
        writer.step_finished(step)
    for step in range(3, 40):
        writer.step_finished(large(step, 2_000))
    writer.action_started(40, F(1, 2))
    before = first.records()
    assert before[:3] == seen and first.live().state is State.STARTING  # of what has been replaced
    board = Board(tmp_path / "worker-0", after=first)
    assert board.header == first.header and board.listings == {4: {"microbatches": 4}}
    steps = [r.step for r in board.records()]
    assert steps == list(range(steps[0], 40)) and len(steps) >= 2
    assert board.dropped == steps[0] - len(before)
    assert str(board.live()) == "running 1F2, step 40"


def test_a_step_that_there_is_no_room_for_is_left_out_and_the_run_goes_on(writer, tmp_path, monkeypatch):
    board, write = Board(tmp_path / "worker-0"), os.pwrite
    writer.step_finished(record(0))
    monkeypatch.setattr(os, "pwrite", lambda file, data, at: write(file, data[:1000], at))
    for step in (large(1), record(2)):
        writer.step_finished(step)
    assert [r.step for r in board.records()] == [0, 2] and board.dropped == 1
    assert [path.name for path in tmp_path.iterdir()] == ["worker-0"]


def test_what_is_no_board_is_refused(tmp_path):
    for content in (b"", b"x" * 10_000):
        (tmp_path / "worker-1").write_bytes(content)
        with pytest.raises(ValueError, match="no board"):
            Board(tmp_path / "worker-1")


def test_a_loss_that_is_none_stays_none():
    assert math.isnan(decode_record(encode_record(record(0))).loss)
    assert str(Live()) == "starting up"
