"""Where the time went: the right culprit, and parts that add up."""

from dataclasses import replace

import pytest
from synthetic import trace_of

from rpc_pipe.dependency import B, F, U
from rpc_pipe.planning.simulator import Link
from rpc_pipe.planning.unequal import balanced
from rpc_pipe.tracing.lost_time import UNEQUAL, Attribution
from rpc_pipe.tracing.trace import Trace, transfers

SHARDS = [[(stage, 0, 2, 1)] for stage in range(4)]


def attribute_lost_time(*about, **more):
    return Attribution(*about, **more).lost()


def heavier(worker, times):
    def cost(action):
        return {F: 10, B: 20, U: 1}.get(action.kind, 0) * (times if action.stage == worker else 1)

    return cost


def parts(lost):
    shares = {cause: ms / lost.step_ms for cause, ms in lost.parts.items()}
    assert lost.limit_ms / lost.step_ms + sum(shares.values()) == pytest.approx(1)
    assert all(share >= 0 for share in shares.values())
    return shares


def worst(lost):
    return max((cause for cause in parts(lost) if cause != "bubble"), key=parts(lost).get)


def test_a_calm_run_is_told_how_close_it_is():
    lost = attribute_lost_time(trace_of(), SHARDS)
    assert parts(lost)["bubble"] == pytest.approx(3 / 11, abs=0.02)
    assert lost.sentence.startswith("the run reaches 9") and "of what 1f1b allows" in lost.sentence
    assert "more microbatches" in lost.sentence


def test_a_bubble_is_named_where_there_is_one_alone():
    """A run of one worker was told "worst: the run reaches 98 %; 0 %, less with more microbatches"."""
    lost = attribute_lost_time(trace_of("gpipe", workers=1), SHARDS[:1])
    assert parts(lost)["bubble"] < 0.04 and "microbatches" not in lost.sentence


def test_a_slow_worker_is_named():
    lost = attribute_lost_time(trace_of(cost=heavier(2, 1.5)), SHARDS)
    assert worst(lost) == "slow worker"
    assert lost.sentence.startswith("worker 2 takes 1.5 x as long as others for stages of the same form")


def test_uneven_stages_are_named():
    def cost(action):
        return {F: 5, B: 10, U: 1}.get(action.kind, 0) * (1, 3, 2, 2)[action.stage]

    shards = [[(0, 0, 1, 1)], [(1, 0, 3, 3)], [(2, 0, 2, 2)], [(3, 0, 2, 2)]]
    lost = attribute_lost_time(trace_of(cost=cost), shards)
    assert worst(lost) == "imbalance"
    assert "stages or actions take unequally long, those of worker 1 1.5 x the median" in lost.sentence


def test_workers_that_compute_equally_long_are_not_said_to_have_more():
    """On a crowded machine it said of one of two workers that it is slow, as it has more to compute: 3 of 6 layers."""

    def cost(action):
        return {F: 10, B: 20, U: 1}.get(action.kind, 0) + {F: 8, B: -8}.get(action.kind, 0) * (action.stage == 0)

    lost = attribute_lost_time(trace_of("gpipe", cost=cost), SHARDS, cores=2)
    assert worst(lost) == "imbalance" and "is slow" not in lost.sentence
    assert "4 workers share 2 cores of one machine" in lost.sentence
    calm = attribute_lost_time(trace_of("gpipe", cost=cost), SHARDS).sentence
    assert "stages or actions take unequally long" in calm


def unequal(lengths):
    def cost(action):
        return {F: 10, B: 20}.get(action.kind, 0) * lengths[action.index] if action.kind is not U else 1

    return cost


def test_unequal_microbatches_are_named_with_the_gain_of_another_order():
    """They were blamed on other programs, since the usual times of actions know no lengths."""
    lengths = [6, 1, 1, 4, 1, 2, 1, 5]
    trace = trace_of(cost=unequal(lengths), lengths=lengths)
    lost = attribute_lost_time(trace, SHARDS)
    assert worst(lost) == UNEQUAL and parts(lost)["overhead"] < 0.1
    assert "--microbatch-order balanced would take" in lost.sentence
    order = balanced(trace.spec, lengths)
    ordered = [lengths[m] for m in order]
    better = attribute_lost_time(trace_of(cost=unequal(ordered), lengths=ordered), SHARDS)
    assert better.step_ms < 0.9 * lost.step_ms and "balanced" not in better.sentence


