"""A model trained by a pipeline and, as it is, by plain PyTorch in one process: compared bit for bit.

Where the pipeline trains on slices of sequences, the reference trains on whole ones, and sums in another order.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..demo.gpt import gpt_layers, next_byte_loss
from ..demo.settings import GPTConfig
from ..dependency import Action, Spec
from ..dependency.declared import FSDP
from ..model.batches.microbatches import SplitBatch, rows_in
from ..model.observe.trees import mapped
from ..model.observed_model import without_caches
from ..model.partition import LayerPartition
from ..model.user_model import UserModel, load_user_model, rows_of
from ..pipeline import Pipeline, Training
from ..workers.actor import WorkerActor
from ..workers.compute.modules.randomness import Randomness, seed_process
from ..workers.compute.modules.torch_internals import OperatorMode
from ..workers.compute.parts.tensor_parallel import divisible
from ..workers.compute.sequences.sequence import state_dropped
from ..workers.compute.sequences.slices import has_own_state
from ..workers.compute.shard import Shard
from ..workers.hooks import Listener
from ..workers.transport.payload import Tree, tensors_of
from .reference import Reference, Replica, give, state_of
from .verdict import Compared, summed_by_stages, tell
from .verify_options import BUILT_IN, CONTEXT, VerifyOptions

Layers = Sequence[Callable[[], nn.Module]]
Batch = tuple[Tensor, Tensor]


Loss = Callable[[Tensor, Tensor], Tensor]
#: makes a batch of a number of rows
Rows = Callable[[torch.Generator, int], Batch]


def built_in(name: str, dropout: float, num_stages: int) -> tuple[Layers, Loss, Rows]:
    """Return the layers of `gpt`, `conv` or `mlp`, enough for `num_stages`, the loss, and the maker of data."""
    if name == "gpt":
        config = GPTConfig(width=32, depth=max(4, num_stages - 2), heads=2, context=CONTEXT, dropout=dropout)
        return gpt_layers(config), next_byte_loss, _bytes
    if name == "conv":
        return _conv_layers(max(4, num_stages - 1), dropout), functional.cross_entropy, _images
    return _mlp_layers(max(4, num_stages), dropout), functional.mse_loss, _vectors


def _bytes(generator: torch.Generator, rows: int) -> Batch:
    samples = torch.randint(256, (rows, CONTEXT + 1), generator=generator)
    return samples[:, :-1].contiguous(), samples[:, 1:].contiguous()


def _images(generator: torch.Generator, rows: int) -> Batch:
    return torch.randn(rows, 3, 8, 8, generator=generator), torch.randint(10, (rows,), generator=generator)


def _vectors(generator: torch.Generator, rows: int) -> Batch:
    return torch.randn(rows, 16, generator=generator), torch.randn(rows, 16, generator=generator)


def _conv_layers(blocks: int, dropout: float) -> Layers:
    def block(channels_in: int, stride: int) -> nn.Module:
        conv = nn.Conv2d(channels_in, 8, 3, stride=stride, padding=1)
        return nn.Sequential(conv, nn.GroupNorm(2, 8), nn.ReLU(), nn.Dropout2d(dropout))

    def head() -> nn.Module:
        return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10))

    return [partial(block, 3, 2), *(partial(block, 8, 1) for _ in range(blocks - 1)), head]


def _mlp_layers(count: int, dropout: float) -> Layers:
    def layer() -> nn.Module:
        return nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Dropout(dropout))

    return [layer] * (count - 1) + [partial(nn.Linear, 16, 16)]


_built_in_optimizer = partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1)
# Linear in the gradients, so that rounding stays rounding; the momentum shows the gradients themselves.
_optimizer = partial(torch.optim.SGD, lr=1e-3, momentum=0.9)
#: roundings of a norm that is added up over members: each part's root and square, and the sum
_OF_NORM = 3


class Floats(OperatorMode):
    """Records the float types that the reference computes in, such as float32 for norms."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: set[torch.dtype] = set()

    @property
    def precision(self) -> float:
        """The precision of the coarsest type that was seen."""
        return max(torch.finfo(dtype).eps for dtype in self._seen)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = result if isinstance(result, (Tensor, tuple, list)) else ()
        self._seen |= {tensor.dtype for tensor in tensors_of(given) if tensor.is_floating_point() and tensor.dim()}
        return result


class Held(Listener):
    """Records a worker's real peaks: the number of slices at once, and the bytes that they carry to later slices.

    Attributes:
        most: (slices, bytes).
    """

    def __init__(self, shards: Iterable[Shard]) -> None:
        self._shards = [*shards]
        self.most = (0, 0)

    def action_started(self, step: int, action: Action) -> None:
        held = sum(shard.num_held for shard in self._shards)
        kept = sum(cut.num_bytes for shard in self._shards if (cut := shard.slices))
        self.most = max(self.most[0], held), max(self.most[1], kept)


