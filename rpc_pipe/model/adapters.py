"""Adapters that peft has put into a model: which tensors belong to each, and how peft calls them in a file."""

from __future__ import annotations

import copy
import sys
from typing import Any, NamedTuple

from torch import nn

from ..dependency import ModelError


class Adapter(NamedTuple):
    """One adapter of a model."""

    #: peft's, which can write itself
    config: Any
    #: what `config.save_pretrained` is told of the model, if the config does not say what it is for
    mapping: dict[str, str] | None
    #: name in peft's file -> name in the unsplit model
    names: dict[str, str]


def adapters_of(whole: nn.Module) -> dict[str, Adapter]:
    """Return the adapters of a model, by name; none of a model that peft has not adapted.

    Raises:
        ModelError: peft makes what it writes of an adapter from other tensors.
    """
    configs = getattr(whole, "peft_config", None)
    peft: Any = sys.modules.get("peft")  # who has adapted a model has loaded it
    if not isinstance(configs, dict) or peft is None:
        return {}
    wrapped = isinstance(whole, peft.PeftModel)
    given_model: Any = whole
    base = given_model.get_base_model() if wrapped else whole
    state = whole.state_dict()
    name_of = {id(tensor): name for name, tensor in state.items()}
    found = {}
    for name, given in configs.items():
        written = peft.get_peft_model_state_dict(
            whole, state_dict=state, adapter_name=name, **({"save_embedding_layers": False} if wrapped else {})
        )
        names = {key if wrapped else f"base_model.model.{key}": name_of.get(id(each)) for key, each in written.items()}
        if None in names.values():
            raise ModelError(
                f"adapter {name}: peft writes {type(given).__name__} as other tensors than the model holds; on "
                "worker 0 call model.save_pretrained(folder, state_dict=pipe.weights.state_dict())"
            )
        config = copy.copy(given)
        config.inference_mode = True
        config.base_model_name_or_path = config.base_model_name_or_path or getattr(base, "name_or_path", None) or None
        mapping = {"base_model_class": type(base).__name__, "parent_library": type(base).__module__}
        found[name] = Adapter(config, None if config.task_type else mapping, names)  # type: ignore[arg-type]
    return found
