"""The profile of a user's model: times and bytes by block, measured for microbatches of several sizes.

A list of layers is measured layer by layer. Any other module is cut where its forward calls its blocks
(`model.observed_model`), and each block is measured as a separate stage. The time of a stage besides its block (masks,
positions) is the time of all these stages beyond the whole model, divided by their number.
"""

import copy
import hashlib
import traceback
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import combinations, pairwise
from statistics import fmean, median
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...dependency import B, ConfigError, F, G, I, Kind, PipeError, R, U, W
from ...model.batches.microbatches import SplitBatch
from ...model.batches.sequences import length_of
from ...model.partition import LayerLike
from ...model.user_model import UserModel, load_user_model, resize_batch, resized, rows_of
from ...system.allocator import keep_freed_memory
from ...workers.compute.parts.tensor_parallel import divisible
from ...workers.compute.sequences.sequence import state_dropped
from ...workers.compute.updating import OptimizerFactory
from ...workers.transport.payload import Tree, map_tensors, tensors_of
from ..profile import THOUSAND, LayerCost, LengthTerms, Profile, Tie

from .block_timing import (  # isort: skip
    Barrier, costs_of, estimated, layer_blocks, operations_a_ms, optimizer_ratio, scatter, time_blocks,
)  # fmt: skip
from .timed_block import Forward, TimedBlock

__all__ = ["OPTIMIZERS", "UserModel", "load_user_model", "profile_model", "refuse_split", "rows_of", "signature"]

#: called with the share of the blocks that are measured, 0 to 1, and a note on the present measurement
Progress = Callable[[float, str], None]
#: costs by block, time of a stage besides its block by kind, parameters that blocks share, scatter of times
_Measured = tuple[list[LayerCost], dict[Kind, float], tuple[Tie, ...], float]
#: the runtime's time for an action, in milliseconds
RUNTIME_MS = 0.15


class _MeasuredModel(NamedTuple):
    """A model with the microbatch to measure it on; arguments as of `profile_model`."""

    user_model: UserModel
    batch: Tree
    device: str
    optimizer: OptimizerFactory
    repeats: int
    tell: Progress
    at_least: int


OPTIMIZERS: dict[str, OptimizerFactory] = {
    "adamw": partial(torch.optim.AdamW, lr=1e-4),
    "sgd": partial(torch.optim.SGD, lr=1e-2),
    "momentum": partial(torch.optim.SGD, lr=1e-2, momentum=0.9),
}


def signature(user_model: UserModel, *more: Any) -> str:
    """Return a hash of the model's structure, of its trained parameters, of its batch's shapes, and of `more`."""
    parts = [_name(user_model)]
    for layer in user_model.layers() if user_model.is_layers else [user_model.model]:
        if isinstance(layer, nn.Module):
            parts += [f"{name}{tuple(p.shape)}{p.dtype}{p.requires_grad}" for name, p in layer.named_parameters()]
            parts += [f"{type(part).__name__}{_settings_of(part)}" for part in layer.modules()]
        else:
            parts.append(_function_name(layer))
    parts += [f"{tuple(t.shape)}{t.dtype}" for t in tensors_of(user_model.batch)]
    return hashlib.sha256("|".join([*parts, *map(str, more)]).encode()).hexdigest()[:16]


def _settings_of(module: nn.Module) -> list[tuple[str, object]]:
    """Return the plain attributes of a module: strides, heads, probabilities."""
    plain = {name: value if isinstance(value, tuple) else (value,) for name, value in vars(module).items()}
    return [(name, value) for name, value in plain.items() if all(isinstance(v, (int, float, str)) for v in value)]


def _function_name(thing: Any) -> str:
    """Return a name of a function that makes a model, without memory addresses."""
    if isinstance(thing, partial):
        return f"{_function_name(thing.func)}{thing.args}{thing.keywords}"
    return getattr(thing, "__qualname__", type(thing).__name__)


def _name(user_model: UserModel) -> str:
    model = user_model.model
    return type(model).__name__ if isinstance(model, nn.Module) or user_model.is_layers else _function_name(model)


