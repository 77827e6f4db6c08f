"""Every schedule: legal, as drawn, as cheap as its closed form says, under any timing."""

import inspect
import re
from collections import Counter
from functools import lru_cache
from itertools import product

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from refusals import refused

from rpc_pipe.dependency import B, F, I, PipeError, R, ScheduleError, W, check_all, entries, local_order
from rpc_pipe.planning.relation import Relation
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
        (s.worker, s.start): f"{s.action.kind.letter}{s.action.microbatch}" for s in result.spans if s.end > s.start
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


#: a line of a docstring that says what a schedule costs, where and when
FORMULA = re.compile(r"^ +(makespan|span|bubble|activations) (=|<=) (.+?)(?: if (.+))?$", re.MULTILINE)
VARIANTS = {
    "1f1b": [{"window": 9}],
    "bfs": [{"chunks": 3}],
    "chimera": [{"pairs": 2}, {"scale": "forward-doubling"}],
    "hanayo": [{"waves": 2}],
    "interleaved": [{"chunks": 1}, {"chunks": 3}],
    "mixpipe": [{"window": 5}],
}


class Known(dict):
    """The names in a formula: P, M, w, times of actions, and else what the schedule declares."""

    def __init__(self, spec, **values):
        super().__init__(values, min=min, max=max, P=spec.num_workers, M=spec.num_microbatches)
        self.spec = spec

    def __missing__(self, name):
        return getattr(self.spec, name)


#: once for all times of actions
compiled = lru_cache(1)(Relation)
proved = lru_cache(8)(lambda spec, worker: spec.peak_activations(worker))


def stated(spec, formulas, times, latency=0):
    """Yield (formula, what it says, what the simulator finds) of those that are said of such a run.

    `=` is said of the schedule's own order, `<=` of any timing, so it is compared with what the checker proves too.
    """
    result = simulate(compiled(spec), uniform({kind: times[f"t_{kind!r}"] for kind in (F, B, I, W, R)}), comm=latency)
    for formula in formulas:
        figure, relation, value, condition = formula
        if latency and relation == "=" and "latency" not in (condition or ""):
            continue
        for w in range(spec.num_workers) if figure == "activations" else (0,):
            known = Known(spec, w=w, latency=latency, **times)
            if condition and not eval(condition, {}, known):
                continue
            says = eval(value, {}, known)
            if relation == "<=":
                assert proved(spec, w) <= says, (spec, formula)
                assert result.peak_activations[w] <= says, (spec, formula)
            elif figure == "activations":
                yield formula, says, result.peak_activations[w]
            else:
                yield formula, says, pytest.approx(getattr(result, figure))
            yield formula, 0, 0


def runs_of(name):
    """Yield specs, times and latencies of links."""
    sizes = [(P, M) for P in (1, 2, 3, 4, 6) for M in {1, 2, P - 1, P, 2 * P, 2 * P + 1, 3 * P} if M > 0] + [(8, 16)]
    for (P, M), parameters in product(sizes, ({}, *VARIANTS.get(name, ()))):
        if (name == "dualpipe" and P % 2) or (parameters == {"pairs": 2} and P % 4):
            continue
        spec = SCHEDULES[name](num_workers=P, num_microbatches=M, **parameters)
        for t_F, t_I, t_W in [(2, 1, 1), (1, 1, 1), (2, 3, 2), (1, 1, 2), (4, 1, 1)][: 5 if P * M <= 18 else 2]:
            times = {"t_F": t_F, "t_I": t_I, "t_W": t_W, "t_B": t_I + t_W, "t_R": t_F}
            for halves in (0, 0.5, 1) if name == "eager-1f1b" else (0,):
                yield spec, times, halves * (t_F + t_I + t_W) / 2


@pytest.mark.parametrize("name", SCHEDULES)
def test_what_the_docstring_says_of_costs(name):
    """Every formula in it, over numbers of workers and microbatches, times and parameters."""
    formulas = FORMULA.findall(SCHEDULES[name].__doc__)
    assert any(figure == "activations" for figure, *_ in formulas)
    tried = Counter()
    for spec, times, latency in runs_of(name):
        for formula, says, found in stated(spec, formulas, times, latency):
            assert says == found, (spec, times, formula)
            tried[formula] += spec.num_workers > 1
    assert all(tried[formula] > 2 for formula in formulas), tried


@pytest.mark.parametrize("name", SCHEDULES)
def test_formulas_of_costs_are_where_they_are_tested(name):
    prose = FORMULA.sub("", SCHEDULES[name].__doc__)
    assert not re.search(r"\bM ?[-+*/(]|[-+*/] ?M\b|\d ?M\b|[Mm]akespan", prose)


@settings(max_examples=50)
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
        ran = [s.action for s in result.spans if s.worker == worker and s.action.kind.resource == "compute"]
        wanted = [action for action in local_order(spec, worker) if action.kind.resource == "compute"]
        assert sorted(map(str, ran)) == sorted(map(str, wanted))
        assert result.peak_activations[worker] <= spec.peak_activations(worker)
    end = {s.action: s.end for s in result.spans}
    for span in result.spans:
        for need in spec.needs(span.action) if span.action.kind.resource == "compute" else ():
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


def test_dualpipe_says_which_numbers_of_workers_it_takes():
    with refused("workers", ScheduleError):
        SCHEDULES["dualpipe"](num_workers=3, num_microbatches=6)


def test_chimera_says_which_pairs_it_takes():
    with refused("pairs", ScheduleError):
        SCHEDULES["chimera"](num_workers=6, num_microbatches=6, pairs=4)


def steps(name, P, M, cost=EVEN, **parameters):
    return simulate(SCHEDULES[name](num_workers=P, num_microbatches=M, **parameters), cost, order="fixed")


@pytest.mark.parametrize("P", [2, 4, 8])
def test_units_of_chimera_follow_each_other_with_a_bubble_where_backward_is_longer(P):
    for units in (2, 3):
        assert steps("chimera", P, units * P).makespan == units * (4 * P - 2) + P - 2


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
            if entry.action.kind.accumulates:
                shard = entry.action.stage, spec.route(entry.action.microbatch)
                direct = {need for need in entry.own if need.kind.accumulates}
                waits_for[entry.action] = direct.union(*(waits_for[need] for need in direct))
                assert shard not in last or last[shard] in waits_for[entry.action]
                last[shard] = entry.action
