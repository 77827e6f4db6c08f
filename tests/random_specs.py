"""Random schedules: windows, order edges, placements, routes, split and mixed backward, programs, limits, claims."""

from __future__ import annotations

import random
from collections.abc import Iterable
from functools import cached_property

from rpc_pipe.dependency import Action, B, F, I, R, Spec, W, entries
from rpc_pipe.schedules.pipedream import PipeDream
from rpc_pipe.schedules.pipedream_2bw import PipeDream2BW


class RandomSpec(Spec):
    """A schedule drawn from `seed`; the same for any number of microbatches, so that it can be looked at with more."""

    seed: int = 0
    claims: tuple[int, ...] | None = None

    @cached_property
    def draw(self) -> Drawn:
        return Drawn(self.seed, self.num_workers)

    @property
    def num_stages(self) -> int:
        return self.draw.num_stages

    @property
    def num_routes(self) -> int:
        return self.draw.num_routes

    def place(self, stage: int, route: int) -> int:
        return self.draw.places[route][stage]

    def route(self, microbatch: int) -> int:
        return self.draw.routes[microbatch % len(self.draw.routes)]

    def splits(self, stage: int, microbatch: int) -> bool:
        return (stage + microbatch) % self.draw.split_every == 0 if self.draw.split_every else False

    def recomputes(self, stage: int) -> bool:
        return stage in self.draw.recomputing

    def after(self, action: Action) -> Iterable[Action]:
        needs = []
        for kind, stage, every, first, named, away, back in self.draw.edges:
            if action.kind is kind and action.stage == stage and action.microbatch % every == first:
                need = self._named(named, stage + away, action.microbatch - back)
                if need is not None:
                    needs.append(need)
        return needs

    def _named(self, named: str, stage: int, microbatch: int) -> Action | None:
        if not 0 <= stage < self.num_stages or microbatch < 0:
            return None
        microbatch = min(microbatch, self.num_microbatches - 1)
        actions = self.actions(stage, microbatch)
        return {"first": actions[0], "gradient": next(a for a in actions if a.kind.way == -1), "last": actions[-1]}[
            named
        ]

    def activation_limit(self, worker: int) -> int | None:
        return self.draw.limit

    def peak_activations(self, worker: int) -> int | None:
        return self.draw.limit if self.claims is None else self.claims[worker]


