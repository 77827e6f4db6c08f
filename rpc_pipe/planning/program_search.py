"""Search of programs: the order of actions for given costs, placement, cut and microbatches. Loads without torch.

A step is a job-shop problem. Local search generalises the zero-bubble auto-scheduler (Qi et al. 2023, arXiv:2401.10241,
section 3) from two placements to any: forwards, backwards for inputs and backwards for weights are separate actions,
and the activations of a worker are limited in bytes. It uses the neighbourhood of Dell'Amico and Trubian (1993). A
critical block is a row of actions in the longest path that one worker runs without a gap; only a move of an action to
an end of such a block can shorten the path.
"""

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from ..dependency import Action, B, F, I, PipeError, Spec, W, check_all
from ..dependency.spec import overrides
from .footprint import Size
from .listed_schedule import ListedSchedule, listed_schedule
from .plan import Plan
from .pricing import Ends, PricedSchedule
from .profile import Chain, Machines
from .search import PlanRequest, PlanResult, spec_of

#: each worker's actions in order, as numbers
Order = list[list[int]]


@dataclass
class JobShop:
    """The problem: actions with durations and dependencies, and the memory of their workers.

    To be minimised is the time of a step in a stream: each worker starts the next when its part of this one has ended.

    Args:
        spec: placement, routes and actions are taken from it; its order is ignored.
        time: duration of an action on its worker.
        transfer_time: of the payload of an action, from one worker to another.
        activations: by stage, bytes (or any unit) that a forward keeps for its backward.
        after_inputs: by stage, the bytes kept from I to W.
        budget: by worker, the most bytes kept at once.
    """

    spec: Spec
    time: Callable[[Action], float]
    transfer_time: Callable[[Action, int, int], float]
    activations: Sequence[float]
    after_inputs: Sequence[float]
    budget: Sequence[float]

    def __post_init__(self) -> None:
        spec = self.spec
        chains = [spec.actions(s, m) for m in range(spec.num_microbatches) for s in range(spec.num_stages)]
        self.actions = [action for chain in chains for action in chain]
        self.number = {action: n for n, action in enumerate(self.actions)}
        self.worker, self.duration = list(map(spec.worker, self.actions)), list(map(self.time, self.actions))
        kept, after = self.activations, self.after_inputs
        freed = {B: kept, W: after, I: [most - left for most, left in zip(kept, after, strict=True)]}
        #: bytes that each action allocates when it starts, and frees when it has ended
        self.allocates = [kept[a.stage] if a.kind is F else 0 for a in self.actions]
        self.frees = [freed[a.kind][a.stage] if a.kind in freed else 0 for a in self.actions]
        kinds: dict[object, list[int]] = {}
        #: by action the actions of its kind, stage and route, in the order of microbatches
        self.alike = [kinds.setdefault((a.kind, a.stage, spec.route(a.index)), []) for a in self.actions]
        for n, alike in enumerate(self.alike):
            alike.append(n)
        #: the need on the same stage (-1: none)
        self.before = [n - 1 if at else -1 for n, at in enumerate(at for chain in chains for at in range(len(chain)))]
        #: the need on a neighbouring stage (-1: none), and the transfer time of its payload
        origins = [(origin, spec.worker(origin)) if (origin := spec.origin(a)) else None for a in self.actions]
        self.need = [self.number[origin[0]] if origin else -1 for origin in origins]
        self.delay = [
            self.transfer_time(*origin, target) if origin and origin[1] != target else 0.0
            for origin, target in zip(origins, self.worker, strict=True)
        ]

    # --- orders

    def in_turn(self, row: Sequence[int]) -> list[int]:
        """Return an order with actions that are alike in turn, which take equally long.

        In another order layers with buffers cannot run, nor torch's CSV, and gradients would be summed otherwise.
        """
        turns = {id(alike): iter(alike) for alike in map(self.alike.__getitem__, row)}
        return [next(turns[id(self.alike[n])]) for n in row]

    def from_program(self, rows: Sequence[Sequence[Action]]) -> Order:
        """Return an order of actions as numbers."""
        return [[self.number[action] for action in row] for row in rows]

    def to_program(self, order: Order) -> tuple[tuple[Action, ...], ...]:
        """Return an order of numbers as actions."""
        return tuple(tuple(self.actions[n] for n in row) for row in order)

    def peak(self, row: Sequence[int]) -> float:
        """Return the most bytes that a worker keeps with this order."""
        allocates, frees = self.allocates, self.frees
        return max(accumulate((each for n in row for each in (allocates[n], -frees[n])), initial=0.0))

    def fits(self, order: Order) -> bool:
        """Return whether every worker stays within its budget."""
        return all(self.peak(row) <= most * (1 + 1e-9) for row, most in zip(order, self.budget, strict=True))

    def evaluate(self, order: Order, within: float = float("inf")) -> tuple[float, list[float]] | None:
        """Return the time to be minimised, and when each action ends.

        Returns:
            None if the order deadlocks, or takes longer than `within`.
        """
        ends: list[float] = [-1.0] * len(self.actions)
        need, delay, before, duration = self.need, self.delay, self.before, self.duration
        at, free = [0] * len(order), [0.0] * len(order)
        waiting: dict[int, int] = {}
        todo = list(range(len(order)))
        left = len(self.actions)
        most = [within] * len(order)
        while todo:
            worker = todo.pop()
            row, i, now = order[worker], at[worker], free[worker]
            while i < len(row):
                n = row[i]
                if before[n] >= 0 and ends[before[n]] < 0:
                    return None
                other = need[n]
                if other >= 0:
                    there = ends[other]
                    if there < 0:
                        waiting[other] = worker
                        break
                    there += delay[n]
                    if there > now:
                        now = there
                if not i:
                    most[worker] += now
                now += duration[n]
                if now > most[worker]:
                    return None
                ends[n] = now
                left -= 1
                i += 1
                if n in waiting:
                    todo.append(waiting.pop(n))
            at[worker], free[worker] = i, now
        took = [ends[row[-1]] - self.start_of(row, ends) for row in order if row]
        return None if left else (max(took, default=0), ends)

    def start_of(self, row: Sequence[int], ends: Sequence[float]) -> float:
        """Return when a worker with this order starts."""
        return ends[row[0]] - self.duration[row[0]]


