"""Tensor parallelism: linear layers divided among the members of a worker by a model's plan."""

import fnmatch
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ....dependency import ConfigError

#: parts that activation checkpoints, torch.compile and peft add to a path
_WRAPPERS = ("_checkpoint_wrapped_module", "_orig_mod", "base_layer", "original_module")
#: layers of a LoRA, and which styles of the adapted layer divide each
_DIVIDED = {"lora_A": "rowwise", "lora_B": "colwise"}


def divisible(module: nn.Module, name: str, model: nn.Module) -> dict[str, float]:
    """Return the bytes and layers of a layer or block that members would divide, as a profile has them."""
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
    """Return the style of a module, by its path without the parts that wrappers and adapters add.

    One of a LoRA's two layers is divided: where the adapted layer is, at its outputs or inputs.
    """
    parts = [part for part in path.split(".") if part not in _WRAPPERS]
    adapter = next((part for part in parts if part in _DIVIDED), None)
    path = ".".join(parts[: parts.index(adapter)] if adapter else parts)
    match = fnmatch.fnmatchcase
    style = next((s for each, s in plan.items() if match(path, each) or match(path, f"*.{each}")), None)
    return style if style is None or adapter is None or style.startswith(_DIVIDED[adapter]) else None


def divide_by_plan(mesh: Any, module: nn.Module, name: str, model: nn.Module) -> None:
    """Divide linear layers by columns or rows, by the plan of a Hugging Face model.

    Raises:
        ConfigError: there is no plan, it has a style that is not known, or it names no linear layer of the model.
    """
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    whole = partial(ColwiseParallel, output_layouts=Replicate())
    styles: dict[str, Callable[[], Any]] = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
    styles |= {"colwise_rep": whole, "colwise_gather_output": whole}
    styles["rowwise_split_input"] = partial(RowwiseParallel, input_layouts=Replicate())
    plan = _plan_of(model)
    if not plan:
        fix = "take fsdp, or in a script a function of (module, mesh), such as torch's parallelize_module"
        raise ConfigError(f"shard='tp': {type(model).__name__} has no tp_plan; {fix}")

    def summed(grad: Tensor) -> Tensor:
        total = grad.clone()
        torch.distributed.all_reduce(total, group=mesh.get_group())
        return total

    # Not each pattern: plans of Hugging Face name layers that some settings of a model leave out.
    if not any(_style_of(plan, path) for path, part in model.named_modules() if isinstance(part, nn.Linear)):
        names = f"the tp_plan of {type(model).__name__} names no linear layer of it, such as {next(iter(plan))!r}"
        raise ConfigError(f"shard='tp': {names}; correct the names")
    for path, part in list(module.named_modules(prefix=name)):
        style = _style_of(plan, path)
        if style == "replicated_with_grad_allreduce":  # it sees this member's heads alone
            for parameter in part.parameters():
                parameter.register_hook(summed)
        if style is not None and isinstance(getattr(part, "base_layer", None), nn.Linear):
            _refuse_adapter(part, path)
        if style is None or not isinstance(part, nn.Linear):
            continue
        if style not in styles:
            raise ConfigError(f"shard='tp': the plan wants {style} for {path}; known are {', '.join(styles)}")
        if style == "colwise" and (dim := getattr(model.get_submodule(path.rpartition(".")[0]), "head_dim", None)):
            heads = part.out_features // dim
            if heads % mesh.size():
                raise ConfigError(f"shard='tp' members={mesh.size()}: {path} has {heads} heads; take a divisor or fsdp")
        parallelize_module(part, mesh, styles[style]())


def _refuse_adapter(layer: nn.Module, path: str) -> None:
    """Refuse an adapted layer, unless two linear layers beside it are all that peft has added.

    Raises:
        ConfigError: an adapter holds another parameter.
    """
    for name, _ in layer.named_parameters():
        first, owner = name.partition(".")[0], layer.get_submodule(name.rpartition(".")[0])
        if first != "base_layer" and not (first in _DIVIDED and isinstance(owner, nn.Linear)):
            raise ConfigError(f"shard='tp' {path}.{name}: no plan divides this kind of adapter; take LoRA, or fsdp")
