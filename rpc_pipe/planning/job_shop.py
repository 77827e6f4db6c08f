"""A pipeline step as a job-shop problem: each worker's order of actions by list scheduling, then by local search.

It generalises the zero-bubble auto-scheduler (Qi et al. 2023, arXiv:2401.10241, section 3) from two placements to any:
forwards, backwards for inputs and backwards for weights are actions of their own, and the activations of a worker are
limited in bytes. Local search uses the neighbourhood of Dell'Amico and Trubian (1993): the longest path can become
shorter only if an action is moved to an end of a critical block, a row of actions that one worker runs without a gap
in that path. Loads without torch.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ..dependency import Action, B, F, I, Spec, W

#: each worker's actions in order, as numbers
Order = list[list[int]]


@dataclass
class JobShop:
    """The problem: actions with durations and dependencies, and the memory of their workers.

    To be minimised is the time of a step among others: each worker starts the next when its part of this one has ended.

    Args:
        spec: placement, routes and actions are taken from it; its order is ignored.
        time: duration of an action on its worker.
        transfer_time: of the payload of an action, from one worker to another.
        activations: by stage, bytes (or any unit) that a forward keeps for its backward.
        after_inputs: by stage, what is kept from I to W.
        budget: by worker, the most that may be kept at once.
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
        self.worker = [spec.worker(action) for action in self.actions]
        self.duration = [self.time(action) for action in self.actions]
        #: bytes that each action allocates when it starts, and frees when it has ended
        self.allocates = [self.activations[a.stage] if a.kind is F else 0 for a in self.actions]
        self.frees = [self._frees(a) for a in self.actions]
        #: the need on the same stage (-1: none)
        self.before = [n - 1 if at else -1 for n, at in enumerate(at for chain in chains for at in range(len(chain)))]
        #: the need on a neighbouring stage (-1: none), and the transfer time of its payload
        self.need: list[int] = []
        self.delay: list[float] = []
        #: the actions that need each
        self.users: list[list[int]] = [[] for _ in self.actions]
        for n, action in enumerate(self.actions):
            origin = spec.origin(action)
            need = -1 if origin is None else self.number[origin]
            self.need.append(need)
            far = origin is not None and self.worker[need] != self.worker[n]
            self.delay.append(self.transfer_time(self.actions[need], self.worker[need], self.worker[n]) if far else 0)
            for each in (self.before[n], need):
                if each >= 0:
                    self.users[each].append(n)

    def _frees(self, action: Action) -> float:
        stage = action.stage
        if action.kind is I:
            return self.activations[stage] - self.after_inputs[stage]
        return {W: self.after_inputs[stage], B: self.activations[stage]}.get(action.kind, 0)

    # --- orders

    def from_program(self, rows: Sequence[Sequence[Action]]) -> Order:
        """Return an order of actions as numbers."""
        return [[self.number[action] for action in row] for row in rows]

    def to_program(self, order: Order) -> tuple[tuple[Action, ...], ...]:
        """Return an order of numbers as actions."""
        return tuple(tuple(self.actions[n] for n in row) for row in order)

    def peak(self, row: Sequence[int]) -> float:
        """Return the most bytes that a worker keeps with this order."""
        held = most = 0.0
        allocates, frees = self.allocates, self.frees
        for n in row:
            held += allocates[n]
            if held > most:
                most = held
            held -= frees[n]
        return most

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
        return (
            None if left else (max([ends[row[-1]] - self.start_of(row, ends) for row in order if row], default=0), ends)
        )

    def start_of(self, row: Sequence[int], ends: Sequence[float]) -> float:
        """Return when a worker with this order starts."""
        return ends[row[0]] - self.duration[row[0]]


@dataclass(frozen=True)
class PriorityRule:
    """A priority rule of list scheduling: which of the ready actions a worker starts first."""

    #: prefer F to I until this many microbatches more than the stages behind are held
    eager: int = 0
    #: prefer the later stages of a worker
    deep_first: bool = True
    #: run W only when nothing else is ready
    lazy: bool = True


PRIORITY_RULES = tuple(
    PriorityRule(eager, deep, lazy) for eager in (0, 1, 2, 4) for deep in (True, False) for lazy in (True, False)
)


def list_schedule(shop: JobShop, rule: PriorityRule) -> Order | None:
    """Return the order of list scheduling: a free worker starts what the rule prefers of what is ready and fits.

    A forward leaves room for one microbatch on each later stage of its worker; otherwise it could never come back.

    Returns:
        None if nothing that is left fits.
    """
    state = _ListScheduler(shop, rule)
    chosen = [state.choose(worker) for worker in range(len(state.order))]
    for _ in shop.actions:
        first = min(((found, worker) for worker, found in enumerate(chosen) if found is not None), default=None)
        if first is None:
            return None
        (start, _, n), worker = first
        for changed in {worker, *state.start(worker, n, start)}:
            chosen[changed] = state.choose(changed)
    return state.order


