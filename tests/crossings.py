"""Crossings of dimensions: a job is drawn as one value of each dimension, trained, and compared with one process.

Faults live where two dimensions meet, each of which works alone. `DIMENSIONS` says how a job gets each value;
`tried` trains it by a pipeline and by a plain loop over whole models in double precision, in which rounding is far
below any fault. `tests/test_crossings.py` trains a covering array of pairs; `tests/trials/crossings.py` draws triples.
"""

from __future__ import annotations

import copy
import json
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import combinations, product
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rpc_pipe.dependency import ConfigError, ScheduleError, WorkerFailure
from rpc_pipe.dependency.crossings import NOT_TOGETHER
from rpc_pipe.pipeline import Pipeline, Training
from rpc_pipe.planning.unequal import balanced

#: rows, positions and features of a batch; microbatches of a step; training steps
ROWS, POSITIONS, WIDTH, MICROBATCHES, STEPS = 8, 4, 8, 4, 4
#: blocks of the model: one for each stage of schedules with two stages on each of two workers
LAYERS = 4
#: rounding of sums in another order
CLOSE = 1e-9

#: dimension -> its values; the first one is the default of the product
DIMENSIONS: dict[str, tuple[str, ...]] = {
    "schedule": ("1f1b", "gpipe", "zb-h1", "interleaved", "zb-v", "dualpipev", "hanayo", "chimera", "pipedream-2bw"),
    "form": ("list", "whole", "function"),
    "tied": ("no", "weight", "alias"),
    "buffers": ("none", "norm", "deferred"),
    "replicas": ("1", "2"),
    "zero": ("0", "1"),
    "members": ("1", "fsdp", "fsdp-kept", "fsdp-microbatch", "function", "half"),
    "slices": ("1", "2"),
    "order": ("usual", "fixed", "ready"),
    "lengths": ("equal", "balanced"),
    "compile": ("no", "eager"),
    "recompute": ("none", "all"),
    "norm": ("none", "logged", "clipped"),
    "scaler": ("none", "on"),
    "average": ("none", "on"),
    "accumulate": ("1", "2"),
    "optimizer": ("sgd", "adamw"),
    "validation": ("usual", "yes"),
    "call": ("step", "train"),
    "evaluation": ("none", "between"),
    "restart": ("none", "same", "another"),
}
#: (dimension, value) -> the features in `NOT_TOGETHER` that it brings, which the first of them names in a message
FEATURES: dict[tuple[str, str], tuple[str, ...]] = {
    ("schedule", "pipedream-2bw"): ("asynchronous",),
    ("schedule", "chimera"): ("routes",),
    ("schedule", "dualpipev"): ("own splits",),
    ("tied", "weight"): ("shared weights",),
    ("buffers", "deferred"): ("deferred_batch_norm",),
    ("slices", "2"): ("slices",),
    ("recompute", "all"): ("recompute",),
    ("order", "ready"): ("order=ready",),
    ("accumulate", "2"): ("accumulate",),
    ("scaler", "on"): ("grad_scaler",),
    ("zero", "1"): ("zero",),
    ("validation", "yes"): ("post_validation",),
    ("norm", "none"): ("no norm",),
    **{("members", value): ("members",) for value in DIMENSIONS["members"][1:]},
}
#: values that need another one, or that layers refuse by their numbers
NEEDED = {
    (("zero", "1"), ("replicas", "1")),  # optimizer states are divided among replicas
    (("tied", "alias"), ("form", "list")),  # a list has one name for each layer
    (("buffers", "norm"), ("slices", "2")),  # means over whole sequences
    (("buffers", "deferred"), ("slices", "2")),
    # layers of a worker that share a parameter would be divided apart
    *((("tied", "weight"), ("members", value)) for value in DIMENSIONS["members"][1:]),
    # an owner's weights come when forwards of the next step have begun, which a whole model with buffers takes amiss
    (("zero", "1"), ("form", "whole"), ("call", "train"), ("evaluation", "between")),
    (("zero", "1"), ("form", "function"), ("call", "train"), ("evaluation", "between")),
}
DEFAULTS = {name: values[0] for name, values in DIMENSIONS.items()}
Case = Mapping[str, str]


