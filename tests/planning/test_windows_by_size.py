"""Windows by the tokens of unequal microbatches: what a worker may hold, as edges of the relation."""

import json
import random
from dataclasses import replace
from functools import partial

import pytest
from refusals import refused

from rpc_pipe.commands.main import main
from rpc_pipe.dependency import B, ConfigError, F, ScheduleError, check_all
from rpc_pipe.planning.simulator import simulate
from rpc_pipe.planning.specs import make_spec
from rpc_pipe.planning.unequal import by_microbatch
from rpc_pipe.schedules import OneFOneB


def drawn(seed, count=16):
    numbers = random.Random(seed)
    return [max(1, round(1000 * numbers.lognormvariate(0, 0.7))) for _ in range(count)]


def simulated(lengths, order="given", **options):
    """Return the simulated step of 1F1B on 4 workers, checked, whose actions take as long as their microbatch."""
    spec, factor = by_microbatch(make_spec("1f1b", 4, len(lengths), options), lengths=lengths, order=order)
    check_all(spec)
    return simulate(spec, lambda action: {F: 1, B: 2}.get(action.kind, 0) * factor(action))


def least_window(schedule, lengths, **options):
    """Return the least window that is not refused."""
    spec = replace(make_spec(schedule, 4, len(lengths), {"window_tokens": 1, **options}), sizes=tuple(lengths))
    with pytest.raises(ConfigError) as refused:
        check_all(spec)
    return int(str(refused.value).split("at least ")[1].split()[0])


@pytest.mark.parametrize("limit", [1.0, 4.0])
@pytest.mark.parametrize("options", [{}, {"replicas": 2}, {"recompute": "0+1"}])
@pytest.mark.parametrize("schedule", ["1f1b", "eager-1f1b", "zb-h1", "zb-h2", "interleaved"])
def test_no_timing_holds_more_than_the_window(schedule, limit, options):
    """Forwards start as early as their needs allow, and backwards as late: the worst timing."""
    lengths = drawn(3)
    most = int(limit * least_window(schedule, lengths, **options))
    spec = replace(make_spec(schedule, 4, 16, {"window_tokens": most, **options}), sizes=tuple(lengths))
    check_all(spec)
    for seed in range(4):
        numbers = random.Random(seed)
        late = simulate(spec, lambda action, numbers=numbers: numbers.choice([0.01, 1, 30]), order="ready")
        assert max(late.peak_sizes) <= most


def test_short_microbatches_are_in_flight_in_larger_numbers():
    found = simulated([1, 1, 1, 1, 1, 1, 6, 1, 1, 1, 1, 1], window_tokens=6)
    assert max(found.peak_activations) == 6 and max(found.peak_sizes) == 6


def test_a_balanced_step_is_quicker_within_the_memory_of_one_as_it_comes():
    """The order alone puts the longest microbatches next to each other, so it holds more than as they come."""
    gains = []
    for seed in range(4):
        lengths = drawn(seed)
        given = simulated(lengths)
        most = int(max(given.peak_sizes))
        assert max(simulated(lengths, "balanced").peak_sizes) > most
        bounded = simulated(lengths, "balanced", window_tokens=max(most, *lengths))
        assert max(bounded.peak_sizes) <= max(most, *lengths)
        gains.append(given.span / bounded.span)
    assert sum(gains) > 1.1 * len(gains)


def test_the_checker_refuses_a_claim_that_a_late_gradient_breaks():
    class Claims(OneFOneB):
        def peak_size(self, worker):
            return 5

    spec = Claims(num_workers=2, num_microbatches=4)
    check_all(replace(spec, sizes=(1, 2, 3, 2)))
    with refused("worker", ScheduleError):
        check_all(replace(spec, sizes=(1, 3, 3, 1)))


def test_a_window_below_one_microbatch_is_refused_with_the_least_that_works():
    with refused("window_tokens"):
        simulated([3, 6, 2], window_tokens=5)
    with pytest.raises(ConfigError):
        make_spec("1f1b", 2, 4, {"window_tokens": 8, "slices": 2})
    with pytest.raises(ConfigError):
        make_spec("1f1b", 2, 4, {"window_tokens": 0})


def test_a_window_of_several_stages_on_a_worker_holds_a_group_of_microbatches():
    """On the second stage the first microbatch begins when the whole group of two has passed the first one."""
    lengths = [1, 2, 4, 8]
    assert least_window("1f1b", lengths) == 8
    spec = make_spec("interleaved", 2, 4, {"window_tokens": 20})
    check_all(replace(spec, sizes=tuple(lengths)))
    with refused("window_tokens"):
        check_all(replace(spec, window_tokens=19, sizes=tuple(lengths)))


@pytest.mark.parametrize("schedule, near", [("zb-v", "zb-h1"), ("gpipe", "1f1b"), ("pipedream", "1f1b")])
def test_a_schedule_without_such_windows_names_one_that_has_them(schedule, near):
    """PipeDream took them from 1F1B without a word, and its first later step ended in an IndexError."""
    with refused("window_tokens"):
        make_spec(schedule, 4, 8, {"window_tokens": 5})


def test_simulate_shows_the_peak_of_lengths(capsys):
    asked = ["simulate", "--workers", "3", "--microbatches", "5", "--json", "--set", "window_tokens=6"]
    assert main([*asked, "--lengths", "3,1,1,1,2"]) == 0
    assert json.loads(capsys.readouterr().out)["peak_lengths"] == [6, 6, 4]
    assert main(asked) == 2
    assert main(["compare", "--schedule", "1f1b", *asked[1:]]) == 2


def test_a_search_gives_each_order_its_windows():
    from rpc_pipe.planning.unequal import balanced, mountain

    lengths, spec = drawn(1), make_spec("1f1b", 4, 16)
    bounded = replace(spec, window_tokens=int(max(simulated(lengths).peak_sizes)))
    step = partial(simulated, window_tokens=bounded.window_tokens)
    found = balanced(bounded, lengths, 100.0, lengths)
    assert step([lengths[m] for m in found]).span < step([lengths[m] for m in mountain(lengths)]).span
