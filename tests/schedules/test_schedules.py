"""Every schedule: legal, as drawn, as cheap as its closed form says, under any timing."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rpc_pipe.dependency import B, F, check_all, local_order
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
    drawn = [line.strip() for line in SCHEDULES[name].__doc__.splitlines() if line.strip().startswith("worker")]
    real = picture(name, 4, 4)
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


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(sorted(SCHEDULES)),
    P=st.integers(1, 6),
    M=st.integers(1, 12),
    order=st.sampled_from(["ready", "fixed"]),
    comm=st.integers(0, 5),
    seed=st.randoms(use_true_random=False),
)
def test_any_timing_ends_with_each_action_once_and_bounded_memory(name, P, M, order, comm, seed):
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
    import ast
    import inspect

    for cls in SCHEDULES.values():
        tree = ast.parse(inspect.getsource(cls)).body[0]
        docstring = tree.body[0]
        lines = tree.end_lineno - tree.lineno + 1 - (docstring.end_lineno - docstring.lineno + 1)
        assert lines <= 40, cls