class Drawn:
    """What is drawn."""

    def __init__(self, seed: int, num_workers: int) -> None:
        rng = random.Random(seed)
        self.num_stages = num_workers * rng.choice([1, 1, 1, 2, 2, 3])
        self.num_routes = rng.choice([1, 1, 1, 2])
        self.routes = [rng.randrange(self.num_routes) for _ in range(rng.randint(1, 3))]
        self.places = [self._placement(rng, num_workers) for _ in range(self.num_routes)]
        self.split_every = rng.choice([0, 0, 1, 1, 2])
        self.recomputing = {s for s in range(self.num_stages) if rng.random() < 0.15}
        self.limit = rng.choice([None] * 9 + [rng.randint(1, 3 * num_workers)])
        self.edges: list[tuple[object, int, int, int, str, int, int]] = []
        windowed = rng.choice([1, 1, 0.5, 0])
        window = rng.randint(1, num_workers + 2)
        for stage in range(self.num_stages):
            if rng.random() < windowed:
                back = rng.choice([window, rng.randint(1, num_workers + 2), max(1, self.num_stages - stage)])
                self.edges.append((F, stage, 1, 0, rng.choice(["last", "last", "gradient"]), 0, back))
        for _ in range(rng.choice([0, 0, 1, 2, 3])):
            kind = rng.choice([F, B, I, W, R])
            every = rng.choice([1, 1, 2, 3])
            away, back = rng.choice([-1, 0, 0, 1]), rng.choice([-1, 0, 0, 1, 1, 2, 3])
            stage = rng.randrange(self.num_stages)
            named = rng.choice(["first", "gradient", "last"])
            self.edges.append((kind, stage, every, rng.randrange(every), named, away, back))

    def _placement(self, rng: random.Random, num_workers: int) -> list[int]:
        P, S = num_workers, self.num_stages
        ways = [
            [s % P for s in range(S)],
            [P - 1 - s % P for s in range(S)],
            [min(s % (2 * P), 2 * P - 1 - s % (2 * P)) for s in range(S)],
            [s * P // S for s in range(S)],
            rng.sample([s % P for s in range(S)], S),
        ]
        return rng.choice(ways)


class RandomSlots(RandomSpec):
    """With a slot: the place in some order in which all can be run one after the other."""

    @cached_property
    def _slots(self) -> dict[Action, int]:
        rng = random.Random(self.seed)
        needs = {action: set(self.needs(action)) for w in range(self.num_workers) for action in self.own_actions(w)}
        left = {action: len(before) for action, before in needs.items()}
        needed_by: dict[Action, list[Action]] = {action: [] for action in needs}
        for action, before in needs.items():
            for need in before:
                needed_by[need].append(action)
        eager = rng.random()
        ready = sorted((a for a, n in left.items() if n == 0), key=_by_microbatch)
        slots: dict[Action, int] = {}
        while ready:
            action = ready.pop(0 if rng.random() < eager else rng.randrange(len(ready)))
            slots[action] = 2 * len(slots) + 1
            for follower in needed_by[action]:
                left[follower] -= 1
                if left[follower] == 0:
                    ready.append(follower)
            ready.sort(key=_by_microbatch)
        return slots

    def slot(self, action: Action) -> int:
        return self._slots.get(action, 0)  # what is in a circle shares a slot


class RandomProgram(RandomSpec):
    """A program: the order in which it would be run, with a few neighbours exchanged."""

    def program(self, worker: int) -> Iterable[Action]:
        rng = random.Random(f"{self.seed} {worker}")
        plain = RandomSpec(num_workers=self.num_workers, num_microbatches=self.num_microbatches, seed=self.seed)
        listed = [e.action for e in entries(plain, worker) if e.action.kind in (F, B, I, W, R)]
        for _ in range(rng.choice([0, 1, 2])):
            i = rng.randrange(len(listed))
            listed[i : i + 2] = reversed(listed[i : i + 2])
        return listed


class RandomLags(PipeDream):
    """PipeDream whose stages use weights that are newer or older than its own by drawn numbers of updates."""

    seed: int = 0

    def version(self, stage: int, microbatch: int) -> int:
        lag = random.Random(f"{self.seed} {stage}").choice([-1, 0, 0, 0, 1, 3])
        return max(0, microbatch + 1 - max(1, self.in_flight(stage) + lag))


class RandomStepLags(PipeDream2BW):
    """PipeDream-2BW whose stages use weights that are drawn numbers of steps old."""

    seed: int = 0

    def version(self, stage: int, microbatch: int) -> int:
        lag = random.Random(f"{self.seed} {stage}").choice([0, 1, 1, 1, 2, 3])
        return max(0, microbatch // self.num_microbatches - lag)


def _by_microbatch(action: Action) -> tuple[bool, int, int]:
    return action.kind is F, action.microbatch, -action.stage


def random_spec(seed: int) -> RandomSpec:
    rng = random.Random(f"spec {seed}")
    cls = rng.choice([RandomSpec, RandomSlots, RandomSlots, RandomProgram])
    return cls(num_workers=rng.randint(1, 4), num_microbatches=rng.randint(1, 9), seed=seed)


def random_stream(seed: int) -> Spec:
    rng = random.Random(f"stream {seed}")
    cls: type[RandomLags] | type[RandomStepLags] = rng.choice([RandomLags, RandomStepLags])
    workers = rng.randint(1, 4)
    window = rng.choice([None, None, workers + rng.randint(0, 3)])
    return cls(num_workers=workers, num_microbatches=rng.randint(1, 6), window=window, seed=seed)
