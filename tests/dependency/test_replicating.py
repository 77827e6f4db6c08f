"""Schedules on several replicas of the pipeline: who is where, and each replica runs as if alone."""

import random
from dataclasses import replace

import pytest
from random_specs import random_spec
from refusals import refused

from rpc_pipe.dependency import (
    NO_REDUCTIONS,
    A,
    B,
    ConfigError,
    F,
    G,
    N,
    Part,
    PipeError,
    ScheduleError,
    U,
    check_all,
    entries,
    reduction_tree,
)  # fmt: skip
from rpc_pipe.dependency.declared import Parallelism
from rpc_pipe.dependency.replicating import replicated
from rpc_pipe.dependency.spec import overrides
from rpc_pipe.planning.simulator import simulate, uniform
from rpc_pipe.planning.specs import make_spec
from rpc_pipe.schedules import SCHEDULES, OneFOneB

SYNCHRONOUS = [name for name, cls in SCHEDULES.items() if cls.synchronous]


@pytest.mark.parametrize(("workers", "replicas"), [(4, 2), (6, 3), (8, 4), (4, 4)])
@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_every_synchronous_schedule_passes_the_checker(name, workers, replicas):
    if name == "dualpipe" and workers // replicas % 2:
        pytest.skip("dualpipe needs an even number of stages")
    check_all(make_spec(name, workers, 7, {"replicas": replicas}))
    simulate(make_spec(name, workers, 7, {"replicas": replicas, "zero": 1}), lambda action: 1, order="fixed", steps=2)


@pytest.mark.parametrize("order", ["ready", "fixed"])
@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize(("workers", "replicas"), [(4, 2), (6, 3), (8, 2)])
def test_a_stream_of_overlapping_steps_has_no_bubble_and_holds_no_more(workers, replicas, zero, order):
    """With 7 microbatches a replica has one less than others: no window named it, and one more forward ran ahead."""
    spec = make_spec("pipedream-2bw", workers, 7, {"replicas": replicas, "zero": zero})
    check_all(spec)
    stream = simulate(spec, uniform({F: 1, B: 2}), order=order, steps=12)
    most = 7 // replicas + 1
    assert 3 * (most - 0.1) < stream.step_time <= 3 * most
    assert all(peak <= spec.peak_activations(w) for w, peak in enumerate(stream.peak_activations))


def test_the_replicas_of_a_stage_are_neighbours_and_a_pipeline_strides_over_them():
    spec = make_spec("1f1b", 16, 8, {"replicas": 4})
    assert [spec.place(stage, 0) for stage in range(4)] == [0, 4, 8, 12]
    assert [spec.place(stage, 1) for stage in range(4)] == [1, 5, 9, 13]
    assert [spec.route(m) for m in range(6)] == [0, 1, 2, 3, 0, 1]


def test_with_stages_spread_a_pipeline_has_neighbours_and_the_replicas_of_a_stage_are_far_apart():
    spec = make_spec("1f1b", 16, 8, {"replicas": 4, "spread": "stages"})
    assert [spec.place(stage, 0) for stage in range(4)] == [0, 1, 2, 3]
    assert [spec.place(2, route) for route in range(4)] == [2, 6, 10, 14]
    check_all(spec)
    check_all(make_spec("zb-v", 6, 7, {"replicas": 3, "spread": "stages"}))
    assert spec != make_spec("1f1b", 16, 8, {"replicas": 4})


def test_routes_of_a_schedule_stay_within_their_replica():
    spec = make_spec("chimera", 4, 8, {"replicas": 2})
    assert spec.num_routes == 4
    assert {route: [spec.place(stage, route) for stage in range(2)] for route in range(4)} == {
        0: [0, 2], 1: [2, 0], 2: [1, 3], 3: [3, 1],
    }  # fmt: skip


def test_options_of_the_schedule_and_recomputation_go_with_replicas():
    spec = make_spec("interleaved", 4, 8, {"replicas": "2", "chunks": "3", "recompute": "0+1"})
    assert (spec.num_stages, spec.recomputes(1), spec.recomputes(2)) == (6, True, False)
    assert spec == make_spec("interleaved", 4, 8, {"replicas": 2, "chunks": 3, "recompute": [0, 1]})
    assert spec != make_spec("interleaved", 4, 8, {"chunks": 3, "recompute": [0, 1]})


def test_one_replica_is_the_schedule_itself():
    assert type(make_spec("zb-h1", 4, 8, {"replicas": 1})) is SCHEDULES["zb-h1"]


def test_a_last_batch_with_a_microbatch_for_one_replica_only_still_runs():
    check_all(replace(make_spec("dualpipev", 4, 8, {"replicas": 2}), num_microbatches=1))


def timeline(spec, cost):
    return {
        span.action: (span.start, span.end) for span in simulate(spec, cost).spans if span.action.kind.per_microbatch
    }