class End(NamedTuple):
    """How a case ended: `same`, `refused` with the sentence, or `DIFFERENT` or `FAILED` with the place."""

    how: str
    detail: str = ""


class Block(nn.Module):
    """A residual block; `mixes`: with what earlier positions add up to, which is a state where sequences are sliced."""

    def __init__(self, norm: bool, mixes: bool) -> None:
        super().__init__()
        self.mixes = mixes
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH) if norm else None

    def forward(self, x: Tensor, state: Tensor | None = None) -> Any:
        if self.norm is not None:
            x = self.norm(x.flatten(0, 1)).view(x.shape)
        if not self.mixes:
            return x + self.down(torch.tanh(self.up(x)))
        sums = x.cumsum(1) if state is None else x.cumsum(1) + state
        return x + self.down(torch.tanh(self.up(sums))), sums[:, -1:]


def _called(block: nn.Module, x: Tensor) -> Tensor:
    found = block(x)
    return found[0] if isinstance(found, tuple) else found


class Layers(nn.Sequential):
    """The blocks as a list of layers is computed."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self:
            x = _called(block, x)
        return x


class Net(nn.Module):
    """The same blocks as a model whose forward calls them."""

    def __init__(self, blocks: list[Block], alias: bool) -> None:
        super().__init__()
        self.blocks, self.options = nn.ModuleList(blocks), {"scale": 1.0}
        if alias:  # as the encoder of a U-Net has
            self.first = nn.Sequential(*blocks[:2])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = _called(block, x)
        return x * self.options["scale"]


def made(case: Case, *, plain: bool = False) -> Any:
    """Return the model of a case as `Pipeline` takes it; `plain`: as one module."""

    def build() -> nn.Module:
        torch.manual_seed(0)
        blocks = [Block(case["buffers"] != "none", case["slices"] != "1").double() for _ in range(LAYERS)]
        if case["tied"] == "weight":
            blocks[-1].up.weight = blocks[0].up.weight
        is_whole = case["form"] != "list"
        return Net(blocks, alias=case["tied"] == "alias") if is_whole else (Layers if plain else nn.Sequential)(*blocks)

    return build if case["form"] == "function" and not plain else build()


def divide(block: nn.Module, mesh: Any) -> None:
    """Divide a block among members by its columns and rows."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def halve(block: nn.Module, mesh: Any) -> None:
    """Divide a block among members, of which each computes rows of its own, by FSDP2."""
    from torch.distributed.fsdp import fully_shard

    fully_shard(block, mesh=mesh)


