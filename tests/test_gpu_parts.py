"""`scripts/gpu` without a GPU: each part names itself if it hangs, and says what has been found how."""

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest

from bench.gpu.parts import PARTS, USUAL
from bench.gpu.runner import Outcome, Runner, verdict


def test_a_part_that_hangs_is_ended_by_its_limit_and_named(tmp_path):
    def wrong(name):
        with closing(Runner("cpu", time.monotonic() + 60, tmp_path / name, True, (name, "hang"))) as run:
            return run.run({name: (PARTS[name][0], 0.75, ())}, [name]), list(run.wrong)

    with ThreadPoolExecutor(len(PARTS)) as pool:
        assert dict(zip(PARTS, pool.map(wrong, PARTS), strict=True)) == {name: (1, [name]) for name in PARTS}


@pytest.mark.parametrize(
    "device, how, wrong",
    [
        ("cuda:0", "copied from its device", ["way by zmq without handles"]),
        ("cuda:0", "copied through memory of the host", ["way by rpc", "way by zmq"]),
        ("cuda:0", "brought by the host", ["way by rpc", "way by zmq", "way by zmq without handles"]),
        ("xpu:0", "", []),
    ],
)
def test_payloads_must_come_by_the_way_that_the_device_has(tmp_path, monkeypatch, device, how, wrong):
    told = f"worker 1: payloads on the device of worker 0 are {how}" if how else ""
    monkeypatch.setattr(Runner, "call", lambda run, *typed: Outcome(0, f'RESULT {{"64 MiB": 1}}\n{told}', 1.0))
    with closing(Runner(device, time.monotonic() + 60, tmp_path, False, ("", ""))) as run:
        run.run(PARTS, ["payloads"])
        assert run.wrong.get("payloads", []) == wrong


def test_a_part_for_which_no_time_is_left_counts(tmp_path):
    with closing(Runner("cpu", time.monotonic(), tmp_path, True, ("", ""))) as run:
        assert run.run(PARTS, ["ways", "kill"]) == 2


def test_all_usual_parts_fit_in_nine_minutes():
    assert sum(PARTS[name][1] for name in USUAL) <= 9 * 60


@pytest.mark.parametrize(
    "code, told, typed, found",
    [
        (0, '{"identical": true}', "--slices 4", "bit for bit"),
        (0, '{"identical": false}', "--slices 4", "within rounding"),
        (0, '{"identical": false}', "--members 2 --shard tp", "within rounding"),
        (0, '{"identical": false}', "--shard fsdp", ""),
        (1, '{"identical": true}', "", ""),
    ],
)
def test_within_rounding_is_not_called_bit_for_bit(code, told, typed, found):
    assert verdict(code, told, typed) == found