def profile_model(
    user_model: UserModel,
    rows: Sequence[int],
    *,
    device: str = "cpu",
    optimizer: str = "adamw",
    repeats: int = 5,
    estimate: bool = False,
    at_least: int = 1,
    tell: Progress = lambda share, note: None,
    barrier: Barrier = lambda: None,
) -> Profile:
    """Measure a model for microbatches of each number of rows.

    Args:
        estimate: do not run the model, but count its operations on the meta device and divide by the measured speed of
            a matrix product.
        at_least: number of blocks wanted; if the model has fewer, parts of blocks count as blocks.
        barrier: waits for the other workers that measure the same model.

    Raises:
        ConfigError: the model cannot be cut or does not fit into memory, or its loss cannot be computed.
    """
    measured, around = dict[int, list[LayerCost]](), list[Mapping[Kind, float]]()
    ties, apart, where = tuple[Tie, ...](), list[float](), torch.device(device)
    if where.type != "cpu" and where.index is not None:
        torch.accelerator.set_device_index(where)  # memory statistics and synchronize are of the current device
    if where.type == "cpu":
        keep_freed_memory()  # as workers do
    for number, count in enumerate(sorted(set(rows))):
        batch = resize_batch(user_model.batch, count)

        def advance(share: float, note: str, number: int = number, count: int = count) -> None:
            tell((number + share) / len(set(rows)), f"{note}, {count} rows a microbatch")

        task = _MeasuredModel(user_model, batch, device, OPTIMIZERS[optimizer], repeats, advance, at_least)
        with _named_errors(user_model):
            if estimate:
                measured[count] = _estimate(task)
                continue
            measured[count], beside, ties, scattered = _measure(task, barrier)
            around, apart = [*around, beside], [*apart, scattered]
    measured = _with_one_update(measured)
    per_stage = {kind: median(found[kind] for found in around) if around else 0.0 for kind in (F, B, I, W, R)}
    if around:
        measured = {count: [_without(cost, per_stage) for cost in costs] for count, costs in measured.items()}
    if user_model.is_layers:  # a parameter that layers share is one, so these must be in one stage
        held = [each.parameters() if isinstance(each, nn.Module) else () for each in user_model.layers()]
        own = [{id(parameter): parameter for parameter in parameters} for parameters in held]
        ties = _ties(own, next(iter(measured.values())), together=True)
    whole = {kind: took + RUNTIME_MS for kind, took in per_stage.items()}
    about = _name(user_model), signature(user_model, device, optimizer), device, rows_of(user_model.batch)
    return Profile(measured, whole, ties, *about, scatter=fmean(apart) if apart else 0.0)


def refuse_split(user_model: UserModel, said: str) -> None:
    """Refuse a batch that is split already.

    Raises:
        ConfigError: it is.
    """
    if isinstance(user_model.batch, SplitBatch):
        raise ConfigError(f"{said}: its batch is a SplitBatch; return one of its microbatches to be measured")


def _with_one_update(measured: Mapping[int, Sequence[LayerCost]]) -> dict[int, list[LayerCost]]:
    """Return the costs with one time of each block's update, which does not depend on the rows."""
    blocks = []
    for costs in zip(*measured.values(), strict=True):
        once = {kind: median(cost.times[kind] for cost in costs) for kind in (U, G)}
        blocks.append([replace(cost, times={**cost.times, **once}) for cost in costs])
    return {rows: [block[number] for block in blocks] for number, rows in enumerate(measured)}


@contextmanager
def _named_errors(user_model: UserModel) -> Iterator[None]:
    """Turn an error of the model on its example batch into one that names the model.

    Raises:
        ConfigError: instead of that error.
    """
    try:
        yield
    except PipeError:
        raise
    except torch.OutOfMemoryError as error:
        raise ConfigError(f"model {_name(user_model)}: does not fit into memory; --estimate needs none") from error
    except Exception as error:
        what = ", ".join(line.strip() for line in traceback.format_exception_only(error))
        raise ConfigError(f"model {_name(user_model)}: cannot be measured on its batch: {what}") from error


