"""Every schedule: legal, as drawn, as cheap as its closed form says, under any timing."""

import inspect

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from rpc_pipe.dependency import B, F, ScheduleError, check_all, local_order
from rpc_pipe.schedules import SCHEDULES
from rpc_pipe.simulator import simulate, uniform

UNIT = uniform({F: 1, B: 1})


def picture(name, num_workers, num_microbatches):
    """Draw a schedule as its docstring does."""
    spec = SCHEDULES[name](num_workers=num_workers, num_microbatches=num_microbatches)
    result = simulate(spec, UNIT, order="fixed")
    cells = {
        (s.worker, s.start): f"{s.action.kind.value}{s.action.microbatch}" for s in result.spans if s.end > s.start
    }
    return [
        f"worker {w}  " + " ".join(cells.get((w, t), "..") for t in range(result.makespan)) for w in range(num_workers)
    ]


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_docstring_draws_the_timeline(name):
    """Of 4 workers and 4 microbatches, or 2 and 2 if a worker holds several stages; it may end with an ellipsis."""
    drawn = [line.strip() for line in SCHEDULES[name].__doc__.splitlines() if line.strip().startswith("worker")]
    real = picture(name, len(drawn), len(drawn))
    assert [line[: len(shown)] for line, shown in zip(real, drawn, strict=True)] == drawn


@pytest.mark.parametrize("M", [1, 2, 3, 5, 8, 16])
@pytest.mark.parametrize("P", [1, 2, 3, 4, 8])
def test_closed_forms(P, M):
    """Makespan (M+P-1)(t_F+t_B), activations min(P-w, M) for 1F1B and M for GPipe."""
    for t_f, t_b in ((1, 1), (1, 2), (3, 5)):
        cost = uniform({F: t_f, B: t_b})
        for order in ("fixed", "ready"):
            gpipe = simulate(SCHEDULES["gpipe"](num_workers=P, num_microbatches=M), cost, order=order)
            one_f_one_b = simulate(SCHEDULES["1f1b"](num_workers=P, num_microbatches=M), cost, order=order)
            naive = simulate(SCHEDULES["naive"](num_workers=P, num_microbatches=M), cost, order=order)
            assert gpipe.makespan == one_f_one_b.makespan == (M + P - 1) * (t_f + t_b)
            assert gpipe.bubble == pytest.approx((P - 1) / (M + P - 1))
            assert gpipe.peak_activations == (M,) * P
            assert one_f_one_b.peak_activations == tuple(min(P - w, M) for w in range(P))
            assert naive.makespan == M * P * (t_f + t_b)


@settings(max_examples=150, deadline=None)
@given(
    name=st.sampled_from(sorted(SCHEDULES)),
    P=st.integers(1, 6),
    M=st.integers(1, 12),
    order=st.sampled_from(["ready", "fixed"]),
    comm=st.integers(0, 5),
    seed=st.randoms(use_true_random=False),
)
def test_any_timing_ends_with_each_action_once_and_bounded_memory(name, P, M, order, comm, seed):
    assume(name != "interleaved" or M % P == 0)
    spec = SCHEDULES[name](num_workers=P, num_microbatches=M)
    check_all(spec)
    result = simulate(spec, lambda action: seed.randint(0, 9), comm=comm, order=order)
    for worker in range(P):
        ran = [s.action for s in result.spans if s.worker == worker]
        assert sorted(map(str, ran)) == sorted(map(str, local_order(spec, worker)))
        assert result.peak_activations[worker] <= spec.peak_activations(worker)
    end = {s.action: s.end for s in result.spans}
    for span in result.spans:
        for need in spec.needs(span.action):
            latency = comm if spec.worker(need) != span.worker else 0
            assert span.start >= end[need] + latency


def test_a_wider_window_buys_latency_tolerance_with_memory():
    cost = uniform({F: 1, B: 2})
    narrow = simulate(SCHEDULES["1f1b"](num_workers=8, num_microbatches=32), cost, comm=1)
    wide = simulate(SCHEDULES["1f1b"](num_workers=8, num_microbatches=32, window=14), cost, comm=1)
    assert wide.makespan < narrow.makespan
    assert max(wide.peak_activations) <= 14


def test_every_schedule_is_at_most_40_lines():
    """Of code: without blank lines, docstrings and imports."""
    for cls in SCHEDULES.values():
        documented = [cls, *(value for value in vars(cls).values() if callable(value) and value.__doc__)]
        blank = sum(not line.strip() for line in inspect.getsource(cls).splitlines())
        prose = sum(sum(bool(line.strip()) for line in (thing.__doc__ or "").splitlines()) for thing in documented)
        assert len(inspect.getsource(cls).splitlines()) - blank - prose <= 40, cls


@pytest.mark.parametrize("M", [4, 8, 16])
@pytest.mark.parametrize("P", [2, 4])
def test_closed_forms_of_schedules_with_several_stages_a_worker(P, M):
    """In times of a stage; v chunks, W waves (expected figures: research on the published timetables)."""
    for v in (2, 3):
        for cost, unit in ((UNIT, 2), (uniform({F: 1, B: 2}), 3)):
            interleaved = simulate(SCHEDULES["interleaved"](num_workers=P, num_microbatches=M, chunks=v), cost)
            bfs = simulate(SCHEDULES["bfs"](num_workers=P, num_microbatches=M, chunks=v), cost)
            assert interleaved.makespan == bfs.makespan == (v * M + P - 1) * unit
            assert bfs.peak_activations == (v * M,) * P
            expected = tuple(min(v * M, 2 * (P - 1 - w) + (v - 1) * P + 1) for w in range(P))
            assert interleaved.peak_activations == expected
    for waves in (1, 2):
        spec = SCHEDULES["hanayo"](num_workers=P, num_microbatches=M, waves=waves)
        hanayo = simulate(spec, UNIT, order="fixed")
        assert hanayo.makespan == 4 * waves * M + 2 * (P - 1)
        assert hanayo.peak_activations == tuple((2 * waves - 1) * P + w + 1 for w in range(P))
    eager = simulate(SCHEDULES["eager-1f1b"](num_workers=P, num_microbatches=M), UNIT)
    assert eager.makespan == 2 * (M + P - 1)
    assert eager.peak_activations == tuple(min(M, 2 * (P - w) - 1) for w in range(P))


def test_interleaved_says_which_microbatches_it_takes():
    with pytest.raises(ScheduleError, match=r"microbatches 6: .* multiple of workers 4, such as 8"):
        SCHEDULES["interleaved"](num_workers=4, num_microbatches=6)
