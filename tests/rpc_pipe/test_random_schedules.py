"""Random schedules: what the checker accepts runs to its end at any timing, in the memory that was proved."""

import random
from dataclasses import replace

from random_specs import random_spec
from state_machines import run_state_machines

from rpc_pipe.dependency import ScheduleError, check_all
from rpc_pipe.dependency.memory import Memory


def test_what_is_accepted_never_deadlocks_nor_holds_more_than_was_proved():
    accepted = 0
    for seed in range(1000, 1150):
        spec = random_spec(seed)
        spec = replace(spec, claims=(3 * spec.num_microbatches,) * spec.num_workers)  # of each stage everything
        try:
            check_all(spec)
        except ScheduleError as refusal:
            assert str(refusal).splitlines()[0]
            continue
        accepted += 1
        memory = Memory(spec)
        most = [memory.at_any_timing(w, lambda lives: False)[0].most[-1] for w in range(spec.num_workers)]
        rng = random.Random(seed)
        for order in ("ready", "fixed"):
            costs = [rng.choice([0, 1, 1, 3, 20]) for _ in range(97)]
            _, peaks = run_state_machines(
                spec,
                lambda a, costs=costs: costs[(31 * a.stage + 7 * a.index + ord(a.kind.letter)) % 97],
                comm=rng.choice([0, 1, 5]),
                order=order,
            )
            assert all(peak <= bound for peak, bound in zip(peaks, most, strict=True)), seed
    assert accepted > 85
