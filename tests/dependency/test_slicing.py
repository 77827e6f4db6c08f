"""Sequences in slices: legal for every schedule that takes them, as drawn, and as cheap as promised."""

import json
import random
from itertools import pairwise

import pytest
from refusals import refused

from rpc_pipe.commands.main import main
from rpc_pipe.dependency import Action, B, F, I, Spec, W, check_all, local_order
from rpc_pipe.dependency.recomputing import recomputing
from rpc_pipe.dependency.slicing import sliced
from rpc_pipe.drawing.svg import Picture, draw_svg
from rpc_pipe.drawing.timeline import draw
from rpc_pipe.planning.comparison import ModelCosts, compare
from rpc_pipe.planning.footprint import Size
from rpc_pipe.planning.simulator import simulate, uniform
from rpc_pipe.planning.slice_costs import SliceCosts
from rpc_pipe.planning.specs import make_spec
from rpc_pipe.schedules import SCHEDULES

COST = {F: 1, B: 2, I: 1, W: 1}
SLICED = [
    "naive", "gpipe", "1f1b", "eager-1f1b", "interleaved", "bfs", "hanayo", "zb-h1", "zb-h2", "zb-v", "v-half", "v-min",
    "pipedream", "pipedream-2bw",
]  # fmt: skip


class Patient(Spec):
    """A schedule of a user's, from the README, without a claim about activations."""

    extra: int = 1

    def after(self, a):
        return [B(a.stage, a.microbatch - (self.num_stages - a.stage) - self.extra)] if a.kind is F else []

    def slot(self, a):
        return 2 * a.microbatch + (a.stage if a.kind is F else 2 * self.num_stages - 1 - a.stage)


def priced(spec, order=None):
    return simulate(spec, lambda action: COST.get(action.kind, 0) * spec.share(action), order=order)


def orders(name, num_workers, num_microbatches, slices):
    return [[*map(str, order)] for order in priced(make_spec(name, num_workers, num_microbatches, {}, slices)).orders()]


@pytest.mark.parametrize("name", SLICED)
def test_slices_run_forward_in_order_and_backward_in_reverse(name):
    """Whatever workers, microbatches and slices: the checker finds nothing, and each edge of a sequence is there."""
    rng = random.Random(name)
    for _ in range(12):
        workers, microbatches, k = rng.randint(1, 5), rng.randint(1, 7), rng.randint(2, 6)
        spec = make_spec(name, workers, microbatches, {}, str(k))
        check_all(spec)
        for worker in range(workers):
            order = {action: at for at, action in enumerate(local_order(spec, worker))}
            for action in order:
                if action.kind.per_microbatch and action.index % k:
                    before = action._replace(index=action.index - 1)
                    first, second = (before, action) if action.kind is F else (action, before)
                    assert order[first] < order[second]
                    assert first in spec.needs(second)


