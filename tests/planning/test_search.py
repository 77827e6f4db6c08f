"""What `plan` finds, beside all cuts of all schedules."""

import random
import time
from dataclasses import replace
from itertools import combinations, pairwise

import pytest
from test_readme import python_block

from bench.plan_exact import brute_force, instance
from rpc_pipe.dependency import B, ConfigError, F, I, R, U, W, check_all
from rpc_pipe.planning.advice import num_copies, remarks
from rpc_pipe.planning.comparison import ModelCosts
from rpc_pipe.planning.cut_search import CutSearch, costliest, least_bottleneck
from rpc_pipe.planning.footprint import Size, peak_bytes
from rpc_pipe.planning.pricing import PricedSchedule
from rpc_pipe.planning.profile import Chain, LayerCost, LengthTerms, Machines, Profile, Tie, as_json, from_json
from rpc_pipe.planning.search import PlanRequest, search
from rpc_pipe.planning.simulator import Link
from rpc_pipe.planning.slice_costs import SliceCosts
from rpc_pipe.planning.specs import make_spec


def edited(request):
    """Return a request whose first block's forward, and last block's backward for its inputs, take no time."""
    measured = {}
    for rows, costs in request.profile.measured.items():
        costs = [*costs]
        costs[0] = replace(costs[0], times={**costs[0].times, F: 0})
        costs[-1] = replace(costs[-1], times={**costs[-1].times, I: 0, B: costs[-1].times[W]})
        measured[rows] = costs
    return replace(request, profile=replace(request.profile, measured=measured))


def block(time, name="", **bytes):
    times = {F: time, B: 2 * time, I: time, W: time, R: time, U: 0}
    return LayerCost(times, Size(**bytes), name)


def is_near_the_best(request):
    """Return whether the plan is at most 3 % slower than the best that fits, or none fits."""
    plans, best = search(request).plans, brute_force(request)
    if best is None or not plans:
        return best is None and not plans
    return best * (1 - 1e-9) <= plans[0].predicted_ms <= 1.03 * best


@pytest.mark.parametrize("seed", (1003, 1006))
def test_the_plan_is_near_the_best_of_all_cuts_of_all_schedules(seed):
    request = instance(seed) if seed % 2 else edited(instance(seed))
    assert is_near_the_best(request)


@pytest.mark.parametrize("seed", range(2000, 2002))
def test_the_plan_is_near_the_best_of_all_numbers_of_replicas(seed):
    request = replace(instance(seed), replicas=(1, 2, 3, 4), schedules=("1f1b", "zb-h1", "interleaved"))
    assert is_near_the_best(request)


@pytest.mark.parametrize("seed", (3004, 3008))
def test_the_plan_is_near_the_best_of_all_numbers_of_slices(seed, monkeypatch):
    request = replace(instance(seed), slices=(1, 2, 3), schedules=("1f1b", "zb-h1", "interleaved"))
    costs = SliceCosts(*[(0.0, 0.0), (0.0, 0.4), (0.1, 0.2)][seed % 3])
    monkeypatch.setattr(PlanRequest, "slicing", costs)
    assert is_near_the_best(request)


def with_lengths(request, seed, count):
    """Return a request whose microbatches have rows of several lengths; each block's times follow them differently."""
    draw = random.Random(seed)
    lengths = [draw.randint(1, 9) for _ in range(count - 1)]
    lengths.append(10 * count - sum(lengths))  # 10 is the mean, at which sizes are measured

    def terms():
        return {kind: draw.choice((0, 1, 5)) for kind in (F, B, I, W, R)}

    profile = request.profile
    by_length = tuple(LengthTerms(terms(), terms(), terms()) for _ in range(profile.num_blocks))
    profile = replace(profile, by_length=by_length, length=10)
    order = draw.choice(("given", "balanced"))
    return replace(request, profile=profile, lengths=tuple(lengths), order=order, microbatches=(count,))


@pytest.mark.parametrize("seed", range(4000, 4002))
def test_the_plan_is_near_the_best_for_rows_of_several_lengths(seed):
    request = with_lengths(instance(seed), seed, 5)
    request = replace(request, schedules=("1f1b", "zb-h1", "interleaved", "chimera", "dualpipev"))
    assert is_near_the_best(request)