class _ListScheduler:
    """The state of list scheduling: what has been started, what is ready, and the bytes that workers hold."""

    def __init__(self, shop: JobShop, rule: PriorityRule) -> None:
        self._shop, self._rule = shop, rule
        spec, count = shop.spec, shop.spec.num_workers
        self._later = {
            (stage, route): sum(
                shop.activations[s] for s in range(stage + 1, spec.num_stages) if spec.place(s, route) == worker
            )
            for stage in range(spec.num_stages)
            for route in range(spec.num_routes)
            for worker in [spec.place(stage, route)]
        }
        self._arrive = [0.0] * len(shop.actions)
        self._missing = [(need >= 0) + (own >= 0) for need, own in zip(shop.need, shop.before, strict=True)]
        self._ready: list[set[int]] = [set() for _ in range(count)]
        for n, missing in enumerate(self._missing):
            if not missing:
                self._ready[shop.worker[n]].add(n)
        self._free, self._held = [0.0] * count, [0.0] * count
        self._inside = [0] * count
        self.order: Order = [[] for _ in range(count)]

    def choose(self, worker: int) -> tuple[float, tuple[float, ...], int] | None:
        """Return (start, rank, action) of what a worker starts next; None: nothing that fits is ready."""
        shop, rule, spec = self._shop, self._rule, self._shop.spec
        room = shop.budget[worker] * (1 + 1e-9) - self._held[worker]
        best: tuple[float, tuple[float, ...], int] | None = None
        for n in self._ready[worker]:
            stage, kind, m = shop.actions[n]
            if kind is F and shop.allocates[n] + self._later[stage, spec.route(m)] > room:
                continue
            ahead = self._inside[worker] < rule.eager + spec.num_stages - stage
            rank = 2.0 if kind is W and rule.lazy else 1.0 if (kind is F) != ahead else 0.0
            depth = -stage if rule.deep_first else stage
            beside = depth if kind is F and rule.deep_first else m
            found = max(self._free[worker], self._arrive[n]), (rank, beside, m, depth), n
            if best is None or found < best:
                best = found
        return best

    def start(self, worker: int, n: int, at: float) -> list[int]:
        """Start an action; return the workers on which its end makes another action ready."""
        shop, changed = self._shop, []
        end = at + shop.duration[n]
        self._ready[worker].discard(n)
        self.order[worker].append(n)
        self._free[worker] = end
        self._held[worker] += shop.allocates[n] - shop.frees[n]
        self._inside[worker] += shop.actions[n].kind.holds
        for user in shop.users[n]:
            travel = shop.delay[user] if shop.need[user] == n else 0
            self._arrive[user] = max(self._arrive[user], end + travel)
            self._missing[user] -= 1
            if not self._missing[user]:
                self._ready[shop.worker[user]].add(user)
                changed.append(shop.worker[user])
        return changed


def improve(shop: JobShop, order: Order, keep_on: Callable[[], bool]) -> tuple[float, Order]:
    """Return the best order found by local search from `order`, with its time.

    Moves that make the order up to 2 % longer than the best are accepted, so that it leaves local optima.

    Args:
        keep_on: asked before every move whether to go on.
    """
    draw = random.Random(0)
    ran = shop.evaluate(order)
    assert ran is not None
    now, ends = ran
    best, best_order = now, [list(row) for row in order]
    current = [list(row) for row in order]
    patience, since = 0.02, 0
    while keep_on():
        moved = _random_move(shop, current, ends, draw)
        since += 1
        if moved is None:
            continue
        worker, row = moved
        if shop.peak(row) > shop.budget[worker] * (1 + 1e-9):
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


def _random_move(shop: JobShop, order: Order, ends: list[float], draw: random.Random) -> tuple[int, list[int]] | None:
    """Return a worker and its order with one action of a critical block moved; None: the move changes nothing."""
    rows = list(_critical_blocks(shop, order, ends))
    if not rows:
        return None
    worker, first, last = draw.choice(rows)
    row = order[worker]
    i = draw.randint(first, last)
    if draw.random() < 0.5:
        to = first if draw.random() < 0.5 else last
    else:  # nearby; nothing waits for W, which may be moved anywhere
        reach = len(row) if shop.actions[row[i]].kind is W else 4
        to = min(len(row) - 1, max(0, i + draw.randint(-reach, reach)))
    if to == i:
        return None
    moved = row[:i] + row[i + 1 :]
    moved.insert(to, row[i])
    return worker, moved


def _critical_blocks(shop: JobShop, order: Order, ends: list[float]) -> Iterator[tuple[int, int, int]]:
    """Yield (worker, first place, last place) of the blocks of a longest path, from its end."""
    n = max((row for row in order if row), key=lambda row: ends[row[-1]] - shop.start_of(row, ends))[-1]
    worker = shop.worker[n]
    last = i = order[worker].index(n)
    while True:
        start = ends[n] - shop.duration[n]
        need = shop.need[n]
        before = order[worker][i - 1] if i else -1
        if before >= 0 and ends[before] >= start - 1e-9 * abs(start):
            n, i = before, i - 1
            continue
        yield worker, i, last
        if need < 0:
            return
        n = need
        worker = shop.worker[n]
        last = i = order[worker].index(n)