def prove(options: VerifyOptions) -> None:
    """Runs in every worker (or once, over the in-process transport): train, compare, report the verdict."""
    torch.set_num_threads(options.threads)
    ours, count, slices = options.model in BUILT_IN, options.members, options.slices
    made, batches = _load(options)
    mine = [mapped(batch, torch.clone) for batch in batches]
    divides = count > 1 and (options.shard not in FSDP or options.max_grad_norm is not None)
    optimizer = _built_in_optimizer if ours and slices is None and not divides else _optimizer
    begin, begin_cpu = time.perf_counter(), time.process_time()
    asked: dict[str, Any] = {"max_grad_norm": options.max_grad_norm, "deferred_batch_norm": options.deferred_batch_norm}
    pipe = Pipeline(
        made.model, made.loss_fn, training=Training(optimizer, **asked),
        **{**options.for_pipeline(), "example": made.batch}
    )  # fmt: skip
    cut = {"cut_s": time.perf_counter() - begin, "cut_cpu_s": time.process_time() - begin_cpu}
    initial = pipe.weights.state_dict()
    losses, norms = [], []
    held = {actor.worker: Held(actor.shards.values()) for actor in pipe.actors}
    if slices is not None:
        pipe.listen(held.__getitem__)
    for loss in map(pipe.step, batches) if pipe.spec.synchronous else pipe.train(batches):
        losses.append(loss)
        norms += [] if pipe.grad_norm is None else [pipe.grad_norm]
    state = pipe.weights.state_dict()
    kept, copies = pipe.gather("optimizer", _optimizer_state), pipe.gather("routes", _routes)
    most = pipe.gather("held", lambda actor: held[actor.worker].most)
    members = pipe.actors[0].members
    unlike = pipe.gather("unlike", lambda actor: 0 if members is None else members.unlike(_all(actor)))
    if initial is not None and state is not None and kept is not None and copies is not None:
        if members is not None and members.rows:
            asked |= {"members": members.shares, "per_microbatch": members.per_microbatch}
        reference = _reference(options, pipe, optimizer, initial, asked)
        with nullcontext() if slices is None else Floats() as floats:
            expected_losses = list(reference.train(mine))
        roundings = count * _roundings(options, pipe, reference.replicas[0].module) if divides else None
        compared = Compared(0.0 if floats is None else floats.precision, roundings)
        compared.numbers("loss", losses, expected_losses)
        compared.numbers("norm", norms, reference.norms)
        compared.tensors(state, reference.state_dict())
        compared.tensors({n: t for part in kept for n, t in part.items()}, reference.optimizer_state(), " of optimizer")
        for route, tensors in (pair for worker in copies for pair in worker):
            expected = reference.state_dict(route)
            compared.tensors(tensors, {name: expected[name] for name in tensors}, f" on route {route}")
        about = {**cut, "blocks": len(pipe.partition.block_names), "split": [len(r) for r in pipe.partition.ranges]}
        if slices and most is not None:
            slices_held, kept_bytes = map(list, zip(*most, strict=True))
            bounds = [pipe.spec.peak_activations(worker) or None for worker in range(pipe.spec.num_workers)]
            about |= {"held_slices": slices_held, "bound": bounds, "kept_bytes": kept_bytes}
            beyond = [max(0, n - (bound or n)) for n, bound in zip(slices_held, bounds, strict=True)]
            compared.numbers("slices held beyond the bound", beyond, [0.0] * len(beyond))
        by_slices = f"each sequence is computed in slices ({slices}), and what is summed over tokens slice by slice"
        because = summed_by_stages(list(pipe.partition.shared)) if slices is None else by_slices
        if count > 1 and unlike is not None:
            compared.numbers("members that differ", list(map(float, unlike)), [0.0] * len(unlike))
            about |= {"members_alike": not any(unlike), "bound": compared.bound if divides else 0.0}
        parts = f"{count} members add up parts of a layer's output, or of the norm of gradients, which allows"
        because = f"{parts} {compared.bound:.1e}" if divides else because
        about |= {"loss": losses[-1], **_counts(mine[0], options), "slices": slices or "1"}
        tell(compared, options, about, exactly=ours and not slices and not divides, because=because)
    pipe.barrier()


def _counts(batch: Tree, options: VerifyOptions) -> dict[str, int]:
    """Return the rows and microbatches of a batch."""
    if isinstance(batch, SplitBatch):
        return {"rows": sum(map(rows_in, batch)), "microbatches": len(batch)}
    return {"rows": rows_of(batch), "microbatches": min(rows_of(batch), options.num_microbatches)}