def test_long_rows_move_the_cut_away_from_blocks_with_attention():
    """Equal rows were assumed: blocks whose time grows with the square of the length got as many as the others."""
    blocks = [block(10.0, weights=1.0, activations=8.0)] * 6
    attends, plain = (
        LengthTerms({}, {}, dict.fromkeys((F, B, I, W, R), 1)),
        LengthTerms(dict.fromkeys((F, B, I, W, R), 1)),
    )
    profile = Profile({1: blocks}, by_length=(*[attends] * 3, *[plain] * 3), length=100)
    request = PlanRequest(profile, Machines(2), 4, (4,), recompute=False, schedules=("1f1b",))
    assert search(request).plans[0].cut == (3, 3)
    long = search(replace(request, lengths=(50, 100, 300, 150))).plans[0]
    assert long.cut == (2, 4)
    # Activations follow lengths: both workers' at most those of the longest microbatches together.
    assert long.memory_by_worker == (2 * 8 * (3 + 1.5) + 2, 4 * 8 * 3 + 4)


def test_optimizer_states_that_replicas_divide_are_held_in_part():
    """They were counted whole: cuts that fit were dropped."""
    chain = Chain([block(1, weights=10, gradients=10, optimizer=20) for _ in range(4)])
    spec, machines = make_spec("1f1b", 4, 8, {"replicas": 2, "zero": 1}), Machines(4, memory=(61.0,) * 4)
    assert CutSearch(spec, chain, machines).price((0, 2, 4)).excess == 0


def test_the_least_bottleneck_is_that_of_all_cuts():
    draw = random.Random(0)
    for _ in range(50):
        times = [draw.randint(1, 30) for _ in range(draw.randint(4, 9))]

        def cost(stage, a, b, times=times):
            return sum(times[a:b])

        found = least_bottleneck(len(times), 4, cost)
        assert 0 not in [b - a for a, b in pairwise(found)]
        inner = combinations(range(1, len(times)), 3)
        assert costliest(found, cost) == min(costliest((0, *each, len(times)), cost) for each in inner)


def test_a_thousand_blocks_on_64_stages():
    draw = random.Random(1)
    blocks = [block(draw.uniform(1, 3), weights=10, activations=5) for _ in range(1000)]
    machines = Machines(64, link=Link(0.1))
    spec = make_spec("1f1b", 64, 128)
    cuts = CutSearch(spec, Chain(blocks), machines)
    found = cuts.climb(time.monotonic() + 0.2)
    stage = 3 * sum(block.times[F] for block in blocks) / 64
    assert cuts.least <= found.time <= 1.05 * (128 + 63) * stage, "of 1F1B with even stages"
    assert len(found.ends) == 65 and all(a < b for a, b in pairwise(found.ends))


def test_the_first_cut_leaves_room_for_what_comes_and_goes():
    """It counted shards and activations only, so on 64 workers it missed by a payload, with no time left to mend it."""
    blocks = [block(1, weights=10, activations=5, inputs=10, outputs=10) for _ in range(12)]
    # 6 blocks on worker 0 have 6 x (10 + 2 x 5) bytes, and 10 more while a payload goes.
    cuts = CutSearch(make_spec("1f1b", 2, 8), Chain(blocks), Machines(2, memory=(125.0, 125.0)))
    assert cuts.price(cuts.balanced()).excess == 5
    assert cuts.climb(time.monotonic()).excess == 0


def test_what_is_tied_stays_together_or_is_held_twice():
    blocks = [block(1, weights=100), block(1), block(1), block(1, weights=100)]
    together = Chain(blocks, ties=[Tie(0, 2, together=True)])
    assert together.num_blocks == 2 and together.counts((0, 1, 2)) == (3, 1)
    apart = Chain(blocks, ties=[Tie(0, 3, weights=100)])
    assert apart.size(0, 4).weights == 100 and apart.size(0, 2).weights + apart.size(2, 4).weights == 200


def test_something_is_found_however_short_the_time():
    request = PlanRequest(Profile({1: [block(1) for _ in range(8)]}), Machines(2), 4, (4,), seconds=1e-9)
    assert search(request).plans


def test_all_schedules_are_looked_at_before_one_is_looked_into(monkeypatch):
    """Of a GPT of 48 blocks on 8 workers those with the lowest bounds took all the time, and ZB-V had no price."""
    draw, order = random.Random(0), []
    blocks = [block(draw.randint(1, 30)) for _ in range(14)]

    def noting(name):
        real = getattr(CutSearch, name)

        def note(self, *args):
            order.append((name, type(self.spec).__name__))
            return real(self, *args)

        monkeypatch.setattr(CutSearch, name, note)

    noting("first_cut"), noting("climb")
    names = "interleaved", "zb-v", "hanayo"
    search(PlanRequest(Profile({1: blocks}), Machines(4), 8, (4, 8), schedules=names, seconds=1e6))
    before = order[: [name for name, _ in order].index("climb")]
    assert [schedule for _, schedule in before[:3]] == ["ZBV", "Interleaved", "Hanayo"], "the most promising first"


