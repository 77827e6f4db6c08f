"""What asynchronous schedules declare: versions, copies of weights, no bubble; and what a stream must not declare."""

import json
from dataclasses import replace

import pytest
from refusals import refused
from replayed import ASYNCHRONOUS, X, most_copies, pipeline

from rpc_pipe.commands.main import main
from rpc_pipe.dependency import (
    B,
    F,
    Part,
    ScheduleError,
    Spec,
    U,
    check_all,
    entries,
    updates_a_step,
)
from rpc_pipe.dependency.earlier_steps import most_open
from rpc_pipe.planning.comparison import ModelCosts, compare
from rpc_pipe.planning.comparison import verdict as told
from rpc_pipe.planning.footprint import Size
from rpc_pipe.planning.relation import Relation
from rpc_pipe.planning.simulator import simulate, uniform
from rpc_pipe.planning.specs import make_spec
from rpc_pipe.schedules import SCHEDULES, AvgPipe, OneFOneB, PipeDream, PipeDream2BW


@pytest.mark.parametrize("P, M", [(2, 4), (4, 4), (4, 1), (3, 2)])
def test_copies_and_staleness_are_those_of_the_papers(P, M, capsys):
    """As declared, as printed, and as they are held."""
    expected = {
        "pipedream": ([P - s - 1 for s in range(P)], [P - s for s in range(P)]),
        "pipedream-2bw": ([1] * P, [2] * P),
        "avgpipe": ([0] * P, [3] * P),
        "1f1b": ([0] * P, [1] * P),
    }
    for schedule, (stale, copies) in expected.items():
        code = main(["simulate", "--schedule", schedule, "--workers", str(P), "--microbatches", str(M), "--json"])
        report = json.loads(capsys.readouterr().out)
        assert code == 0 and (report["staleness"], report["weight_copies"]) == (stale, copies)
        if schedule.startswith("pipedream"):
            pipe = pipeline(schedule, P=P, M=M)
            most = most_copies(pipe)
            list(pipe.train((x, x) for x in X))
            assert most == copies
            shards = [shard for actor in pipe.actors for shard in actor.shards.values()]
            assert all(not shard.versions._versions for shard in shards), "all but the newest is freed"


def test_asynchronous_rows_stand_behind_and_are_not_recommended():
    rows = compare(ModelCosts(4, [{F: 1, B: 2}], [Size(weights=10, activations=1)]), 8)
    usable = [row for row in rows if not row.refused]
    assert [row.schedule for row in usable[-3:]] == sorted(
        ASYNCHRONOUS, key=lambda name: [row.schedule for row in usable].index(name)
    )
    assert {row.schedule for row in usable if not row.synchronous} == set(ASYNCHRONOUS)
    best, *_, last = told(rows, None).splitlines()
    assert not any(name in best for name in ASYNCHRONOUS)
    assert (
        "asynchronous, so they train something else" in last and "pipedream (24 a step, gradients up to 3 late)" in last
    )
    row = next(row for row in usable if row.schedule == "pipedream")
    assert (list(row.staleness), list(row.weight_copies), row.weight_bytes) == (
        [3, 2, 1, 0],
        [4, 3, 2, 1],
        [40, 30, 20, 10],
    )


@pytest.mark.parametrize("schedule", ASYNCHRONOUS)
def test_a_stream_has_no_bubble_once_it_is_full(schedule):
    spec = SCHEDULES[schedule](num_workers=8, num_microbatches=16)
    for order in ("ready", "fixed"):
        stream = simulate(spec, uniform({F: 1, B: 2}), order=order, steps=12)
        assert stream.step_time == 16 * 3
        assert stream.peak_activations == tuple(range(8, 0, -1))