def seeded(said: str, seed: int) -> UserModel:
    """Load the model that `path/to/file.py:make` names; all workers draw the same."""
    torch.manual_seed(seed)  # devices' generators too
    seed_process(seed)
    return load_user_model(said)


def _load(options: VerifyOptions, spec: Spec | None = None) -> tuple[UserModel, list[Tree]]:
    """Return the model, made anew, and the batches of all steps."""
    if options.model not in BUILT_IN:
        made = seeded(options.model, options.seed)
        return made, [made.batch] * options.steps
    # The number of stages is needed for the size of the model, before there is a pipeline.
    spec = spec or options.spec(10**9 if options.split is None else sum(options.split))
    dropout = options.dropout if spec.num_whole == spec.num_microbatches else 0.0  # slices draw other numbers
    layers, loss_fn, rows = built_in(options.model, dropout, spec.num_stages)
    generator = torch.Generator().manual_seed(options.seed)
    count, lengths = options.batch_rows, options.lengths

    def ragged() -> SplitBatch:
        cuts = [lambda tensor, length=length: tensor[:, :length].contiguous() for length in lengths or ()]
        return SplitBatch(mapped(rows(generator, count), cut) for cut in cuts)

    batches: list[Tree] = [rows(generator, count) if lengths is None else ragged() for _ in range(options.steps)]
    return UserModel(list(layers), batches[0], loss_fn), batches


def _reference(
    options: VerifyOptions, pipe: Pipeline, optimizer: Any, initial: Mapping[str, Tensor], asked: Mapping[str, Any]
) -> Reference:
    """Return the reference: the user's module and loss function, made once more for each route.

    The reference is not cut, copied or wrapped, so that a loss function reads attributes that the blocks have set.
    """
    randomness, replicas = Randomness(options.seed, pipe.actors[0].backend.device), []
    for _ in range(pipe.spec.num_routes):
        made = _load(options, pipe.spec)[0]
        module = _whole(made, options.seed, pipe.spec.num_whole < pipe.spec.num_microbatches)
        give(module, initial)
        replicas.append(Replica(module, made.loss_fn or pipe.partition.loss_fn))  # type: ignore[arg-type]
    ordering = pipe._session.ordering
    return Reference(pipe.spec, replicas, pipe.partition, optimizer, randomness, ordering=ordering, **asked)


def layers_of(made: UserModel, seed: int, sliced: bool = False) -> list[nn.Module]:
    """Return the layers of a list as one process runs them."""
    layers = [layer for _, layer in LayerPartition(made.layers(), 1).build(0, Randomness(seed))]
    return [state_dropped(layer) if sliced or has_own_state(layer) else layer for layer in layers]


def _whole(made: UserModel, seed: int, sliced: bool) -> nn.Module:
    """Return the model that one process can run."""
    if made.is_layers:
        return nn.Sequential(*layers_of(made, seed, sliced))
    model: nn.Module = made.model if isinstance(made.model, nn.Module) else made.model()  # type: ignore
    without_caches(model)  # which copy keys and values: their gradients would be computed in another memory layout
    return model


def _roundings(options: VerifyOptions, pipe: Pipeline, module: nn.Module) -> int:
    """Return how often a member rounds a number otherwise than one process: once for each divided sum."""
    if options.shard in FSDP:
        counts = []
    elif isinstance(pipe.partition, LayerPartition):
        counts = [divisible(layer, "", layer) for layer in module.children()]
    else:
        paths = dict.fromkeys(pipe.partition.block_names)
        counts = [divisible(module.get_submodule(path), path, module) for path in paths]
    sums = sum(int(each.get("outputs", 0) + each.get("inputs", 0)) for each in counts)
    sums += 0 if options.max_grad_norm is None else _OF_NORM
    return options.steps * sums


def _all(actor: WorkerActor) -> dict[str, Tensor]:
    return {name: tensor for shard in actor.shards.values() for name, tensor in shard.named_parameters()}


def _optimizer_state(actor: WorkerActor) -> dict[str, Tensor]:
    """Return the tensors of optimizers on the first route, or of owners, by parameter and key."""
    shards = (s for (_, route), s in actor.shards.items() if route == 0 or s.updating.owned is not None)
    return actor.whole(state_of((shard.optimizer, shard.named_parameters()) for shard in shards))


def _routes(actor: WorkerActor) -> list[tuple[int, dict[str, Tensor]]]:
    """Return the parts missing from the state of the model: the shards of the other routes."""
    others = ((route, shard.state_dict()) for (_, route), shard in actor.shards.items() if route > 0)
    return [(route, actor.whole(state)) for route, state in others]