def test_each_replica_runs_as_the_schedule_does_alone():
    accepted = 0
    for seed in range(80):
        base, rng = random_spec(seed), random.Random(seed)
        replicas = rng.randint(2, 3)
        total = max(replicas, base.num_microbatches)
        base = replace(base, claims=(3 * total,) * base.num_workers)  # of each stage everything
        own = [len(range(replica, total, replicas)) for replica in range(replicas)]
        alone = [replace(base, num_microbatches=count) for count in own]
        try:
            for each in alone:
                check_all(each)
        except ScheduleError:
            continue
        accepted += 1
        spec = replicated(type(base), Parallelism(replicas=replicas))(
            num_workers=base.num_workers * replicas, num_microbatches=total, **base.parameters()
        )
        costs = [rng.choice([1, 2, 3, 20]) for _ in range(97)]

        def cost(action, costs=costs):  # what ends the step costs nothing: one replica alone exchanges nothing
            if not action.kind.per_microbatch:
                return 0
            return costs[(31 * action.stage + 7 * action.index + ord(action.kind.letter)) % 97]

        together = timeline(spec, cost)
        for replica, each in enumerate(alone):
            expected = timeline(each, lambda a, r=replica, n=replicas, c=cost: c(a._replace(index=a.index * n + r)))
            found = {
                a._replace(index=a.index // replicas): when
                for a, when in together.items()
                if a.index % replicas == replica
            }
            assert found == expected, (seed, replica)
    assert accepted > 35


# --- bad input


@pytest.mark.parametrize(
    ("name", "workers", "microbatches", "replicas", "said"),
    [
        ("1f1b", 5, 8, 2, "replicas 2: must divide 5 workers; take 4 or 6, or replicas=1"),
        ("1f1b", 8, 8, 3, "replicas 3: must divide 8 workers; take 6 or 9, or replicas=2"),
        ("1f1b", 8, 3, 4, "replicas 4: needs as many microbatches (got 3)"),
        ("1f1b", 4, 8, 0, "replicas 0: must be a whole number of at least 1"),
        ("1f1b", 4, 8, 1.5, "replicas 1.5: must be a whole number of at least 1"),
    ],
)
def test_what_cannot_be_is_refused_with_what_can(name, workers, microbatches, replicas, said):
    with pytest.raises(ConfigError) as refused:
        make_spec(name, workers, microbatches, {"replicas": replicas})
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"replicas": 2, "zero": 2}, "zero 2: must be 0, or 1 to divide optimizer states among replicas; take 1"),
        ({"zero": 1}, "zero 1: is of replicas, and there is one; take replicas 2, or leave it out"),
        ({"replicas": 2, "bucket": 0}, "bucket 0: must be a size in MiB above 0; take 25"),
        ({"bucket": "x"}, "bucket x: must be a size in MiB above 0; take 25"),
        ({"replicas": 2, "spread": "hosts"}, "spread hosts: must be pipelines, each over all hosts, or stages"),
        ({"spread": "stages"}, "spread stages: is of replicas, and there is one; take replicas 2, or leave it out"),
        ({"bucket": 5}, "bucket 5: is of replicas, and there is one; take replicas 2, or leave it out"),
    ],
)
def test_an_exchange_that_cannot_be_is_refused(options, said):
    with pytest.raises(ConfigError) as refused:
        make_spec("1f1b", 4, 8, options)
    assert said in str(refused.value)


def test_a_mistake_in_a_schedule_of_ones_own_names_the_method():
    class Wrong(OneFOneB):
        def after(self, a):
            return [B(a.stage + 5, a.microbatch)] if a.kind is F else []

    with refused("after", PipeError):
        check_all(replicated(Wrong, Parallelism(replicas=2))(num_workers=4, num_microbatches=4))


def test_what_a_schedule_does_not_say_stays_unsaid():
    assert not overrides(replicated(OneFOneB, Parallelism(replicas=2)), "splits")


def test_gradients_leave_before_their_norm_is_taken_and_weights_come_before_a_forward():
    """With zero=1 a norm could count gradients of an owner elsewhere, which were then divided before they left.

    And the forward behind a step that only adds up gradients did not wait for the weights of the update before it.
    """
    spec = make_spec("1f1b", 4, 8, {"replicas": 2, "zero": 1})
    tree = reduction_tree(spec, NO_REDUCTIONS._replace(weight=True, norms=True, buckets=(1, 1)))
    gives = set(tree.given(G, 1, 1))
    assert gives <= set(tree.needs(N(1, 1))[1]) and gives <= set(tree.needs(U(1, 1))[1])
    adding = NO_REDUCTIONS._replace(weight=True, updates=False)
    part = Part(spec, 2, entries(spec, 2, reductions=adding))
    assert A(1, 0) in part.inherited[0] and part.inherited[0][A(1, 0)] == part.inherited[0][U(1, 0)]