def test_microbatches_that_differ_by_noise_are_equal():
    assert parts(attribute_lost_time(trace_of(cost=unequal([1, 1.1] * 4)), SHARDS))[UNEQUAL] == 0


def test_microbatches_of_equal_payloads_are_equal_whatever_their_times():
    """Images of one size were called unequal microbatches, since other programs had slowed some down."""
    for lengths, cause in ((), "overhead"), ([1, 3] * 4, UNEQUAL):
        trace = trace_of(cost=unequal([1, 3] * 4), lengths=lengths)
        assert worst(attribute_lost_time(trace, SHARDS)) == cause


def test_a_planned_picture_is_as_wide_as_its_microbatches_are_long():
    """The planned step drew all microbatches equally wide above a step in which they were not."""
    lengths = [6, 1, 1, 4, 1, 2, 1, 5]
    trace = trace_of(cost=unequal(lengths), lengths=lengths, steps=1)
    planned, actual = ({s.action: round(s.end - s.start) for s in p.spans} for p in trace.pictures())
    assert planned == actual


def test_few_steps_tell_no_cause():
    """A run of one step was told of a slow link."""
    links = {(1, 2): Link(60.0)}
    for steps, told in (2, False), (3, True):
        assert ("a slow link" in attribute_lost_time(trace_of(links=links, steps=steps), SHARDS).sentence) == told


def test_waits_of_milliseconds_on_one_machine_are_no_slow_link():
    """A machine with a core for each worker was told of a slow link for 2.8 ms, in which its core did other work."""
    links = {(a, b): Link(2.8) for a in range(4) for b in range(4) if abs(a - b) == 1}
    trace = trace_of(links=links, cost=lambda action: {F: 2, B: 4}.get(action.kind, 0.1))
    assert worst(attribute_lost_time(trace, SHARDS)) == "link"
    assert parts(attribute_lost_time(trace, SHARDS, cores=8))["link"] == 0


def test_other_programs_on_the_cores_are_named_for_short_actions_too():
    """97 % of a step were said to be the runtime itself, where other programs held the cores."""
    brief = trace_of(cost=lambda action: 0.1, pause_ms=0)
    late = {step: [replace(r, end_ns=r.end_ns + 40 * 10**6 * step) for r in rs] for step, rs in brief.steps.items()}
    for core_wait, told in ((0.9, "waits for a core in 90 % of the time"), (0.0, "the runtime itself")):
        found = attribute_lost_time(Trace(brief.spec, late), SHARDS, core_wait=core_wait)
        assert told in found.sentence, found
    paused = trace_of(pause_ms=150.0)
    sentences = [attribute_lost_time(paused, SHARDS, core_wait=wait).sentence for wait in (0.0, 0.9)]
    assert ["num_workers" in sentence for sentence in sentences] == [True, False]


@pytest.mark.parametrize("growth, told", [(0, "other programs ran on the cores"), (1, "pad sequences")])
def test_the_first_look_at_a_model_is_no_new_shape(growth, told):
    """Records count all looks so far, so every whole model was told to pad its sequences."""
    trace, steps = trace_of(), {}
    for step, records in trace.steps.items():
        steps[step] = []
        for record in records:
            *actions, last, update = record.actions
            actions += [last._replace(end_ns=last.end_ns + 400 * 10**6), update]
            end_ns = record.end_ns + 400 * 10**6 * step
            steps[step].append(replace(record, actions=actions, end_ns=end_ns, observations=2 + growth * step))
    assert told in attribute_lost_time(Trace(trace.spec, steps), SHARDS).sentence


def test_a_slow_link_is_named():
    links = {(a, b): Link(20.0 if (a, b) == (1, 2) else 0.4) for a in range(4) for b in range(4) if abs(a - b) == 1}
    lost = attribute_lost_time(trace_of(links=links), SHARDS)
    assert worst(lost) == "link"
    assert "payloads take 20.0 ms from worker 1 to worker 2" in lost.sentence
    crowded = attribute_lost_time(trace_of(links=links), SHARDS, cores=2).sentence
    assert "4 workers share 2 cores of one machine" in crowded and "slow link" not in crowded