def improve(shop: JobShop, order: Order, keep_on: Callable[[], bool]) -> tuple[float, Order]:
    """Return the best order found by local search from `order`, with its time.

    Moves that make the order up to 2 % longer than the best are accepted, so that it leaves local optima.

    Args:
        keep_on: asked before every move whether to continue.
    """
    draw, ran = random.Random(0), shop.evaluate(order)
    assert ran is not None
    now, ends = ran
    best, best_order, current = now, [list(row) for row in order], [list(row) for row in order]
    patience, since = 0.02, 0
    while keep_on():
        since += 1
        worker, row = _random_move(shop, current, ends, draw)
        if not row or shop.peak(row) > shop.budget[worker] * (1 + 1e-9):
            continue
        before, current[worker] = current[worker], row
        ran = shop.evaluate(current, max(now, best * (1 + patience * draw.random() ** 3)) * (1 + 1e-12))
        if ran is None:
            current[worker] = before
            continue
        now, ends = ran
        if now < best * (1 - 1e-12):
            best, best_order, since = now, [list(row) for row in current], 0
        elif since > 3000:
            current, since = [list(row) for row in best_order], 0
            now, ends = shop.evaluate(current) or ran
    return best, best_order


def _random_move(shop: JobShop, order: Order, ends: list[float], draw: random.Random) -> tuple[int, list[int]]:
    """Return a worker and its order with one action of a critical block moved; []: the move changes nothing."""
    worker, first, last = draw.choice(list(_critical_blocks(shop, order, ends)))
    row = order[worker]
    i = draw.randint(first, last)
    if draw.random() < 0.5:
        to = first if draw.random() < 0.5 else last
    else:  # nearby; nothing waits for W, which may be moved anywhere
        reach = len(row) if shop.actions[row[i]].kind is W else 4
        to = min(len(row) - 1, max(0, i + draw.randint(-reach, reach)))
    moved = row[:i] + row[i + 1 :]
    moved.insert(to, row[i])
    moved = shop.in_turn(moved)
    return worker, moved if moved != row else []


def _critical_blocks(shop: JobShop, order: Order, ends: list[float]) -> Iterator[tuple[int, int, int]]:
    """Yield (worker, first place, last place) of the blocks of a longest path, from its end."""
    n = max((row for row in order if row), key=lambda row: ends[row[-1]] - shop.start_of(row, ends))[-1]
    while n >= 0:
        worker = shop.worker[n]
        last = i = order[worker].index(n)
        while i:
            before, start = order[worker][i - 1], ends[n] - shop.duration[n]
            if ends[before] < start - 1e-9 * abs(start):
                break
            n, i = before, i - 1
        yield worker, i, last
        n = shop.need[n]


#: a plan's name of its schedule if that is a searched program
SEARCHED = "searched"
#: number of plans with a placement and cut that are tried
_BASES = 4
#: how often the budget of activations is lowered by the excess of a program
_TRIES = 3


def best_order(shop: JobShop, seeds: Sequence[Order], until: float) -> tuple[float, Order] | None:
    """Return the best order that local search finds from the best of `seeds` within the budget; None: none is."""
    ran = [(run[0], at) for at, order in enumerate(seeds) if shop.fits(order) and (run := shop.evaluate(order))]
    return improve(shop, seeds[min(ran)[1]], lambda: time.monotonic() < until) if ran else None