@pytest.mark.parametrize("name", [name for name in SLICED if SCHEDULES[name].synchronous])
def test_replicas_have_whole_microbatches_and_run_their_slices_as_alone(name):
    rng = random.Random(name)
    for _ in range(4):
        workers, replicas, k = rng.randint(1, 3), rng.randint(2, 3), rng.randint(2, 4)
        count = rng.randint(replicas, 7)
        spec = make_spec(name, workers * replicas, count, {"replicas": replicas}, str(k))
        check_all(spec)
        assert [spec.route(i) for i in range(count * k)] == [i // k % replicas for i in range(count * k)]
        assert [spec.unsliced().route(m) for m in range(count)] == [m % replicas for m in range(count)]
        order = {worker: [*local_order(spec, worker)] for worker in range(workers * replicas)}
        for replica in range(replicas):
            alone = make_spec(name, workers, len(range(replica, count, replicas)), {}, str(k))
            for worker in range(workers):
                expected = [
                    action._replace(index=(action.index // k * replicas + replica) * k + action.index % k)
                    for action in local_order(alone, worker)
                    if action.kind.per_microbatch
                ]
                assert [a for a in order[worker * replicas + replica] if a.kind.per_microbatch] == expected


def test_a_schedule_of_a_users_own_is_sliced():
    spec = make_spec(Patient, 3, 5, {"extra": 2}, "4")
    check_all(spec)
    assert max(priced(spec, "ready").peak_activations) == (3 + 2 + 3) / 4
    assert max(priced(spec).peak_activations) == (3 + 3) / 4  # in fixed order it makes no use of its window


class ByProgram(Spec):
    """GPipe, as a user may list it."""

    def program(self, worker):
        every = range(self.num_microbatches)
        return [kind(worker, m) for kind in (F, B) for m in every]


@pytest.mark.parametrize("cls", [ByProgram, Patient])
@pytest.mark.parametrize("slices", [None, "3"])
def test_a_schedule_of_a_users_own_recomputes(cls, slices):
    """Every one was refused: the name of what recomputes was taken for a misspelt one of the user."""
    spec = make_spec(cls, 2, 2, {"recompute": "1"}, slices)
    check_all(spec)
    kinds = [[a.kind.letter for a in local_order(spec, worker) if a.kind.per_microbatch] for worker in range(2)]
    assert "R" not in kinds[0] and kinds[1].count("R") == kinds[1].count("B") == spec.num_microbatches


@pytest.mark.parametrize("slices,bubble,peak", [(1, 0.273, 4), (2, 0.158, 2.5), (4, 0.086, 1.75), (8, 0.045, 1.375)])
def test_1f1b_idles_less_and_holds_less_with_every_slice(slices, bubble, peak):
    result = priced(make_spec("1f1b", 4, 8, {}, str(slices)))
    assert (round(result.bubble, 3), max(result.peak_activations)) == (bubble, peak)


@pytest.mark.parametrize("name", SLICED)
def test_slices_never_cost_time_and_never_exceed_what_is_claimed(name):
    whole, parts = priced(make_spec(name, 4, 8)), priced(make_spec(name, 4, 8, {}, "4"))
    assert parts.makespan < whole.makespan
    assert max(parts.peak_activations) <= max(whole.peak_activations)
    for worker, peak in enumerate(parts.peak_activations):
        assert peak * 4 <= parts.spec.peak_activations(worker)


def test_pictures():
    """Index 2m + j: slices 0 and 1 of microbatch 0 are 0 and 1."""
    assert orders("1f1b", 2, 2, "2") == [
        ["0F0", "0F1", "0F2", "0B1", "0F3", "0B0", "0B3", "0B2"],
        ["1F0", "1F1", "1B1", "1F2", "1B0", "1F3", "1B3", "1B2"],
    ]
    assert orders("gpipe", 2, 2, "2")[0] == ["0F0", "0F1", "0F2", "0F3", "0B3", "0B2", "0B1", "0B0"]
    assert orders("zb-h1", 2, 2, "2")[1] == [
        "1F0", "1F1", "1I1", "1F2", "1I0", "1W1", "1F3", "1I3", "1W0", "1I2", "1W3", "1W2"
    ]  # fmt: skip


def test_one_slice_changes_nothing():
    for name in SCHEDULES:
        assert make_spec(name, 2, 4, {}, "1") == make_spec(name, 2, 4)
        assert type(make_spec(name, 2, 4, {}, "1")) is SCHEDULES[name]


def test_uneven_slices_cost_and_hold_their_share():
    spec = make_spec("gpipe", 1, 1, {}, "8,6,5,5")
    result = priced(spec)
    forwards = [span.end - span.start for span in result.spans if span.action.kind is F]
    assert forwards == pytest.approx([8 / 24, 6 / 24, 5 / 24, 5 / 24])
    assert result.peak_activations == (1,)
    assert result.makespan == pytest.approx(3)


def test_slices_are_recomputed():
    cls = recomputing(sliced(SCHEDULES["1f1b"], (1, 1)), None)
    spec = cls(num_workers=3, num_microbatches=8)
    check_all(spec)
    order = [*map(str, local_order(spec, 2))]
    assert [after for before, after in pairwise(order) if before[1] == "R"] == [a for a in order if a[1] == "B"]


@pytest.mark.parametrize("name", sorted(set(SCHEDULES) - set(SLICED)))
def test_other_schedules_say_why_not(name):
    with refused("slices") as raised:
        make_spec(name, 4, 8, {}, "2")
    assert "\n" not in str(raised.value)


def test_slices_that_do_not_divide_are_refused():
    with refused("num_microbatches"):
        sliced(SCHEDULES["1f1b"], (1, 1))(num_workers=2, num_microbatches=7)


@pytest.mark.parametrize("said", ["0", "-1", "x", "4,", "4,0", "1.5", "65537", "99999999999999999999999"])
@pytest.mark.parametrize("command", ["simulate", "compare"])
def test_wrong_slices_are_told_with_the_rule(capsys, command, said):
    assert main([command, f"--slices={said}"]) == 2
    assert f"slices {said}: must be a number from 1 to 65536, or sizes" in " ".join(capsys.readouterr().err.split())


def test_the_command_says_microbatches_not_slices(capsys):
    assert main("simulate --slices 8 --schedule 1f1b --workers 4 --microbatches 8 --json".split()) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["bubble"] <= 0.05
    assert max(said["peak_activations"]) <= 1.4
    assert said["microbatches"] == 8
    assert said["slices"] == [1] * 8
    assert main("simulate --schedule 1f1b --workers 4 --microbatches 8 --json".split()) == 0
    assert "slices" not in json.loads(capsys.readouterr().out)


def test_bytes_of_slices_are_their_share():
    model = ModelCosts(4, [COST], [Size(weights=100, activations=80)])
    rows = {row.name: row for row in compare(model, 4, slices="2")}
    assert rows["1f1b"].peak_memory == 100 + 80 * 2.5
    assert rows["1f1b"].peak_activations == 2.5
    assert rows["avgpipe"].refused == (
        "slices: schedule avgpipe has several replicas of every stage; 1f1b, zb-h1 and zb-v can be sliced"
    )


def test_every_picture_names_microbatch_and_slice():
    result = simulate(make_spec("1f1b", 2, 2, {}, "2"), uniform(COST))
    drawn = draw(result.spans, 2, spec=result.spec).plain.splitlines()
    assert drawn[0].split()[:5] == ["worker", "0", "F0.0", "F0.1", "F1.0"]
    assert "<title>0B1.0, stage 0," in draw_svg(Picture("", result.spans, 2, spec=result.spec))
    assert Action.parse("0F3") in {span.action for span in result.spans}


def test_attention_makes_equal_slices_worse_than_none(capsys):
    """The later of equal slices are dearer, and a pipeline waits for the dearest; earlier ones must be longer."""

    def bubble(slices):
        asked = f"simulate --slices {slices} --attention 0.4 --schedule 1f1b --workers 4 --microbatches 8 --json"
        assert main(asked.split()) == 0
        return json.loads(capsys.readouterr().out)["bubble"]

    assert bubble("4") > bubble("1") > 2 * bubble("8,6,5,4")


def test_slices_of_a_sequence_take_its_time_together():
    spec = make_spec("zb-h1", 2, 3, {}, "3,2,1")
    share = SliceCosts(attention=0.5).time_share(spec)
    assert [share(F(0, j)) for j in range(3)] == pytest.approx(
        [0.375, 0.5 * (1 / 3 + 16 / 36), 0.5 * (1 / 6 + 11 / 36)]
    )
    for kind in (F, I, W):
        assert sum(share(kind(1, 3 + j)) for j in range(3)) == pytest.approx(1)
    assert share(W(0, 0)) == 0.5  # attention has no weights


def test_attention_without_slices_has_no_meaning(capsys):
    for command in ("simulate", "compare"):
        assert main([command, "--attention", "0.4"]) == 2
        assert "--attention 0.4: is of slices; add --slices, such as --slices 4" in capsys.readouterr().err
