"""What a backward sees and writes of the state that forwards leave; loaded where forwards write, or overtake it."""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor, nn

from ...dependency import ConfigError
from .modules.autocast import forget_casts
from .modules.module_state import INSIDE, KeptAttribute, KeptTensor, ModuleState, Place
from .modules.randomness import computing


@contextmanager
def put_back(left: Sequence[KeptTensor | KeptAttribute]) -> Iterator[None]:
    """Return a context with the tensors that a forward has left; the present ones return."""
    with computing:
        now: list[KeptTensor | KeptAttribute] = []
        for value in left:
            if isinstance(value, KeptAttribute):
                now.append(KeptAttribute(value.place, getattr(*value.place, None)))
            else:
                tensor = value.tensor if value.place is None else getattr(*value.place, None)
                if isinstance(tensor, Tensor):
                    now.append(KeptTensor.now(tensor, value.place))
        try:
            for value in left:
                value.put()
            forget_casts()  # of weights
            yield
        finally:
            for value in now:
                value.put()
            forget_casts()


@contextmanager
def refusing_writes(modules: Sequence[nn.Module], by_forwards: Collection[Place]) -> Iterator[None]:
    """Return a context for a backward that must not write what forwards read, unless forwards write there, too.

    Raises:
        ConfigError: it does.
    """
    before = ModuleState(modules)
    yield
    codes = [getattr(type(module).forward, "__code__", None) for module in modules]
    read = {name for code in codes if code is not None for name in code.co_names}
    for module, place in before.changed() - {*by_forwards}:
        if (name := place.removesuffix(INSIDE)) in read:
            why = f"layer: backward writes {name} of a {type(module).__name__}, which later forwards have read before"
            raise ConfigError(f"{why}; take num_microbatches=1, or write it in pipe.on_gradients")