class _Blocks(NamedTuple):
    """The blocks of a model, made one by one; each has to run before the next is made."""

    number: int
    blocks: Iterator[TimedBlock]
    #: makes the whole model one block; None: it is a list of layers, around which there is nothing
    whole: Callable[[], TimedBlock] | None = None


def _measure(task: _MeasuredModel, barrier: Barrier) -> _Measured:
    count, made, make_whole = _blocks_of(task)
    total = (1 + task.repeats) * (count + (make_whole is not None))
    blocks: list[TimedBlock] = []
    for block in made:
        block.run()
        blocks.append(block)
        task.tell(len(blocks) / total, f"{count} blocks")
    whole = [] if make_whole is None else [make_whole()]
    for each in whole:
        each.run()
    first = count + len(whole)
    time_blocks([*blocks, *whole], task.repeats, lambda done: task.tell((first + done) / total, f"{count} blocks"))
    costs = costs_of(blocks, task.optimizer, task.repeats, barrier)
    around = _around(costs, whole[0].times if whole else None)
    return costs, around, _ties([dict(b.named) for b in blocks], costs), scatter(blocks)


def _estimate(task: _MeasuredModel) -> list[LayerCost]:
    """Return the estimated costs of all blocks, holding one at a time."""
    speed, state = operations_a_ms(task.device), optimizer_ratio(task.optimizer)
    return [estimated(block, speed, state) for block in _blocks_of(task, runs=False).blocks]


def _blocks_of(task: _MeasuredModel, *, runs: bool = True) -> _Blocks:
    """Return the blocks of a model; `runs`: to be run on the device, else to be estimated without numbers."""
    user_model = task.user_model
    device = task.device if runs else "meta" if user_model.is_layers else "cpu"
    batch = map_tensors(task.batch, lambda tensor: tensor.to(device))
    if user_model.is_layers:
        inputs, target = user_model.pair(batch)
        layers = user_model.layers()

        def make(layer: LayerLike) -> nn.Module:
            with nullcontext() if runs else torch.device(device):
                made = layer if isinstance(layer, nn.Module) else layer()
            return state_dropped(made.to(device)) if runs else copy.deepcopy(made).to(device)

        return _Blocks(len(layers), layer_blocks(layers, inputs, target, user_model.loss_fn, make))
    args, kwargs = user_model.call(batch)
    observed = user_model.observe(args, kwargs, task.at_least)
    count = observed.num_blocks

    def block(i: int, cut: Sequence[range], payload: Sequence[Tensor]) -> TimedBlock:
        stage = observed.build(i, cut, device, initialise=runs)
        run = _stage_forward(user_model, stage, payload, args, kwargs, batch, last=i == len(cut) - 1)
        found = TimedBlock(run, list(stage.named_parameters()), observed.blocks[i].name, payload)
        path = observed.blocks[i].path
        found.divided = divisible(stage.module.get_submodule(path), path, stage.module)
        return found

    def one_by_one() -> Iterator[TimedBlock]:
        payload: Any = ()
        for i in range(count):
            yield (made := block(i, [range(at, at + 1) for at in range(count)], payload))
            payload = made.output

    return _Blocks(count, one_by_one(), lambda: block(0, [range(count)], ()))


def _around(costs: Sequence[LayerCost], whole: Mapping[Kind, float] | None) -> dict[Kind, float]:
    """Return the time of each kind that a stage takes besides its blocks.

    The whole model, as a first stage, does all its backward in W, so its I and W are not comparable. Functions around
    blocks have no weights, so their backward is counted as part of I.
    """
    forward = back = 0.0
    if whole is not None and len(costs) > 1:
        took = {kind: [cost.times[kind] for cost in costs] for kind in (F, B)}
        forward, back = (min(max(0.0, (sum(t) - whole[k]) / (len(t) - 1)), *t) for k, t in took.items())
    return {F: forward, R: forward, B: back, I: back, W: 0.0}