def faster_program(
    request: PlanRequest, result: PlanResult, tell: Callable[[float], None], seconds: float
) -> Plan | None:
    """Return a plan with a program that is faster than all plans of `result` and fits; None: none was found."""
    tries = [(*base, split) for base in _bases(request, result) for split in (True, False)]
    until = time.monotonic() + seconds
    best: Plan | None = None
    for number, (plan, spec, split) in enumerate(tries):
        tell(number / len(tries))
        left = (until - time.monotonic()) / (len(tries) - number)
        found = _faster_program(request, plan, spec, split, time.monotonic() + left)
        if found is not None and found.predicted_ms < (best or result.plans[0]).predicted_ms * (1 - 1e-9):
            best = found
    return best


def _bases(request: PlanRequest, result: PlanResult) -> list[tuple[Plan, Spec]]:
    """Return the best plans of different placements and numbers of microbatches, with their specs."""
    found: dict[tuple[object, ...], tuple[Plan, Spec]] = {}
    for plan in result.plans:
        spec = spec_of(plan, request.machines.num_workers)
        other = plan.recompute or type(spec).recompute or overrides(type(spec), "actions")
        if not other and not plan.sharing and not {"replicas", "slices"} & plan.parameters.keys():
            found.setdefault((*placement_of(spec), plan.num_microbatches), (plan, spec))
    return list(found.values())[:_BASES]


def _faster_program(request: PlanRequest, plan: Plan, spec: Spec, split: bool, until: float) -> Plan | None:
    machines, chain = request.machines, request.chain(plan.num_microbatches)
    ends = chain.ends(plan.cut)
    rows = PricedSchedule(spec, chain, machines).simulate(ends).orders()
    start = listed(split_backwards(rows) if split else rows, spec)
    priced = PricedSchedule(start, chain, machines)
    took = dict(zip(priced.relation.actions, priced.costs(ends), strict=True))
    sizes, workers = priced.sizes(ends), range(machines.num_workers)
    limits = [float("inf") if (limit := machines.limit(worker)) is None else limit for worker in workers]
    resident = [_resident([sizes[s] for s, _ in spec.hosted(worker)]) for worker in workers]
    budget = [limit - own for limit, own in zip(limits, resident, strict=True)]
    for _ in range(_TRIES):
        shop = JobShop(
            start,
            took.__getitem__,
            lambda action, source, target: priced.transfer_time(action, sizes[action.stage], source, target),
            [max(size.activations, size.after_inputs) for size in sizes],
            [size.after_inputs for size in sizes],
            budget,
        )
        found = best_order(shop, [shop.from_program(start.listed.rows)], until)
        if found is None:
            return None
        made = _as_plan(listed(shop.to_program(found[1]), spec), chain, machines, ends)
        if made is None:
            return None
        over = [used - limit for used, limit in zip(made.memory_by_worker, limits, strict=True)]
        if max(over) <= 0:
            return made
        budget = [most - max(0.0, more) for most, more in zip(budget, over, strict=True)]
        until = max(until, time.monotonic() + 0.3)
    return None


def split_backwards(rows: Sequence[Sequence[Action]]) -> list[list[Action]]:
    """Return an order with every backward in two parts, one after the other."""
    return [
        [part for a in row for part in ([kind(a.stage, a.index) for kind in (I, W)] if a.kind is B else [a])]
        for row in rows
    ]


def listed(rows: Sequence[Sequence[Action]], placed: Spec) -> ListedSchedule:
    """Return the spec with this order of each worker, and the placement of another."""
    schedule = listed_schedule(tuple(map(tuple, rows)), *placement_of(placed))
    return schedule(num_workers=placed.num_workers, num_microbatches=placed.num_microbatches)


def placement_of(spec: Spec) -> tuple[tuple[tuple[int, ...], ...], tuple[int, ...]]:
    """Return the worker by route and stage, and the route by microbatch."""
    stages = range(spec.num_stages)
    places = tuple(tuple(spec.place(s, r) for s in stages) for r in range(spec.num_routes))
    return places, tuple(map(spec.route, range(spec.num_microbatches)))


def _resident(hosted: Sequence[Size]) -> float:
    """Return the bytes of a worker's shards, working memory, and one payload in and out of each stage."""
    working = max((size.working for size in hosted), default=0)
    return working + sum(size.shard + size.inputs + size.outputs for size in hosted)


def _as_plan(spec: ListedSchedule, chain: Chain, machines: Machines, ends: Ends) -> Plan | None:
    """Return a program as a plan, checked and simulated; None: it fails the checker."""
    try:
        check_all(spec)
    except PipeError:
        return None
    rows, placement, routes = spec.listed[:3]
    program = tuple(" ".join(map(str, row)) for row in rows)
    uncut = Plan(
        SEARCHED, num_workers=spec.num_workers, num_microbatches=spec.num_microbatches, program=program,
        placement=placement, routes=routes,
    )  # fmt: skip
    return PricedSchedule(spec, chain, machines).plan(uncut, ends)
