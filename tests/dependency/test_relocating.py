"""A schedule without the workers that have died: the same relation, in another place, and it does not deadlock."""

from collections import Counter

import pytest
from refusals import refused

from rpc_pipe.dependency import (
    B,
    F,
    H,
    I,
    N,
    Reductions,
    StageLost,
    U,
    W,
    check,
    entries,
    local_order,
    reduction_tree,
)
from rpc_pipe.dependency.relocating import relocated
from rpc_pipe.planning.relation import Relation
from rpc_pipe.planning.simulator import simulate, uniform
from rpc_pipe.planning.specs import make_spec

BY_SLOT = "1f1b", "zb-h1", "interleaved", "chimera", "gpipe", "eager-1f1b"
BY_PROGRAM = "zb-v", "hanayo", "dualpipev"


@pytest.mark.parametrize("gone", [{0}, {0, 3}, {1, 6}])
@pytest.mark.parametrize("name", [*BY_SLOT, *BY_PROGRAM])
def test_live_replicas_of_a_stage_do_the_work_of_the_dead(name, gone):
    whole = make_spec(name, 8, 8, {"replicas": 2})
    spec = relocated(whole, frozenset(gone))
    assert spec.workers == [worker for worker in range(8) if worker not in gone]
    for worker in spec.workers:
        check(spec, worker)
        assert {place for place in whole.hosted(worker)} <= set(spec.hosted(worker))
    assert sum(len(spec.hosted(worker)) for worker in spec.workers) == spec.num_stages * spec.num_routes
    reductions = Reductions(weight=True, norms=True, commits=True)
    assert simulate(Relation(spec, 2, reductions), uniform({F: 1})).makespan > 0  # it comes to its end


def test_nothing_but_the_place_changes():
    whole = make_spec("1f1b", 6, 6, {"replicas": 3})
    spec = relocated(whole, frozenset({1}))
    for m in range(6):
        for stage in range(2):
            action = F(stage, m)
            assert spec.slot(action) == whole.slot(action) and list(spec.after(action)) == list(whole.after(action))
            assert spec.needs(action) == whole.needs(action)


@pytest.mark.parametrize(("workers", "replicas", "gone"), [(6, 3, {0}), (9, 3, {4}), (8, 4, {5, 6})])
@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zb-v", "interleaved"])
def test_all_live_replicas_share_the_microbatches_of_the_dead(name, workers, replicas, gone):
    """One replica did all the work of a dead one, so that three replicas went at half their rate."""
    whole = make_spec(name, workers, 8 * replicas, {"replicas": replicas})
    spec = relocated(whole, frozenset(gone))
    reductions = Reductions(weight=True, norms=True, commits=True)
    for worker in spec.workers:
        check(spec, worker)
        own = {entry.action: entry.pulled for entry in entries(spec, worker, reductions=reductions)}
        for last, hand, first in spec.handovers:
            if first in own:
                assert (hand, spec.worker(last), True) in own[first]  # an order of actions, and a payload
    for stage in range(spec.num_stages):
        done = Counter(spec.worker(F(stage, m)) for m in range(spec.num_microbatches))
        assert sum(done.values()) == spec.num_microbatches and max(done.values()) - min(done.values()) <= 1
    for worker in gone:
        order = [a for a in local_order(whole, worker) if a.kind.accumulates]
        for stage, route in whole.hosted(worker):
            sums = [a for a in order if (a.stage, whole.route(a.index)) == (stage, route)]
            turns = list(dict.fromkeys(map(spec.worker, sums)))
            assert sums == sorted(sums, key=lambda a: turns.index(spec.worker(a)))  # each part is a piece of the order
            assert spec.place(stage, route) == turns[-1]
    cost = uniform({F: 1, B: 2, I: 1, W: 1})
    rate = (
        simulate(Relation(whole, 4, reductions), cost).step_time
        / simulate(Relation(spec, 4, reductions), cost, order="ready").step_time
    )
    live = {whole.place(stage, route) for stage in range(whole.num_stages) for route in range(replicas)} - gone
    hosts = Counter(stage for worker in live for stage in {stage for stage, _ in whole.hosted(worker)})
    assert rate > 0.9 * min(hosts.values()) / replicas


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zb-v"])
def test_slices_of_a_microbatch_stay_together(name):
    """One live replica did all the work of a dead one of slices, so that three replicas went at half their rate."""
    spec = relocated(make_spec(name, 6, 24, {"replicas": 3, "slices": 2}), frozenset({0}))
    for worker in spec.workers:
        check(spec, worker)
    whole = spec.unsliced()
    for stage in range(spec.num_stages):
        done = Counter(spec.worker(F(stage, m)) for m in range(spec.num_microbatches))
        assert sum(done.values()) == spec.num_microbatches and max(done.values()) - min(done.values()) <= 2
        for m in range(whole.num_microbatches):  # an evaluation is not sliced, and reads the same rows
            assert {spec.worker(F(stage, 2 * m + j)) for j in range(2)} == {whole.worker(F(stage, m))}


def test_no_part_begins_behind_another_ones_end_on_one_worker():
    """Two dead replicas are cut as one list: no more parts are handed on than there are live workers, less one."""
    spec = relocated(make_spec("1f1b", 10, 30, {"replicas": 5}), frozenset({0, 1}))
    assert [hand for _, hand, _ in spec.handovers] == [H(0, 0), H(0, 1)]


def test_a_schedule_with_two_directions_goes_on_in_the_same_direction():
    """Another direction of the same replica has the same slots on a worker of an odd number of stages."""
    spec = relocated(make_spec("chimera", 8, 8, {"replicas": 2}), frozenset({0}))
    assert [spec.place(0, route) for route in range(4)] == [1, 6, 1, 7]


def test_a_stage_without_a_live_replica_is_named():
    with refused("stage", StageLost):
        relocated(make_spec("1f1b", 4, 4, {"replicas": 2}), frozenset({2, 3}))


def test_an_update_waits_until_every_worker_holds_what_its_updates_need():
    spec = relocated(make_spec("1f1b", 4, 4, {"replicas": 2}), frozenset({1}))
    reductions = Reductions(weight=True, norms=True, commits=True)
    tree = reduction_tree(spec, reductions)
    for worker in spec.workers:
        found = {entry.action: entry for entry in entries(spec, worker, reductions=reductions)}
        collected = found[N(*tree.own[worker])]
        needs = {*collected.own, *(pulled.action for pulled in collected.pulled)}
        for stage, route in spec.hosted(worker):
            assert set(tree.sums(stage, route)) <= needs
            told = {*found[U(stage, route)].own, *(pulled.action for pulled in found[U(stage, route)].pulled)}
            assert any(action.kind.letter == "T" for action in told)