def _without(cost: LayerCost, per_stage: Mapping[Kind, float]) -> LayerCost:
    """Return the cost of a block without its stage's other work."""
    return replace(cost, times={kind: max(0.0, took - per_stage.get(kind, 0)) for kind, took in cost.times.items()})


def _ties(
    parameters: Sequence[Mapping[Any, nn.Parameter]], costs: Sequence[LayerCost], *, together: bool = False
) -> tuple[Tie, ...]:
    """Return the ties of blocks that share parameters.

    Args:
        parameters: of each block; shared parameters have the same key.
    """
    holders: dict[Hashable, list[int]] = {}
    for i, own in enumerate(parameters):
        for key in own:
            holders.setdefault(key, []).append(i)
    found: dict[tuple[int, int], tuple[float, float, float]] = {}
    for key, numbers in holders.items():
        parameter, size = parameters[numbers[0]][key], costs[numbers[0]].size
        state, held = size.optimizer / size.weights if size.weights else 0, parameter.nbytes
        for pair in pairwise(numbers):
            weights, gradients, optimizer = found.get(pair, (0, 0, 0))
            found[pair] = weights + held, gradients + held * parameter.requires_grad, optimizer + held * state
    return tuple(Tie(*pair, *sizes, together) for pair, sizes in found.items())


def _stage_forward(
    user_model: UserModel, stage: Any, payload: Sequence[Tensor], args: Any, kwargs: Any, batch: Tree, *, last: bool
) -> Forward:
    def forward() -> tuple[list[Tensor], Tree, list[Tensor]]:
        leaves = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in payload]
        output = stage.run(leaves, args, kwargs)
        differentiable = [tensor for tensor in leaves if tensor.requires_grad]
        if not last:
            return differentiable, output, [tensor for tensor in output if tensor.requires_grad]
        return differentiable, (), [user_model.loss(output, batch)]

    return forward


def times_by_length(user_model: UserModel, rows: int, lengths: Sequence[int], **settings: Any) -> dict[str, Any]:
    """Return the fields of a profile with each block's terms, measured with `rows` rows of several lengths.

    Args:
        lengths: three at least; empty: a quarter, a half and all of the batch's.
        settings: of `profile_model`.

    Raises:
        ConfigError: the model, or its batch, has no sequences, or cannot be measured.
    """
    measured: list[Sequence[LayerCost]] = []
    usual = length_of(user_model.batch)
    lengths = lengths or (usual // 4, usual // 2, usual)
    for length in lengths:
        batch = resized(user_model.batch, usual, length, dim=1)
        measured.append(profile_model(replace(user_model, batch=batch), [rows], **settings).measured[rows])
    points = [(1.0, rows * length / THOUSAND, rows * length**2 / THOUSAND**2) for length in lengths]
    found = []
    for costs in zip(*measured, strict=True):
        by_kind = {kind: fitted(points, [cost.times[kind] for cost in costs]) for kind in (F, B, I, W, R)}
        found.append(LengthTerms(*({kind: terms[at] for kind, terms in by_kind.items()} for at in range(3))))
    return {"by_length": tuple(found), "length": usual}


def fitted(points: Sequence[Sequence[float]], times: Sequence[float]) -> list[float]:
    """Return the factors of three terms that fit times: the least squares, none below 0."""
    wanted = torch.tensor(times, dtype=torch.float64)[:, None]
    found: list[tuple[float, list[float]]] = []
    for some in (some for count in (1, 2, 3) for some in combinations(range(3), count)):
        terms = torch.tensor(points, dtype=torch.float64)[:, some]
        solved = torch.linalg.lstsq(terms, wanted).solution
        if bool((solved >= 0).all()):
            known = dict(zip(some, solved.flatten().tolist(), strict=True))
            factors = [known.get(term, 0.0) for term in range(3)]
            found.append((float(((terms @ solved - wanted) ** 2).sum()), factors))
    return min(found)[1]