halve.rows = True  # type: ignore[attr-defined]


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Return inputs and targets."""
    draw = torch.Generator().manual_seed(step)
    x, y = (torch.randn(ROWS, POSITIONS, WIDTH, generator=draw, dtype=torch.float64) for _ in "xy")
    return x, y


def trained_by(case: Case) -> Training:
    """Return the training of a case."""
    sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    return Training(
        optimizer=sgd if case["optimizer"] == "sgd" else partial(torch.optim.AdamW, lr=0.01),
        lr_scheduler=partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.7),
        max_grad_norm=0.05 if case["norm"] == "clipped" else None,
        log_grad_norm=case["norm"] == "logged",
        grad_scaler=torch.amp.GradScaler("cpu", init_scale=4.0) if case["scaler"] == "on" else None,
        ema_decay=0.5 if case["average"] == "on" else None,
        accumulate=int(case["accumulate"]),
        deferred_batch_norm=case["buffers"] == "deferred",
        post_validation=True if case["validation"] == "yes" else None,
    )


def cost(x: Tensor, *rest: Any) -> float:
    """Return the predicted time of a microbatch, which differs from one to the next; a step allows some ten trials."""
    return 0.05 + 0.05 * float(x.sum().abs())


def options(case: Case, *, another: bool = False) -> dict[str, Any]:
    """Return the arguments of `Pipeline`; `another`: of the pipeline that goes on in another cut."""
    replicas = int(case["replicas"])
    given: dict[str, Any] = {
        "schedule": "gpipe" if another else case["schedule"],
        "schedule_options": {"recompute": "all"} if case["recompute"] == "all" else None,
        "num_microbatches": MICROBATCHES,
        "training": trained_by(case),
        "stall_s": 30.0,
    }
    given |= {"replicas": replicas} if replicas > 1 else {}
    given |= {"zero": 1} if case["zero"] == "1" else {}
    given |= {"slices": int(case["slices"])} if case["slices"] != "1" else {}
    given |= {"order": case["order"]} if case["order"] != "usual" else {}
    given |= {"microbatch_order": "balanced", "microbatch_cost": cost} if case["lengths"] == "balanced" else {}
    given |= {"compile": {"backend": "eager"}} if case["compile"] == "eager" else {}
    if case["members"] != "1":
        shard = {"function": divide, "half": halve, "fsdp-microbatch": "fsdp"}.get(case["members"], case["members"])
        given |= {"members": 2, "shard": shard}
        given |= {"reduce": "microbatch"} if case["members"] == "fsdp-microbatch" else {}
    if "RANK" not in os.environ:
        given["num_workers"] = 2 * replicas
    return given


# --- by a pipeline


def piped(case: Case, folder: str) -> tuple[dict[str, Any], Mapping[str, Tensor], tuple[Any, Any]]:
    """Return what a pipeline came to, the weights it began with, and its specs at both ends; numbers are worker 0's."""
    found: dict[str, Any] = {"losses": [], "norms": [], "evaluated": []}
    pipe = Pipeline(made(case), nn.functional.mse_loss, example=batch(0), **options(case))
    try:
        initial = {name: tensor.clone() for name, tensor in (pipe.weights.state_dict() or {}).items()}
        spec, half = pipe.spec, STEPS // 2 if case["restart"] != "none" else STEPS
        _train(case, pipe, range(half), found)
        if case["restart"] != "none":
            pipe.checkpoints.save(folder)
            pipe.close()
            more = options(case, another=case["restart"] == "another")
            pipe = Pipeline(made(case), nn.functional.mse_loss, example=batch(0), **more)
            pipe.checkpoints.load(folder)
            _train(case, pipe, range(half, STEPS), found)
        found["weights"] = {k: v.clone() for k, v in (pipe.weights.state_dict() or {}).items()}
        if case["average"] == "on":
            with pipe.weights.averaged():
                found["average"] = {k: v.clone() for k, v in (pipe.weights.state_dict() or {}).items()}
    finally:
        pipe.close()
    return found, initial, (spec, pipe.spec)


def _train(case: Case, pipe: Pipeline, steps: range, found: dict[str, Any]) -> None:
    losses: Iterator[float]
    losses = pipe.train(map(batch, steps)) if case["call"] == "train" else (pipe.step(batch(n)) for n in steps)
    for loss in losses:
        found["losses"].append(loss)
        if case["norm"] != "none":
            found["norms"].append(pipe.grad_norm)
        if case["evaluation"] == "between":
            found["evaluated"].append(pipe.evaluate(batch(100)))


# --- in one process