def test_a_link_is_slow_where_others_take_no_time():
    """On a crowded machine the clocks' difference is as large as a transfer, which then takes 0 ms: the run ended in a
    ZeroDivisionError."""
    links = {(a, b): Link(20.0 if (a, b) == (1, 2) else 0.0) for a in range(4) for b in range(4) if abs(a - b) == 1}
    lost = attribute_lost_time(trace_of(links=links), SHARDS)
    assert worst(lost) == "link" and "payloads take 20.0 ms from worker 1 to worker 2" in lost.sentence


def test_a_slow_data_loader_is_named():
    lost = attribute_lost_time(trace_of(pause_ms=150.0), SHARDS)
    assert parts(lost)["data"] == pytest.approx(150 / (150 + 33 * 10 + 5), abs=0.05)
    assert lost.sentence.startswith("worker 0 waits 150.0 ms for data between steps")


@pytest.mark.parametrize(
    "cause, words",
    [("disk", "for the disk"), ("network", "samples to come over the network"), ("decode", "to be decoded")],
)
def test_what_data_are_waited_for_is_named(cause, words):
    trace = trace_of(pause_ms=150.0)
    waited = {
        step: [replace(r, data_wait_ns=140_000_000, data_cause=cause) if r.worker == 0 else r for r in records]
        for step, records in trace.steps.items()
    }
    lost = attribute_lost_time(Trace(trace.spec, waited), SHARDS)
    assert lost.data_cause == cause == lost.as_json()["data_cause"] and words in lost.sentence
    brief = {step: [replace(r, data_wait_ns=r.data_wait_ns // 20) for r in records] for step, records in waited.items()}
    assert attribute_lost_time(Trace(trace.spec, brief), SHARDS).data_cause == ""


def test_batches_that_are_read_while_a_step_drains_count_as_data():
    trace = trace_of()
    waited = {
        step: [replace(r, data_wait_ns=60_000_000, data_cause="disk") if r.worker == 0 else r for r in records]
        for step, records in trace.steps.items()
    }
    assert attribute_lost_time(Trace(trace.spec, waited), SHARDS).data_cause == "disk"


def test_one_worker_that_is_late_with_its_data_is_no_slow_link():
    """It asks for payloads only when it comes, so they arrive late: its own doing, not the link's."""
    trace = trace_of(steps=6)
    late = {
        step: [r if r.worker != 1 else _late(r, records[0], 100_000_000) for r in records]
        for step, records in trace.steps.items()
    }
    lost = attribute_lost_time(Trace(trace.spec, late), SHARDS)
    assert lost.sentence.startswith("worker 1 waits ") and parts(lost)["link"] < 0.01
    assert all(way.ms < 1 for way in transfers(late.values())[0, 1])


def _late(record, first, ns):
    start = first.actions[0].end_ns + ns
    arrivals = [a._replace(at_ns=max(a.at_ns, start + 500_000)) for a in record.arrivals]
    return replace(record, start_ns=start, arrivals=arrivals)


def test_crowded_machines_are_told_so():
    trace = trace_of(hop_ms=0.9, cost=lambda a: {F: 1, B: 2}.get(a.kind, 0.1))
    assert "wait for a core" in attribute_lost_time(trace, SHARDS, cores=2).sentence
    assert "the runtime itself" in attribute_lost_time(trace, SHARDS, cores=8).sentence


def test_threads_that_take_turns_are_told_so():
    trace = trace_of(hop_ms=0.9, cost=lambda a: {F: 1, B: 2}.get(a.kind, 0.1))
    sentence = attribute_lost_time(trace, SHARDS, cores=8, one_process=True).sentence
    assert sentence.startswith("the workers are threads of one process and take turns")
    assert "rpc-pipe run gives each a process" in sentence


@pytest.mark.parametrize("schedule", ["interleaved", "zb-v", "chimera", "gpipe", "dualpipe"])
def test_every_kind_of_schedule_can_be_looked_at(schedule):
    trace = trace_of(schedule)
    shards = [[(*shard, 2, 1) for shard in trace.spec.hosted(worker)] for worker in range(4)]
    lost = attribute_lost_time(trace, shards)
    assert parts(lost)["overhead"] < 0.3 and lost.sentence


def test_a_single_step_is_enough():
    assert attribute_lost_time(trace_of(steps=1), SHARDS).step_ms == pytest.approx(33 * 10 + 6 * 0.5 + 1, rel=0.02)
