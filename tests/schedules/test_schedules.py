"""Every schedule: legal, as drawn, as cheap as its closed form says, under any timing."""

import inspect
import re

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from rpc_pipe.dependency import ACCUMULATING, B, F, I, PipeError, R, ScheduleError, W, check_all, entries, local_order
from rpc_pipe.planning.simulator import simulate, uniform
from rpc_pipe.schedules import SCHEDULES

UNIT = uniform({F: 1, B: 1, I: 1, W: 1, R: 1})
#: F = I = W, a full backward costs both, a second forward as much as the first
EVEN = uniform({F: 1, B: 2, I: 1, W: 1, R: 1})


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
    """Of as many microbatches as workers, unless it says "M=4"; it may stop before the end."""
    doc = SCHEDULES[name].__doc__
    drawn = [line.strip() for line in doc.splitlines() if line.strip().startswith("worker")]
    said = re.search(r"\(P=\d, M=(\d+)", doc)
    real = picture(name, len(drawn), int(said[1]) if said else len(drawn))
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
    assume(name != "dualpipe" or P % 2 == 0)
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


def test_dualpipe_says_which_numbers_of_workers_it_takes():
    with pytest.raises(ScheduleError, match=r"workers 3: dualpipe needs an even number.* such as 4"):
        SCHEDULES["dualpipe"](num_workers=3, num_microbatches=6)


def test_chimera_says_which_pairs_it_takes():
    with pytest.raises(ScheduleError, match=r"pairs 4: must be one of 1, 3 for 6 workers"):
        SCHEDULES["chimera"](num_workers=6, num_microbatches=6, pairs=4)


def steps(name, P, M, cost=EVEN, **parameters):
    return simulate(SCHEDULES[name](num_workers=P, num_microbatches=M, **parameters), cost, order="fixed")


@pytest.mark.parametrize("units", [2, 3])
@pytest.mark.parametrize("P", [2, 4, 8])
def test_closed_forms_of_zero_bubble_schedules(P, units):
    M = units * P
    for t_f, t_i, t_w in ((1, 1, 1), (2, 3, 2), (2, 2, 1)):
        h1 = steps("zb-h1", P, M, uniform({F: t_f, I: t_i, W: t_w}))
        assert h1.makespan == h1.span == M * (t_f + t_i + t_w) + (P - 1) * (t_f + t_i - t_w)
    assert h1.peak_activations == (P,) * P
    h2 = steps("zb-h2", P, M)
    assert (h2.makespan, h2.span) == (3 * M + P - 1, 3 * M)
    assert h2.peak_activations == (2 * P - 1,) * P
    v = steps("zb-v", P, M)
    assert (v.makespan, v.span) == (6 * M + P - 1, 6 * M)
    assert v.peak_activations == (2 * P,) * P
    half, least = steps("v-half", P, M), steps("v-min", P, M)
    assert half.makespan == 6 * M + {2: 1, 4: 5, 8: 17}[P]
    assert least.makespan == 6 * M + {2: 3, 4: 11, 8: 27}[P]
    assert max(half.peak_activations) <= 2 * ((P + 2) // 2) and max(least.peak_activations) <= 2 * ((P + 4) // 3)


@pytest.mark.parametrize("units", [2, 3])
@pytest.mark.parametrize("P", [2, 4, 8])
def test_closed_forms_of_bidirectional_schedules(P, units):
    M = units * P
    chimera = steps("chimera", P, M, UNIT)
    assert chimera.makespan == 2 * M + P - 2
    assert chimera.peak_activations == tuple(min(w + 1, P - w) + P // 2 for w in range(P))
    assert steps("chimera", P, M).makespan == units * (4 * P - 2) + P - 2
    if P % 4 == 0:
        assert steps("chimera", P, M, UNIT, pairs=2).makespan == 2 * M + P // 2 - 2
    doubled = SCHEDULES["chimera"](num_workers=P, num_microbatches=2 * M, scale="forward-doubling")
    assert simulate(doubled, EVEN).makespan <= 3 * (2 * M) + 2 * (P - 2)
    assert steps("dualpipe", P, M).makespan <= 3 * M + P - 2
    assert steps("dualpipe", P, M).peak_activations == (P + 1,) * P
    assert steps("dualpipev", P, M).makespan <= 6 * M + 2 * (P - 1)
    assert steps("dualpipev", P, M).peak_activations == (2 * P + 1,) * P


@pytest.mark.parametrize("P, M, published", [(2, 8, 33), (4, 4, 24), (4, 8, 39), (4, 16, 72), (8, 32, 147)])
def test_recompute(P, M, published):
    """Varuna's own figures count halves of backward; R may start earlier here and keeps the same inputs."""
    varuna = simulate(SCHEDULES["varuna"](num_workers=P, num_microbatches=M), EVEN)
    assert varuna.makespan <= published
    assert varuna.peak_activations == tuple(min(M, max(1, 3 * (P - 1 - w))) for w in range(P))
    for t_f, t_b in ((1, 1), (1, 2)):
        gpipe = steps("gpipe-recompute", P, M, uniform({F: t_f, R: t_f, B: t_b}))
        assert gpipe.makespan == (M + P - 1) * (t_f + t_b) + M * t_f


def test_mixpipe_is_chimera_with_a_wider_window():
    """Figures of the window alone, 8 workers, 32 microbatches."""
    found = {
        window: simulate(SCHEDULES["mixpipe"](num_workers=8, num_microbatches=32, window=window), EVEN).makespan
        for window in (4, 5, 6, 8)
    }
    assert found == {4: 126, 5: 120, 6: 113, 8: 110}


@pytest.mark.parametrize("name", SCHEDULES)
def test_few_and_odd_microbatches(name):
    """What a paper asks of their number is not asked here."""
    for P in (1, 2, 3, 4):
        for M in (1, 2, 3, 5, 7):
            try:
                spec = SCHEDULES[name](num_workers=P, num_microbatches=M)
            except PipeError:
                assert name == "dualpipe" and P % 2
                continue
            check_all(spec)
            ran = [a for order in simulate(spec, EVEN).orders() for a in order]
            assert (
                len(ran)
                == len(set(ran))
                == sum(len(spec.actions(s, m)) for s in range(spec.num_stages) for m in range(M))
            )


@pytest.mark.parametrize("name", SCHEDULES)
def test_each_gradient_is_summed_in_one_order_on_all_replicas(name):
    """One B or W waits for the one before it of its shard, so the sum's last bits do not depend on timing."""
    spec = SCHEDULES[name](num_workers=4, num_microbatches=8)
    for worker in range(4):
        waits_for, last = {}, {}  # of B and W: all that are before by own edges; the last of its shard
        for entry in entries(spec, worker):
            if entry.action.kind in ACCUMULATING:
                shard = entry.action.stage, spec.route(entry.action.microbatch)
                direct = {need for need in entry.own if need.kind in ACCUMULATING}
                waits_for[entry.action] = direct.union(*(waits_for[need] for need in direct))
                assert shard not in last or last[shard] in waits_for[entry.action]
                last[shard] = entry.action
