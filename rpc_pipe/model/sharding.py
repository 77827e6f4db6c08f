"""How the members of a worker share a stage: by name, or by the user's function of (layer or block, mesh)."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..dependency import ConfigError, Order, Spec
from ..workers.compute.slices import Divide
from ..workers.compute.updating import Training

#: (a layer or block, the mesh of the members) -> nothing, or the module to use in its place
ShardFn = Callable[[nn.Module, Any], Any]
NAMES, REDUCES = ("fsdp", "tp"), ("step", "microbatch")


@dataclass(frozen=True)
class Sharing:
    """How many processes are one worker, and how they share its stages."""

    count: int = 1
    #: `fsdp`, `tp` or the user's function
    shard: str | ShardFn | None = None
    #: whether gradients are summed over members after each microbatch
    per_microbatch: bool = False

    @property
    def rows(self) -> bool:
        """Whether each member computes microbatches of its own; a function says so by an attribute `rows`."""
        return self.shard == "fsdp" or bool(getattr(self.shard, "rows", False))

    def order(self, asked: Order | None, usual: Order) -> Order:
        """Return the order of actions.

        Raises:
            ConfigError: members cannot run in the order asked for.
        """
        if self.count > 1 and asked == "ready":
            raise ConfigError(
                f'order="ready" members={self.count}: collectives of members must come in one order; leave order out'
            )
        return "fixed" if self.count > 1 else asked or usual

    def microbatches(self, count: int) -> int:
        """Return the number of microbatches of a plane.

        Raises:
            ConfigError: they cannot be divided among members.
        """
        if self.count > 1 and self.rows and count % self.count:
            raise ConfigError(
                f"num_microbatches={count} members={self.count}: each member takes as many; take a multiple"
            )
        return count // self.count if self.rows else count

    def refuse(self, spec: Spec, training: Training) -> None:
        """Refuse what members cannot do.

        Raises:
            ConfigError: a schedule or an option is of that kind.
        """
        if self.count == 1:
            return
        if not spec.takes_steps or not spec.synchronous:
            raise ConfigError(f"members={self.count}: members meet in one update a step; take a synchronous schedule")
        if len(spec.parallelism.slices) > 1:
            raise ConfigError(f"members={self.count} slices: not both; leave slices out")
        for name in ("deferred_batch_norm", "post_validation"):
            if getattr(training, name):
                raise ConfigError(f"members={self.count} {name}: not both; leave {name} out")

    def divide(self, mesh: Any) -> Divide:
        """Return the function that divides a layer or block among the members of a mesh."""
        if self.shard == "fsdp":
            from ..workers.compute.fsdp import divide

            return lambda module, name, model: divide(module, mesh)
        if self.shard == "tp":
            return partial(_by_plan, mesh)
        function = self.shard
        assert callable(function)
        return lambda module, name, model: function(module, mesh)


def settle_sharing(members: int, shard: str | ShardFn | None, reduce: str, microbatch_order: str = "given") -> Sharing:
    """Return how members share stages.

    Raises:
        ConfigError: an option is impossible.
    """
    if not isinstance(members, int) or isinstance(members, bool) or members < 1:
        raise ConfigError(f"members={members!r}: must be a whole number of at least 1")
    if reduce not in REDUCES:
        raise ConfigError(f"reduce={reduce!r}: must be {' or '.join(REDUCES)}")
    if shard is not None and not callable(shard) and shard not in NAMES:
        raise ConfigError(f"shard={shard!r}: must be {', '.join(NAMES)} or a function of (module, mesh)")
    if members == 1:
        return Sharing()  # the same script runs on one process a worker
    if shard is None:
        raise ConfigError(f"members={members}: needs shard=, such as 'fsdp', 'tp' or a function of (module, mesh)")
    if microbatch_order != "given":
        raise ConfigError(
            f"members={members} microbatch_order={microbatch_order}: not both; leave microbatch_order out"
        )
    return Sharing(members, shard, reduce == "microbatch")


def divisible(module: nn.Module, name: str, model: nn.Module) -> dict[str, float]:
    """Return what members would divide of a layer or block, as a profile has it."""
    found: dict[str, float] = {"fsdp": sum(p.nbytes for p in module.parameters())}
    if not (plan := _plan_of(model)):
        return found
    named = ((part, _style_of(plan, path)) for path, part in module.named_modules(prefix=name))
    linear = [(part, style) for part, style in named if style and isinstance(part, nn.Linear)]
    found["tp"] = sum(part.weight.nbytes for part, _ in linear)
    found["outputs"], found["inputs"] = (sum(s != way for _, s in linear) for way in ("colwise", "rowwise"))
    return found


def _plan_of(model: nn.Module) -> Any:
    return getattr(model, "_tp_plan", None) or getattr(model, "tp_plan", None)


def _style_of(plan: Any, path: str) -> str | None:
    return next((style for pattern, style in plan.items() if fnmatch.fnmatchcase(path, pattern)), None)


def _by_plan(mesh: Any, module: nn.Module, name: str, model: nn.Module) -> None:
    """Divide linear layers by columns or rows, as the plan of a Hugging Face model says.

    Raises:
        ConfigError: there is no plan, it has a style that is not known, or it names no linear layer of the model.
    """
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    styles: dict[str, Callable[[], Any]] = {
        "colwise": ColwiseParallel,
        "rowwise": RowwiseParallel,
        "colwise_rep": lambda: ColwiseParallel(output_layouts=Replicate()),
        "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
    }
    plan = _plan_of(model)
    if not plan:
        raise ConfigError(
            f"shard='tp': {type(model).__name__} has no tp_plan; pass a function of (module, mesh), which may call "
            "torch's parallelize_module"
        )

    def summed(grad: Tensor) -> Tensor:
        total = grad.clone()
        torch.distributed.all_reduce(total, group=mesh.get_group())
        return total

    # Not each pattern: plans of Hugging Face name layers that some settings of a model leave out.
    if not any(_style_of(plan, path) for path, part in model.named_modules() if isinstance(part, nn.Linear)):
        raise ConfigError(
            f"shard='tp': the tp_plan of {type(model).__name__} names no linear layer of it, such as "
            f"{next(iter(plan))!r}; correct the names"
        )
    for path, part in list(module.named_modules(prefix=name)):
        style = _style_of(plan, path)
        if style == "replicated_with_grad_allreduce":  # it sees this member's heads alone
            for parameter in part.parameters():
                parameter.register_hook(summed)
        if style is None or not isinstance(part, nn.Linear):
            continue
        if style not in styles:
            raise ConfigError(f"shard='tp': the plan wants {style} for {path}; known are {', '.join(styles)}")
        parallelize_module(part, mesh, styles[style]())
