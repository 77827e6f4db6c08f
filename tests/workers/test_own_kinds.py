"""A pair of kinds that the package does not have: activations wait in host memory between forward and backward.

Each is a row of the table and a function; all else, checker, simulator, timeline and trace included, follows.
"""

import sys
import threading
from functools import partial

import pytest
import torch
from processes import ROOT
from refusals import failed, refused
from torch import nn

from rpc_pipe.boards.own_boards import list_program
from rpc_pipe.dependency import (
    B,
    F,
    Kind,
    ScheduleError,
    Spec,
    check_all,
    entries,
    local_order,
    order_limit,
)
from rpc_pipe.drawing.timeline import draw
from rpc_pipe.model.user_model import load_user_model
from rpc_pipe.pipeline import Pipeline, Training
from rpc_pipe.planning.comparison import ModelCosts, compare
from rpc_pipe.planning.footprint import Size, peak_bytes
from rpc_pipe.planning.pricing import PricedSchedule
from rpc_pipe.planning.profile import Chain, LayerCost, Machines
from rpc_pipe.planning.simulator import simulate, uniform
from rpc_pipe.planning.specs import find_schedule, make_spec
from rpc_pipe.schedules import OneFOneB
from rpc_pipe.tracing.trace import spec_of_listings
from rpc_pipe.workers.handlers import carries_out
from rpc_pipe.workers.hooks import Listener

EVICT = Kind("E", "evict activations", resource="copy", holds=-1, colour="#aaaaaa")
LOAD = Kind("L", "bring activations back", resource="copy", holds=1, colour="#dddddd")
moved = []


traced = set()


class Traced(Listener):
    def step_finished(self, record):
        traced.update(run.action.kind for run in record.actions)


@carries_out(EVICT)
def evict(ctx):
    """A copy for the device's memory here: this machine has one memory."""
    parameters = {p.data_ptr() for p in ctx.task.shard.parameters()}
    ctx.task.shard.saved(ctx.microbatch).replace(lambda t: t if t.data_ptr() in parameters else t.clone())
    moved.append(str(ctx.task.entry.action))


@carries_out(LOAD)
def load(ctx):
    evict(ctx)


class Offloaded(OneFOneB):
    """1F1B that keeps at most three microbatches' activations on the device, whatever its window."""

    claim: int = 3

    def actions(self, stage, microbatch):
        forward, backward = super().actions(stage, microbatch)
        if stage >= self.last_stage - 1:  # backward follows too soon
            return forward, backward
        return forward, EVICT(stage, microbatch), LOAD(stage, microbatch), backward

    def after(self, a):
        s, m = a.stage, a.microbatch
        if a.kind is F:
            copies_keep_up = [EVICT(s, m - 2)] if s < self.last_stage - 1 else []
            return [*super().after(a), *copies_keep_up]
        return [B(s, m - 1)] if a.kind is LOAD else []  # one is brought back ahead of need

    def slot(self, a):
        base = {EVICT: F, LOAD: B}.get(a.kind, a.kind)
        return 4 * super().slot(base(a.stage, a.microbatch)) + {EVICT: 1, LOAD: -2}.get(a.kind, 0)

    def peak_activations(self, worker):
        return self.claim


def test_the_checker_sees_less_memory_on_the_device():
    check_all(Offloaded(num_workers=6, num_microbatches=12))
    with refused("worker", ScheduleError):
        check_all(Offloaded(num_workers=6, num_microbatches=12, claim=1))
    with refused("worker", ScheduleError):

        class AllKept(OneFOneB):
            def peak_activations(self, worker):
                return 3

        check_all(AllKept(num_workers=6, num_microbatches=12))


class ListedOffloading(Offloaded):
    """The same as lists, which are also what may be held."""

    slot = Spec.slot

    def after(self, a):
        return []

    def program(self, worker):
        slotted = Offloaded(num_workers=self.num_workers, num_microbatches=self.num_microbatches)
        return [action for action in local_order(slotted, worker) if action.kind.per_microbatch]

    def peak_activations(self, worker):
        return None


def test_a_list_of_them_is_the_limit_of_what_is_held():
    """Only B and W counted as ends of lives: 'activation_limit(0) is 1, but in its order worker 0 holds 2'."""
    spec = ListedOffloading(num_workers=6, num_microbatches=12)
    check_all(spec)
    limits = [order_limit(spec, worker) for worker in range(6)]
    assert limits == [1, 1, 1, 1, 2, 1]
    for costs in ({F: 1, B: 2, EVICT: 1, LOAD: 1}, {F: 1, B: 9, EVICT: 4, LOAD: 2}, {F: 5, B: 1, EVICT: 0, LOAD: 9}):
        for order in ("ready", "fixed"):
            peaks = simulate(spec, uniform(costs), comm=3, order=order).peak_activations
            assert all(peak <= limit for peak, limit in zip(peaks, limits, strict=True))


