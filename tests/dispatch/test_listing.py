"""The relation that the workers wrote down is the relation."""

import json

import pytest

from rpc_pipe.boards.own_boards import list_program
from rpc_pipe.dependency import B, F, G, I, R, U, W, entries
from rpc_pipe.dependency.relocating import relocated
from rpc_pipe.planning.simulator import simulate, uniform
from rpc_pipe.planning.specs import make_spec
from rpc_pipe.schedules import SCHEDULES
from rpc_pipe.tracing.trace import spec_of_listings

COST = uniform({F: 1.5, B: 3.1, I: 1.6, W: 1.3, R: 1.4, G: 0.3, U: 0.2})


def written(spec):
    programs = [list_program(spec, w, spec.order, list(entries(spec, w))) for w in spec.workers]
    return json.loads(json.dumps(programs))


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_runs_alike_from_what_its_workers_wrote(name):
    spec = make_spec(name, 4, 8, {})
    read = spec_of_listings(written(spec))
    for steps in (1, 3):
        for comm in (0, 0.7):
            ours, theirs = (simulate(s, COST, comm=comm, steps=steps) for s in (spec, read))
            assert theirs.spans == ours.spans
    assert type(read).__name__ == name


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "gpipe", "interleaved", "zb-v"])
def test_the_live_workers_of_an_elastic_job_too(name):
    """A run had no figures after a death. Several workers share the microbatches of the dead one."""
    spec = relocated(make_spec(name, 9, 9, {"replicas": 3}), frozenset({1, 5}))
    read = spec_of_listings(written(spec))
    assert read.num_workers == 7 and read.num_stages == spec.num_stages
    ours, theirs = (simulate(each, COST, order="fixed", steps=2) for each in (spec, read))
    assert theirs.step_ends == ours.step_ends


@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("microbatches", [7, 8])
def test_a_stream_of_replicas_too(microbatches, zero):
    """A run with --html ended in a deadlock of its picture: an update waited for that of the replica before."""
    spec = make_spec("pipedream-2bw", 4, microbatches, {"replicas": 2, "zero": zero})
    ours, theirs = (simulate(each, COST, steps=3) for each in (spec, spec_of_listings(written(spec))))
    assert theirs.step_ends == ours.step_ends
    assert theirs.orders() == ours.orders()


def test_slices_are_slices_of_microbatches():
    """A run with --slices 3 --html showed 9 microbatches, and activations in slices."""
    spec = make_spec("1f1b", 2, 3, {}, slices="3,2,1")
    read = spec_of_listings(written(spec))
    assert read.parallelism.slices == (3, 2, 1)
    assert simulate(read, COST).peak_activations == simulate(spec, COST).peak_activations