def test_what_is_expected_of_a_schedule_ranks_it_before_any_is_simulated():
    """Of 1,641 variants on 256 workers only `naive` was priced in time: its work is that of all others."""
    chain, machines = Chain([block(1) for _ in range(16)]), Machines(8)
    searches = [CutSearch(make_spec(name, 8, 16), chain, machines) for name in ("zb-v", "1f1b", "naive")]
    expected, found = [each.expected for each in searches], [each.first_cut().time for each in searches]
    assert expected == sorted(expected) and expected[1] < expected[2]
    assert expected[1:] == found[1:], "of evenly cut 1F1B and of naive it is exact"


def test_nothing_fits_and_it_says_by_how_much():
    blocks = [block(1, weights=100, activations=10) for _ in range(4)]
    machines = Machines(2, memory=(150, 150))
    result = search(PlanRequest(Profile({1: blocks}), machines, 4, (4,)))
    assert result.plans == [] and result.nearest is not None
    assert result.excess == max(result.nearest.memory_by_worker) - 150 > 0


def test_nothing_fits_by_the_least_of_all_however_little_time_there_is():
    """Without time the fastest schedule alone was looked at, and called the least: chimera, which has weights twice."""
    blocks = [block(1, weights=100, activations=10) for _ in range(4)]
    asked = PlanRequest(
        Profile({1: blocks}), Machines(2, memory=(150, 150)), 4, (4,), schedules=("chimera", "1f1b", "gpipe")
    )
    hurried, patient = search(replace(asked, seconds=1e-6)), search(asked)
    assert hurried.nearest is not None and hurried.nearest.schedule == "1f1b"
    assert hurried.excess == patient.excess


def test_what_does_not_fit_is_not_said_to_be_slow():
    """It was listed as not priced."""
    profile = Profile({1: [block(1.0, weights=size) for size in (3, 3, 1, 1)]})
    request = PlanRequest(profile, Machines(2, memory=(4.5, 4.5)), 8, (4,), recompute=False)
    result = search(request)
    assert result.plans[0].schedule == "zb-v" and {"zb-h1", "zb-h2"} <= set(result.unfit)
    assert not set(result.unfit) & {*result.left_out, *(plan.schedule for plan in result.plans)}


def test_recomputation_is_chosen_where_memory_asks_for_it():
    blocks = [block(1, activations=100, inputs=1, outputs=1) for _ in range(4)]
    request = PlanRequest(Profile({1: blocks}), Machines(2, memory=(320, 320)), 8, (8,), schedules=("gpipe", "1f1b"))
    result = search(request)
    assert result.plans[0].recompute and max(result.plans[0].memory_by_worker) <= 320
    times = [plan.predicted_ms for plan in result.front]
    memory = [plan.predicted_memory for plan in result.front]
    assert times == sorted(times) and memory == sorted(memory, reverse=True)


def test_a_profile_is_read_as_it_was_written_and_lies_on_lines_between_what_was_measured():
    profile = Profile(
        {
            2: [block(2, "a", activations=20, weights=7), block(1, "b")],
            4: [block(3, "a", activations=40, weights=7), block(1, "b")],
        },
        {F: 0.5},
        (Tie(0, 1, 3),),
        "model",
        "signature",
        per_mib=0.25,
    )
    assert from_json(as_json(profile), "here") == profile
    old = {name: value for name, value in as_json(profile).items() if name != "per_mib_ms"}
    assert from_json(old, "here") == replace(profile, per_mib=0)
    assert profile.at(3)[0].times[F] == 2.5 and profile.at(3)[0].size == Size(weights=7, activations=30)
    assert profile.at(8)[0].times[F] == 5


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "v-half", "interleaved", "chimera"])
@pytest.mark.parametrize("recompute", ["all", "0"])
def test_every_schedule_can_recompute(name, recompute):
    spec = make_spec(name, 4, 8, {"recompute": recompute})
    check_all(spec)
    priced = PricedSchedule(spec, Chain([block(1) for _ in range(spec.num_stages)]), Machines(4))
    plain = PricedSchedule(make_spec(name, 4, 8), priced.chain, Machines(4))
    ends = tuple(range(spec.num_stages + 1))
    more = 8 * (spec.num_stages if recompute == "all" else 1)
    assert sum(priced.simulate(ends).busy) == sum(plain.simulate(ends).busy) + more