def test_a_schedule_with_actions_of_its_own_cannot_be_told_to_recompute():
    """Nothing recomputed, or a traceback."""
    with refused("recompute"):
        make_spec(Offloaded, 6, 12, {"recompute": "all"})


def test_copies_overlap_compute_in_the_simulator_and_are_drawn():
    cost = uniform({F: 1, B: 2, EVICT: 1, LOAD: 1})
    plain = simulate(OneFOneB(num_workers=6, num_microbatches=12), cost)
    spec = Offloaded(num_workers=6, num_microbatches=12)
    result = simulate(spec, cost)
    assert result.makespan <= plain.makespan + 2 and result.busy == plain.busy
    assert max(result.peak_activations) <= 3 < max(plain.peak_activations)
    slow = simulate(spec, uniform({F: 1, B: 2, EVICT: 4, LOAD: 4}))
    assert slow.makespan > result.makespan, "copies have a resource of their own, and it is one"
    assert "E0" in draw([s for s in result.spans if s.worker == 0 and s.action.kind is not F], 1, width=400).plain


def test_what_its_workers_wrote_down_is_simulated_alike():
    """Who reads it took every backward for what the package's kinds make of it, and the run ended in a traceback."""
    spec, cost = Offloaded(num_workers=6, num_microbatches=12), uniform({F: 1, B: 2, EVICT: 1, LOAD: 1})
    written = [list_program(spec, worker, "ready", list(entries(spec, worker))) for worker in range(6)]
    read = spec_of_listings(written)
    assert simulate(read, cost, steps=2).spans == simulate(spec, cost, steps=2).spans
    fewer = spec_of_listings(written, 5)
    assert simulate(fewer, cost).spans == simulate(Offloaded(num_workers=6, num_microbatches=5), cost).spans
    assert fewer.actions(0, 4) == (F(0, 4), EVICT(0, 4), LOAD(0, 4), B(0, 4))


@pytest.mark.parametrize("order", ["ready", "fixed"])
def test_it_trains_bit_for_bit_and_is_traced(order):
    x = torch.randn(12, 8, generator=torch.Generator().manual_seed(0))
    states = []
    for schedule in (OneFOneB, Offloaded):
        torch.manual_seed(0)
        pipe = Pipeline(
            [nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)) for _ in range(3)],
            nn.functional.mse_loss,
            training=Training(partial(torch.optim.AdamW, lr=1e-2)),
            schedule=schedule,
            num_workers=3,
            num_microbatches=6,
            order=order,
        )
        pipe.listen(lambda worker: Traced())
        traced.clear()
        moved.clear()
        losses = [pipe.step((x, x)) for _ in range(2)]
        states.append((losses, pipe.weights.state_dict()))
    assert states[0][0] == states[1][0]
    assert all(torch.equal(states[0][1][name], tensor) for name, tensor in states[1][1].items())
    assert len(moved) == 2 * 2 * 1 * 6, "two steps, there and back, one stage"
    assert {EVICT, LOAD} <= traced


def test_what_fails_behind_a_copy_fails_the_worker():
    """It was only logged, and the worker waited for the copy until it counted as hung."""
    pipe = Pipeline(
        [partial(nn.Linear, 8, 8)] * 4,
        nn.functional.mse_loss,
        schedule=Offloaded,
        num_workers=3,
        num_microbatches=4,
        stall_s=20,
    )
    backend = pipe.actors[0].backend
    timestamp = backend.timestamp

    def broken():
        if threading.current_thread().name.startswith("copies"):
            raise ValueError("no more events")
        return timestamp()

    backend.timestamp = broken
    with failed(ValueError):
        pipe.step((torch.ones(8, 8), torch.ones(8, 8)))
    pipe.close()


FETCH, STORE = Kind("K", "fetch weights", resource="copy"), Kind("J", "store weights", resource="copy")


@carries_out(FETCH)
@carries_out(STORE)
def keep(ctx):
    moved.append(str(ctx.task.entry.action))


class Stored(OneFOneB):
    """1F1B whose forwards wait for a copy of another microbatch, and whose steps end with a copy."""

    def actions(self, stage, microbatch):
        return FETCH(stage, microbatch), *super().actions(stage, microbatch), STORE(stage, microbatch)

    def after(self, a):
        return [*super().after(a), FETCH(a.stage, 0)] if a.kind is F else []

    def slot(self, a):
        base = {FETCH: F, STORE: B}.get(a.kind, a.kind)
        return 4 * super().slot(base(a.stage, a.microbatch)) + {FETCH: -1, STORE: 1}.get(a.kind, 0)


def test_a_step_that_ends_with_a_copy_ends_and_an_evaluation_waits_for_its_copies():
    """With nothing left to do a worker waited for an arrival; an evaluation dropped all that `after` names."""
    entry = {e.action: e for e in entries(Stored(num_workers=2, num_microbatches=4), 0, forward_only=True)}
    assert FETCH(0, 0) in entry[F(0, 3)].own and B(0, 0) not in entry
    layers = [partial(nn.Linear, 8, 8)] * 2
    with Pipeline(layers, nn.functional.mse_loss, schedule=Stored, num_workers=2, num_microbatches=4) as pipe:
        moved.clear()
        for _ in range(20):
            pipe.step((torch.ones(8, 8), torch.ones(8, 8)))
        assert len(moved) == 20 * 2 * 2 * 4
        pipe.evaluate((torch.ones(8, 8), torch.ones(8, 8)))


