"""What `save_pretrained` of transformers writes beside weights, and by which names it writes these."""

from __future__ import annotations

import copy
import logging
import re
from pathlib import Path
from typing import Any

from torch import Tensor, nn

logger = logging.getLogger(__name__)


class Configuration:
    """The configuration of a model, and of its generation of text, as they are when they are written."""

    def __init__(self, model: nn.Module) -> None:
        given: Any = model
        self._config, self._name, self._dtype = given.config, type(model).__name__, getattr(given, "dtype", None)
        generates = hasattr(model, "can_generate") and given.can_generate()
        self._generation = getattr(model, "generation_config", None) if generates else None

    def write(self, folder: Path) -> None:
        """Write both; a warning says which of them cannot be: the weights do not depend on it."""
        config = copy.deepcopy(self._config)
        config.architectures = [self._name]
        if self._dtype is not None:
            config.dtype = str(self._dtype).removeprefix("torch.")
        for each in (config, self._generation):
            try:
                if each is not None:
                    each.save_pretrained(folder)
            except OSError:
                raise
            except Exception as error:  # such as a value that is refused only when it is written
                logger.warning("%s: %s is not written: %s", folder.parent, type(each).__name__, error)


def other_names(model: Any) -> frozenset[str]:
    """Return, of tensors with several names, those that the model's class says are made of another."""
    tied = getattr(model, "all_tied_weights_keys", None) or getattr(model, "_tied_weights_keys", None) or ()
    names: dict[int, list[str]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if isinstance(tensor, Tensor):
            names.setdefault(id(tensor), []).append(name)
    found: set[str] = set()
    for several in names.values():
        made = [name for name in several if any(re.search(each, name) for each in tied)]
        found.update(made if len(made) < len(several) else made[1:])
    return frozenset(found)