@pytest.mark.parametrize("schedule", ASYNCHRONOUS)
def test_a_workers_steps_are_the_stream_that_is_checked_and_simulated(schedule):
    """The part of one step, with what it needs of steps before, is any step of the stream compiled as a whole."""
    sizes = [(1, 3, {}), (3, 1, {}), (4, 2, {}), (4, 6, {}), (2, 5, {})]
    of_replicas = [(4, 5, {"replicas": 2}), (6, 4, {"replicas": 3, "zero": 1})]
    of_replicas = of_replicas[: 1 if schedule == "avgpipe" else 2]
    for P, M, options in sizes + of_replicas:
        spec = make_spec(schedule, P, M, options)
        check_all(spec)
        steps = most_open(spec) + 3
        for worker in range(P):
            part = Part(spec, worker, entries(spec, worker))
            whole = {e.action: e for e in entries(replace(spec, num_steps=steps), worker)}
            for step in range(steps):
                for number, entry in enumerate(part.entries):
                    if not spec.orders(entry.action):
                        continue
                    moved = [moved_by(spec, need, step) for need in entry.own if spec.orders(need)]
                    for back, inherited in enumerate(part.inherited, 1):
                        needs = [need for need, numbers in inherited.items() if number in numbers and spec.orders(need)]
                        moved += [moved_by(spec, need, step - back) for need in needs] if back <= step else []
                    needed = {need for need in whole[moved_by(spec, entry.action, step)].own if spec.orders(need)}
                    needed = {need for need in needed if not (need.kind is B and entry.action.kind is B)}
                    assert needed == {need for need in moved if not (need.kind is B and entry.action.kind is B)}


def moved_by(spec, action, steps):
    per_step = spec.num_microbatches if action.kind.per_microbatch else updates_a_step(spec)
    return action._replace(index=action.index + steps * per_step)


def broken(cls, **methods):
    return type("Mine", (cls,), methods)(num_workers=3, num_microbatches=4)


def standing(self, a):
    return PipeDream2BW.slot(self, a._replace(index=a.index % (4 if a.kind.per_microbatch else 1)))


def uneven(self, a):
    return PipeDream2BW.slot(self, a) + 100 * a.stage * (a.index // (4 if a.kind.per_microbatch else 1))


def far(self, a):
    return [*PipeDream2BW.after(self, a), *([F(1, a.index - 4)] if a.kind is F and a.stage == 0 else [])]


@pytest.mark.parametrize(
    "cls, methods, says",
    [
        (PipeDream, {"version": lambda self, s, m: m + 1}, "version(0, 0) is made by its update"),
        (PipeDream2BW, {"version": lambda self, s, m: m // 4}, "the slot must grow along every edge"),
        (PipeDream, {"version": lambda self, s, m: 3 if m > 7 else 0}, "a version must repeat from step to step"),
        (PipeDream2BW, {"slot": lambda self, a: a.index * 8 + a.stage}, "share slot"),
        (PipeDream2BW, {"activation_limit": lambda self, w: 4}, "windows, edges of after(F), bound what is held"),
        (PipeDream, {"num_routes": 2}, "with an update a microbatch there is one route"),
        (AvgPipe, {"place": lambda self, s, r: (s + r) % 3}, "must hold a stage on one worker"),
        (
            AvgPipe,
            {"place": lambda self, s, r: (s + r) % 3, "averaging_pull": 0.0},
            "place(0, ...): all routes of an asynchronous schedule must hold a stage on one worker",
        ),
        (AvgPipe, {"route": lambda self, m: m // 3 % 2}, "routes must repeat"),
        (OneFOneB, {"synchronous": False, "slot": OneFOneB.slot}, "share slot"),
        (
            Spec,
            {"synchronous": False},
            "an asynchronous schedule needs `slot`, by which steps are ordered",
        ),
        (PipeDream2BW, {"update_every": "day"}, "update_every is 'day': it must be step or microbatch"),
        (PipeDream2BW, {"slot": standing}, "slot: grows by 0 from step to step; it must grow by at least 1"),
        (PipeDream2BW, {"slot": uneven}, "slots must grow by the same from step to step"),
        (
            PipeDream2BW,
            {"after": far},
            "worker 1: across the steps of a stream only actions of the same worker may be named",
        ),
    ],
)
def test_what_a_stream_must_not_declare(cls, methods, says):
    with pytest.raises(ScheduleError) as error:
        check_all(broken(cls, **methods))
    assert says in str(error.value), error.value


def test_avgpipe_says_what_pull_it_takes():
    with refused("pipelines"):
        AvgPipe(num_workers=2, num_microbatches=4, pull=2.5)


def test_relation_of_several_steps_is_one_stream():
    relation = Relation(PipeDream2BW(num_workers=2, num_microbatches=3), steps=4)
    assert relation.steps == 1 and sum(action.kind is U for action in relation.actions) == 8