class Returned(Stored):
    """Here a fetch, which an evaluation runs, takes the payload of a store of the other stage, which it does not."""

    def origin(self, a):
        return STORE(1, a.microbatch - 1) if a.kind is FETCH and a.stage == 0 else super().origin(a)


def test_an_evaluation_that_would_wait_for_a_backward_is_refused():
    """It hung: BPipe kept activations of a partner before a forward."""
    with refused("actions", ScheduleError):
        list(entries(Returned(num_workers=2, num_microbatches=4), 0, forward_only=True))


def test_a_file_with_kinds_is_run_once_and_a_model_may_stand_in_it(tmp_path):
    """`verify` ran it for the schedule in each of its parts, and was told that the letter is taken."""
    file = tmp_path / "mine.py"
    file.write_text(
        "from rpc_pipe.dependency import Kind\nfrom rpc_pipe.schedules import GPipe\nfrom torch import nn, randn\n"
        "MARK = Kind('Q', 'mark', resource='copy')\nclass One(GPipe): pass\nclass Other(GPipe): pass\n"
        "def make(): return [nn.Linear(2, 2)], (randn(2, 2), randn(2, 2)), nn.functional.mse_loss"
    )
    one, other = find_schedule(f"{file}:One"), find_schedule(f"{file}:Other")
    assert find_schedule(f"{file}:One") is one and one.__module__ == other.__module__
    load_user_model(f"{file}:make")
    assert Kind("Q", "mark", resource="copy") is Kind.of("Q")
    with pytest.raises(ValueError):
        Kind("Q", "another", resource="copy")


MOBIUS = f"{ROOT / 'docs' / 'examples' / 'mobius.py'}:Mobius"


@pytest.mark.parametrize("ahead", [1, 2])
def test_weights_that_come_and_go_are_proved_counted_and_timed(ahead):
    """Kinds of a user's own had no bytes and no time: a schedule that swaps looked as large as one that does not."""
    made = find_schedule(MOBIUS)
    spec = make_spec(MOBIUS, 2, 3, {"ahead": ahead})
    check_all(spec)
    less = type("Less", (made,), {"peak_weights": lambda self, worker: self.ahead - 1})
    with refused("worker", ScheduleError):
        check_all(less(num_workers=2, num_microbatches=3, ahead=ahead))
    chain = Chain([LayerCost({F: 1, B: 2}, Size(weights=60))] * 6)
    priced = PricedSchedule(spec, chain, Machines(2, copy=30))
    simulation = priced.simulate((0, 1, 2, 3, 4, 5, 6))
    copies = {span.end - span.start for span in simulation.spans if span.action.kind.resource == "copy"}
    assert copies == {2} and peak_bytes(simulation, [Size(weights=60)] * 6) == (60 * ahead, 60 * ahead)
    free = PricedSchedule(spec, chain, Machines(2)).simulate((0, 1, 2, 3, 4, 5, 6))
    assert simulation.makespan > free.makespan
    model = ModelCosts(2, [{F: 3, B: 6}], [Size(weights=180)], copy=30)
    row = next(r for r in compare(model, 3, also=(MOBIUS, {"ahead": ahead})) if r.schedule == MOBIUS)
    assert row.makespan == simulation.makespan and row.memory_by_worker == (60 * ahead, 60 * ahead)


@pytest.mark.parametrize("clip", [None, 0.1])
def test_weights_that_come_and_go_train_the_same_bits(clip):
    """A load did not wait for the update of the step before, and an evaluation dropped nothing."""
    x, seen = torch.randn(12, 8, generator=torch.Generator().manual_seed(0)), []
    made = find_schedule(MOBIUS)
    held = sys.modules[made.__module__].Weights
    held.most = held.now = 0
    for schedule, workers in ((OneFOneB, 6), (made, 2)):
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)) for _ in range(6)]
        training = Training(partial(torch.optim.AdamW, lr=1e-2), max_grad_norm=clip)
        how = dict(training=training, schedule=schedule, num_workers=workers, num_microbatches=3)
        with Pipeline(layers, nn.functional.mse_loss, **how) as pipe:
            losses = [pipe.step((x, x)), pipe.evaluate((x, x))]
            losses += [*pipe.train([(x, x)] * 3)]
            seen.append((losses, pipe.evaluate((x, x)), pipe.weights.state_dict()))
    assert seen[0][:2] == seen[1][:2]
    assert all(torch.equal(seen[0][2][name], tensor) for name, tensor in seen[1][2].items())
    stage = sum(p.nbytes for p in layers[0].parameters())
    assert held.most <= 2 * 2 * stage, "two stages on each of two workers, of three"