def alone(case: Case, specs: tuple[Any, Any], initial: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return what one process comes to: a plain loop over microbatches, whose losses are means of equal parts."""
    model, spec = made(case, plain=True), specs[0]
    model.load_state_dict(initial, strict=False)
    parameters = dict(model.named_parameters())
    shared = {id(p): p for p in parameters.values()}
    # Each route and each member normalises by its microbatches, and has statistics of its own.
    planes = 1 if case["members"] in ("1", "function") else 2
    own = model if planes * spec.num_routes == 1 else None
    copies = [own or copy.deepcopy(model, dict(shared)) for _ in range(planes * spec.num_routes)]
    training, optimizer = trained_by(case), None
    assert training.optimizer is not None and training.lr_scheduler is not None
    optimizer = training.optimizer(list(parameters.values()))
    scheduler = training.lr_scheduler(optimizer)
    found: dict[str, Any] = {"losses": [], "norms": [], "evaluated": []}
    averages: dict[str, Tensor] = {}
    before: list[Tensor] | None = None
    seen: dict[str, list[Tensor]] = {}
    rows = ROWS // MICROBATCHES
    slices = len(spec.parallelism.slices)
    routes = [spec.route(m // planes * slices) for m in range(MICROBATCHES)]
    taken = [copies[m % planes * spec.num_routes + route] for m, route in enumerate(routes)]
    for step in range(STEPS):
        if case["restart"] != "none" and step == STEPS // 2:
            before = None
        newest = [p.detach().clone() for p in parameters.values()]
        if not spec.synchronous and case["call"] == "train" and before is not None:  # older by one update
            _put(parameters, before)
        hooks = _noting(copies, seen) if case["buffers"] == "deferred" else []
        total = 0.0
        x, y = batch(step)
        for m, number in enumerate(_order(case, specs[step >= STEPS // 2], x)):
            inside = slice(number * rows, (number + 1) * rows)
            loss = nn.functional.mse_loss(taken[m](x[inside]), y[inside]) / MICROBATCHES
            (loss / training.accumulate).backward()
            total += loss.item()
        for hook in hooks:
            hook.remove()
        _put(parameters, newest)
        before = newest
        found["losses"].append(total)
        if (step + 1) % training.accumulate == 0:
            norm = nn.utils.clip_grad_norm_(parameters.values(), training.max_grad_norm or 1e9)
            if case["norm"] != "none":
                found["norms"].append(norm.item())
            if seen:
                _settle(copies, seen)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            for name, p in parameters.items():  # as AveragedModel of torch, whose first update copies
                averages.setdefault(name, p.detach().clone()).lerp_(p.detach(), 1 - (training.ema_decay or 0))
        elif case["norm"] != "none":
            found["norms"].append(None)
        if case["evaluation"] == "between":
            x, y = batch(100)
            # Each member evaluates all microbatches, by the statistics of the first.
            first_plane = [copies[spec.route(m * slices)] for m in range(MICROBATCHES)]
            found["evaluated"].append(_evaluated(copies, first_plane, x, y, rows))
    found["weights"] = {**copies[0].state_dict()}
    if case["average"] == "on":
        found["average"] = {**found["weights"], **averages}
        first: dict[int, str] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            found["average"][name] = averages[first.setdefault(id(parameter), name)]
    return found


def _order(case: Case, spec: Any, x: Tensor) -> list[int]:
    """Return the order in which microbatches run."""
    if case["lengths"] == "equal":
        return list(range(MICROBATCHES))
    seconds = [cost(part) for part in x.split(ROWS // MICROBATCHES)]
    return balanced(spec.unsliced(), seconds, sum(seconds))


def _put(parameters: Mapping[str, Tensor], values: list[Tensor]) -> None:
    with torch.no_grad():
        for parameter, value in zip(parameters.values(), values, strict=True):
            parameter.copy_(value)


def _noting(copies: list[nn.Module], seen: dict[str, list[Tensor]]) -> list[Any]:
    """Have all inputs of batch norms of a step noted, and their statistics kept."""
    hooks = []
    for model in dict.fromkeys(copies):
        for name, module in model.named_modules():
            if isinstance(module, nn.BatchNorm1d):
                module.momentum = 0.0

                def note(_: nn.Module, given: tuple[Tensor, ...], name: str = name) -> None:
                    seen.setdefault(name, []).append(given[0].detach())

                hooks.append(module.register_forward_pre_hook(note))
    return hooks


def _settle(copies: list[nn.Module], seen: dict[str, list[Tensor]]) -> None:
    """Update statistics by the whole batch."""
    for model in dict.fromkeys(copies):
        for name, module in model.named_modules():
            if isinstance(module, nn.BatchNorm1d):
                whole = torch.cat(seen[name])
                assert module.running_mean is not None and module.running_var is not None
                module.running_mean.lerp_(whole.mean(0), 0.1)
                module.running_var.lerp_(whole.var(0), 0.1)
                module.num_batches_tracked.sub_(len(seen[name]) // len(dict.fromkeys(copies)) - 1)
    seen.clear()


def _evaluated(copies: list[nn.Module], taken: list[nn.Module], x: Tensor, y: Tensor, rows: int) -> float:
    with torch.no_grad():
        for model in copies:
            model.eval()
        parts = [(taken[m](x[m * rows : (m + 1) * rows]), y[m * rows : (m + 1) * rows]) for m in range(len(taken))]
        for model in copies:
            model.train()
        return sum(nn.functional.mse_loss(a, b).item() for a, b in parts) / len(parts)


# --- compared


def tried(case: Case) -> End:
    """Train a case by a pipeline and in one process, and compare; on workers other than the first `elsewhere`."""
    try:
        with tempfile.TemporaryDirectory() as folder:
            shared = os.environ.get("CROSSINGS", folder)  # of all processes of a job
            found, initial, specs = piped(case, os.path.join(shared, described(case).replace(" ", "-")))
    except (ConfigError, ScheduleError) as error:
        return End("refused", str(error).partition("\n")[0])
    except WorkerFailure as error:
        is_refusal = re.match(r"rpc_pipe[\w.]*\.(Config|Model|Batch)Error: ", error.summary)
        return End("refused" if is_refusal or not error.remote_traceback else "FAILED", error.summary)
    except Exception as error:
        return End("FAILED", f"{type(error).__name__}: {str(error)[:300]}")
    if os.environ.get("RANK", "0") != "0":
        return End("elsewhere")
    expected = alone(case, specs, initial)
    for name, values in expected.items():
        wrong = _differs(found[name], values)
        if wrong:
            return End("DIFFERENT", f"{name}{wrong}")
    return End("same")


def _differs(found: Any, expected: Any) -> str:
    if isinstance(expected, dict):
        if found.keys() != expected.keys():
            return f": names {sorted(found.keys() ^ expected.keys())}"
        return next((f" {k}{w}" for k in expected if (w := _differs(found[k], expected[k]))), "")
    if isinstance(expected, list):
        if len(found) != len(expected):
            return f": {len(found)} for {len(expected)}"
        pairs = enumerate(zip(found, expected, strict=True))
        return next((f"[{i}]{w}" for i, pair in pairs if (w := _differs(*pair))), "")
    if expected is None or found is None:
        return "" if found is expected else f": {found} for {expected}"
    a, b = torch.as_tensor(found, dtype=torch.float64), torch.as_tensor(expected, dtype=torch.float64)
    off = float((a - b).abs().max()) if a.shape == b.shape else float("inf")
    return "" if off <= CLOSE * max(1.0, float(b.abs().max())) else f": {off:.3g} off"


def excluded(case: Mapping[str, str]) -> bool:
    """Return whether a case, or a part of one, has a pair that is refused."""
    pairs = {*case.items()}
    features = {feature for pair in pairs for feature in FEATURES.get(pair, ())}
    refused = any({row.first, row.second} <= features for row in NOT_TOGETHER)
    return refused or any(pairs.issuperset(values) for values in NEEDED)


def covering() -> list[dict[str, str]]:
    """Return cases in which all pairs of values meet that are not refused, found greedily.

    `allpairspy` leaves pairs out where some are excluded (84 of them here).
    """
    each = [(name, value) for name, values in DIMENSIONS.items() for value in values]
    pairs = [(a, b) for a, b in combinations(each, 2) if a[0] != b[0] and not excluded({a[0]: a[1], b[0]: b[1]})]
    left, cases = dict.fromkeys(pairs), []
    while left:
        case = dict(next(iter(left)))
        for name in [name for name in DIMENSIONS if name not in case]:
            gains = {value: 0 for value in DIMENSIONS[name] if not excluded({**case, name: value})}
            for value, old in product(gains, list(case.items())):
                gains[value] += (old, (name, value)) in left or ((name, value), old) in left
            case[name] = max(gains, key=gains.__getitem__)
        case = {name: case[name] for name in DIMENSIONS}
        cases.append(case)
        for pair in combinations(case.items(), 2):
            left.pop(pair, None)
    return cases


def described(case: Case) -> str:
    """Return the values of a case that are not the default."""
    return " ".join(f"{k}={v}" for k, v in case.items() if v != DEFAULTS[k]) or "defaults"


def main() -> None:
    """Try the cases of a file as one of the processes of a job; worker 0 writes a line for each."""
    torch.set_num_threads(1)
    with open(sys.argv[1]) as file:
        cases = json.load(file)
    for case in cases:
        end = tried(case)
        if os.environ.get("RANK", "0") == "0":
            print(json.dumps([end.how, end.detail]), flush=True)
        if end.how not in ("same", "elsewhere", "refused", "DIFFERENT"):
            sys.exit(1)


if __name__ == "__main__":
    main()
