"""Deferred initialisation of a model that a function makes: parameters are computed only where they are held.

The function runs once on placeholders while its operators are recorded. To fill a parameter, the operators that it
depends on are run again on real tensors, so it gets exactly the model's initialisation. Random numbers are keyed by
the number of the operator, so a parameter has the same initial values on every worker and with every cut; they differ
from one sequence of draws from one generator.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..dependency import ModelError
from ..workers.compute.modules.randomness import Randomness
from ..workers.compute.modules.torch_internals import OperatorMode

from .observe.placeholder import (  # isort: skip
    NEEDS_NUMBERS, FakeTensor, Placeholder, PlaceholderFactory, on_shapes, storage_of, written,
)  # fmt: skip
from .observe.trees import Path, leaves, replaced, tensors

#: tensors of at most this many elements are computed at once: tables of positions, dropout rates, biases
_SMALL = 2**14


@dataclass(eq=False, slots=True)
class _Operation:
    number: int
    func: Any
    args: Any
    kwargs: Any
    result: Any


class DeferredModel(OperatorMode):
    """The model that `factory` makes; its operators are recorded meanwhile.

    Args:
        seed: seed of its initial weights.

    Attributes:
        model: its large parameters are placeholders; small ones and all buffers have data.
    """

    def __init__(self, factory: Callable[[], nn.Module], seed: int) -> None:
        super().__init__()
        self._placeholders = PlaceholderFactory()
        self._randomness = Randomness(seed)
        self._count = 0
        #: storage -> the operations that wrote it or made views of it, in order
        self._operations_on: dict[int, list[_Operation]] = {}
        with self._randomness.initial(0), self:
            self.model = factory()
        if not isinstance(self.model, nn.Module):
            raise ModelError(f"model: the function returned a {type(self.model).__name__}, not a module")
        for module in self.model.modules():
            for owner in (module._buffers, vars(module)):
                self._fill(owner)

    def _fill(self, owner: dict[str, Any]) -> None:
        for name, tree in list(owner.items()):
            if isinstance(tree, (Tensor, tuple, list, dict)) and not name.startswith("_"):
                if any(isinstance(tensor, Placeholder) for tensor in tensors(tree)):
                    owner[name] = replaced(tree, {path: self.filled(tensor) for path, tensor in leaves(tree)})

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":
            return func(*args, **kwargs)
        self._count += 1
        given = list(tensors((args, kwargs)))
        is_placeholder = any(isinstance(tensor, Placeholder) for tensor in given)
        if not given:
            result = self._placeholders.construct(func, args, kwargs)
            is_placeholder = any(t.numel() > _SMALL and isinstance(t, Placeholder) for t in tensors(result))
        elif is_placeholder and all(isinstance(tensor, Placeholder) for tensor in written(func, args, kwargs)):
            try:
                result = on_shapes(func, args, kwargs)
            except NEEDS_NUMBERS:
                is_placeholder = False
        else:
            is_placeholder = False
        operation = _Operation(self._count, func, args, kwargs, None)
        if not is_placeholder:
            return self._run(operation, {id(tensor): self.filled(tensor) for tensor in given})
        # As they are now: small tensors may be written later, and placeholders of parameters may get other data.
        now: dict[Path, Tensor] = {}
        for path, tensor in leaves((args, kwargs)):
            if isinstance(tensor, Placeholder):
                now[path] = tensor.fake
            elif tensor.numel() <= _SMALL:
                now[path] = tensor.clone()
        operation.args, operation.kwargs = replaced((args, kwargs), now)
        made = {path: tensor.fake for path, tensor in leaves(result) if isinstance(tensor, Placeholder)}
        operation.result = replaced(result, made)
        for storage in {storage_of(tensor) for tensor in (*tensors(result), *written(func, args, kwargs))}:
            self._operations_on.setdefault(storage, []).append(operation)
        return result

    def _run(self, operation: _Operation, now: dict[int, Tensor]) -> Any:
        """Run an operation on real tensors; `now` maps the ids of its recorded arguments to these."""
        places = {path: now[id(t)] for path, t in leaves((operation.args, operation.kwargs)) if id(t) in now}
        args, kwargs = replaced((operation.args, operation.kwargs), places)
        if torch.Tag.nondeterministic_seeded in operation.func.tags:
            with self._randomness.initial(operation.number):
                return operation.func(*args, **kwargs)
        return operation.func(*args, **kwargs)

    def filled(self, tensor: Tensor) -> Tensor:
        """Return a tensor with data, by running the operations that made it."""
        if not isinstance(tensor, Placeholder):
            return tensor
        storage = storage_of(tensor)
        operations = self._operations_for(storage)
        used = ((each.number, tensors((each.args, each.kwargs, each.result))) for each in operations)
        last_use = {id(tensor): number for number, there in used for tensor in there}
        now: dict[int, Tensor] = {}
        found: Tensor | None = None
        with torch.no_grad():
            for operation in operations:
                result = self._run(operation, now)
                for fake, real in zip(tensors(operation.result), tensors(result), strict=True):
                    now[id(fake)] = real
                    found = real if storage_of(fake) == storage else found
                now = {key: real for key, real in now.items() if last_use[key] > operation.number}
        assert found is not None
        return found.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    def _operations_for(self, storage: int) -> list[_Operation]:
        """Return, in order, all operations that the data of a storage depend on."""
        found: dict[int, _Operation] = {}
        seen, waiting = {storage}, [storage]
        while waiting:
            for operation in self._operations_on.get(waiting.pop(), ()):
                found[operation.number] = operation
                arguments = tensors((operation.args, operation.kwargs))
                needed = {storage_of(tensor) for tensor in arguments if isinstance(tensor, FakeTensor)} - seen
                seen |= needed
                waiting += needed
        return [found[number] for number in sorted(found)]