def test_what_runs_needs_memory_too():
    blocks = [block(1, weights=10, working=5), block(1, weights=10, working=50), block(1, weights=10, working=7)]
    chain = Chain(blocks)
    assert [chain.size(0, 1).working, chain.size(0, 3).working, chain.size(2, 3).working] == [5, 50, 7]
    assert (blocks[0].size + blocks[1].size).working == 50
    cuts = CutSearch(make_spec("1f1b", 2, 2), chain, Machines(2, memory=(25, 1000)))
    assert cuts.price((0, 1, 3)).memory == (15, 70)


def test_a_tie_that_is_cut_apart_costs_an_exchange():
    blocks = [block(1, weights=100), block(1), block(1), block(1, weights=100)]
    machines = Machines(2, link=Link(2, 10.0))
    for ties, more in (((), 0), ((Tie(0, 3, gradients=100),), 2 + 10), ((Tie(0, 1, gradients=100),), 0)):
        cuts = CutSearch(make_spec("1f1b", 2, 4), Chain(blocks, ties=ties), machines)
        found = cuts.price((0, 2, 4))
        assert found.time == cuts.priced.simulate((0, 2, 4)).span + more


def test_what_workers_copy_is_time_in_which_they_do_not_compute():
    """Links alone were charged for payloads, though on a CPU the threads that compute copy them: where no bubble hid
    that, steps took up to 6 % longer than said."""
    blocks = [block(1, inputs=2 * (i > 0), outputs=2 * (i < 3)) for i in range(4)]
    chain = Chain(blocks, per_mib=0.25 * 2**20)

    def busy(name, machines):
        spec = make_spec(name, 2, 1)
        return PricedSchedule(spec, chain, machines).simulate((0, 1, 2, 3, 4)[:: 4 // spec.num_stages]).busy

    computed = 2 * 3.0
    assert busy("1f1b", Machines(2)) == (computed + 2 * 0.5, computed + 2 * 0.5), "one forward, one gradient"
    assert busy("zb-v", Machines(2)) == (computed + 2 * 1.0, computed + 2 * 1.0), "nothing is copied at the turn"
    link = Machines(2, link=Link(0, 1.0))
    spec = make_spec("1f1b", 2, 1)
    priced = PricedSchedule(spec, chain, link)
    assert priced.simulate((0, 2, 4)).makespan == 2 * computed + 2 * 2.0, "the way takes what it took, copies included"
    assert (
        PricedSchedule(spec, chain, Machines(2, link=Link(0, 8.0))).simulate((0, 2, 4)).makespan
        == 2 * computed + 2 * 1.0
    )


def test_the_first_stage_does_all_of_its_backward_in_w():
    """It owes nobody a gradient. Plans said that its I takes as long as elsewhere: 33 ms a step, where 22 were run."""
    times = {F: 1, B: 5, I: 3, W: 3, R: 1, U: 0}
    blocks = [LayerCost(times, Size(activations=10, after_inputs=4, inputs=2, outputs=2)) for _ in range(4)]
    chain = Chain(blocks, {I: 0.5, W: 0.5})
    assert [chain.time(kind, 0, 2) for kind in (F, B, I, W)] == [2, 10, 0.5, 10.5]
    assert [chain.time(kind, 2, 4) for kind in (F, B, I, W)] == [2, 10, 6.5, 6.5]
    assert [chain.size(*ends).after_inputs for ends in ((0, 2), (2, 4))] == [20 + 2, 8]
    halves = ModelCosts(2, [times] * 4, by_layer=True).stages(2)
    assert [(half.times[I], half.times[W]) for half in halves] == [(0, 10), (6, 6)]


def test_the_first_stage_holds_all_gradients_of_weights_while_its_w_runs():
    """Of zb-h2 11.6 % less was predicted than a worker had. Then they counted in its forwards too: where these are what
    fills a worker, as what W needs is computed again, a T5 was told 9.9 % too large."""
    blocks = [block(1, weights=10, gradients=10, working=working) for working in (3, 3, 4, 4)]
    for name, more in (("1f1b", 3), ("zb-h2", 20)):
        cuts = CutSearch(make_spec(name, 2, 4), Chain(blocks), Machines(2))
        assert cuts.price((0, 2, 4)).memory == (40 + more, 40 + 4)
    tied = Chain(blocks, ties=[Tie(0, 1, gradients=10)])
    cuts = CutSearch(make_spec("zb-h2", 2, 4), tied, Machines(2))
    assert cuts.price((0, 2, 4)).memory == (30 + 20, 40 + 4), "held once, computed for each of two uses"
    run = PricedSchedule(make_spec("zb-h1", 2, 2), Chain(blocks), Machines(2)).simulate((0, 2, 4))
    assert peak_bytes(run, [Size(gradients=8, activations=10), Size()])[0] == 8 + 2 * 10, "two forwards"
    assert peak_bytes(run, [Size(gradients=12, activations=10), Size()])[0] == 12 + 10 + 12, (
        "the first W, and a forward"
    )


def test_gradients_are_priced_bucket_by_bucket():
    """As one bucket they left behind the last backward, and one pipeline of 4 stages seemed faster than two of 2."""
    layer = LayerCost({F: 5, B: 10, U: 0.01}, Size(gradients=100 * 2**20))
    chain, machines = Chain([layer] * 8), Machines(4, uplinks=dict.fromkeys(range(4), 10 * 2**20))

    def step(replicas, **bucket):
        asked = {} if replicas == 1 else {"replicas": replicas, **bucket}
        spec = make_spec("1f1b", 4, 8, asked)
        return PricedSchedule(spec, chain, machines).simulate(chain.ends([8 // spec.num_stages] * spec.num_stages)).span

    # 8 buckets take 2.5 each: the last leaves when the backward ends, and its sum comes back.
    assert step(2) < step(1) < step(2, bucket=1000)
    assert step(2, bucket=1000) - step(2) == pytest.approx(40 - 5)


def test_remarks_name_shared_cores_copies_of_the_weights_and_slices_that_do_not_pay():
    """A plan was silent on its two copies of the weights, on shared cores, and on slices that were asked for."""
    costs = [block(1.0, weights=10, activations=10, outputs=1) for _ in range(8)]
    half = dict.fromkeys((F, B), 1.0)
    by_length = (LengthTerms(half, {kind: 1000 / 64 for kind in half}),) * 8
    profile = Profile({1: costs}, {}, (), "model", "", "cpu", 8, by_length=by_length, length=64)
    request = PlanRequest(profile, Machines(4), 8, (8,), schedules=("chimera", "1f1b"), slices=(1, 2), recompute=False)
    result = search(request)
    result.plans += search(replace(request, schedules=("1f1b",))).plans
    found = {plan.name: plan for plan in result.plans}
    assert num_copies(found["chimera"], 4) == 2 and num_copies(found["1f1b"], 4) == 1
    result.plans.sort(key=lambda plan: plan.name != "chimera")
    cores, copies, slices = remarks(request, result, 2)
    assert cores.startswith("4 workers share 2 cores")
    assert "2 copies" in copies and "1f1b" in copies and slices.startswith("--slices 1,2")
    result.plans.sort(key=lambda plan: plan.name != "1f1b")
    assert [note.partition(":")[0] for note in remarks(request, result, None)] == ["--slices 1,2"]
    noisy = replace(request, profile=replace(profile, scatter=0.4))
    assert any("times scatter by 40%" in note for note in remarks(noisy, result, None))


def test_a_schedule_in_a_file_is_cut_as_brute_force_cuts_it(tmp_path):
    """Plans were made of the package's schedules alone; and a cut was balanced by stage, not by worker."""
    (tmp_path / "mixed.py").write_text(python_block("mixed.py"))
    mixed, chosen = f"{tmp_path}/mixed.py:Mixed", set()
    for seed in range(6):
        draw = random.Random(seed)
        times = [draw.uniform(3, 8), *(draw.uniform(0.5, 2) for _ in range(4)), draw.uniform(3, 8)]
        profile, machines = Profile({1: [*map(block, times)]}), Machines(2, link=Link(0.1))
        request = PlanRequest(profile, machines, 4, (4,), recompute=False, schedules=("1f1b", mixed))
        best = search(request).plans[0]
        chosen.add(best.schedule)
        found = []
        for name, depth in (("1f1b", 2), (mixed, 3)):
            priced = PricedSchedule(make_spec(name, 2, 4), request.chain(4), machines)
            cuts = [(0, *inner, 6) for inner in combinations(range(1, 6), depth - 1)]
            found += [priced.step_time(priced.simulate(ends), ends) for ends in cuts]
        assert best.predicted_ms == min(found)
    assert mixed in chosen
    with pytest.raises(ConfigError):
        search(replace(request, machines=Machines(5)))
