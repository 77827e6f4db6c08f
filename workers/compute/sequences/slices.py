"""The computation of a stage: its slice of the model, as a shard sees it. A list of layers is one kind of slice."""

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol

from torch import Tensor, nn

from ...transport.payload import Tree
from ..modules.randomness import Seed, may_draw

#: (a layer or block, its name in the model, the model) -> None, or the module to use in its place
Divide = Callable[[nn.Module, str, nn.Module], Any]
#: called before one of the first forwards; its result is called behind it
Look = Callable[[], Callable[[], None]]
#: bound of the ranks of parameters in one layer
_MOST_IN_LAYER = 2**20


class Slice(Protocol):
    """A slice of the model: modules with parameters by the unsplit model's names, and a forward.

    Attributes:
        first: its first unit (layer, or call of a block), the key of its random numbers.
        takes_fields: whether it wants the microbatch's fields; else they are the payload of the first stage.
        modules: all modules that follow the mode of a run.
        own: the modules that compute here; a forward may write their buffers and attributes.
        shared: names of parameters that other stages hold too -> all their stages.
        observed: number of forwards that were observed so far, and the ns that this took.
        look: refuses forwards that leave something for other stages beside their output; None: none could.
    """

    first: int
    takes_fields: bool = False
    shared: Mapping[str, Sequence[int]]
    observed: tuple[int, int] = 0, 0
    modules: list[nn.Module]
    own: list[nn.Module]
    look: Look | None = None

    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Return each parameter once, by its name in the unsplit model, without names of wrappers (`plain_name`)."""

    def expected_writes(self) -> tuple[Collection[tuple[nn.Module, str]], Collection[Tensor]]:
        """Return the buffers and weights that forwards are known to write, as far as forwards on shapes have shown."""
        return (), ()

    def ranks(self) -> Mapping[str, int]:
        """Return numbers that sort the parameters as the unsplit model does, unique over all stages."""

    def state_dict(self) -> dict[str, Tensor]:
        """Return the slice's tensors by the names that they have in the unsplit model."""

    def versions(self) -> dict[str, dict[str, Any]]:
        """Return the versions of the slice's modules by name, as torch's `state_dict` has them in its metadata."""

    def compile(self, options: Mapping[str, Any]) -> None:
        """Have `torch.compile` compile each layer or block in its place, so that parameters keep their names."""

    def forward(self, tree: Tree, fields: Tree, seed: Seed) -> Tree:
        """Compute.

        Args:
            tree: the payload of the stage before.
            fields: the microbatch's, if they are wanted.
            seed: called before random numbers are drawn.
        """


def versions_of(module: nn.Module) -> dict[str, dict[str, Any]]:
    """Return the metadata of torch's `state_dict`: of each module, by name, its version."""
    found = getattr(module.state_dict(keep_vars=True), "_metadata", {})
    return {name: dict(each) for name, each in found.items()}


def plain_name(name: str) -> str:
    """Return a name without the prefixes of wrappers: `torch.compile` and torch's checkpointing."""
    return name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", "")


class Layers(Slice):
    """A list of layers, each called with the result of the one before.

    Args:
        layers: (index in the whole model, module), in order.
        names: of parameters that the unsplit model calls by another layer, which has them too.
        shared: as in `Slice`.
    """

    def __init__(
        self,
        layers: Sequence[tuple[int, nn.Module]],
        names: Mapping[str, str] = {},
        shared: Mapping[str, Sequence[int]] = {},
    ) -> None:
        self.layers = list(layers)
        self._names, self.shared = names, shared
        self.first = self.layers[0][0]
        self.note_modules()
        #: layers of the user's with a state, which begins with this forward and ends with it
        self._stateful = {index for index, module in self.layers if has_own_state(module)}
        #: layers that are seeded: the last one too, from where a loss function draws on
        self._seeded = {index for index, module in self.layers if may_draw(module)} | {self.layers[-1][0]}

    def note_modules(self) -> None:
        """Find the modules of the layers, also after these were exchanged."""
        self.own = self.modules = list(dict.fromkeys(part for _, module in self.layers for part in module.modules()))

    def compile(self, options: Mapping[str, Any]) -> None:
        for _, module in self.layers:
            module.compile(**options)

    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        found: dict[nn.Parameter, str] = {}
        for index, module in self.layers:
            for name, parameter in module.named_parameters():
                found.setdefault(parameter, self._names.get(f"{index}.{name}", f"{index}.{name}"))
        return [(plain_name(name), parameter) for parameter, name in found.items()]

    def ranks(self) -> Mapping[str, int]:
        named = enumerate(name for name, _ in self.named_parameters())
        return {name: int(name.partition(".")[0]) * _MOST_IN_LAYER + number for number, name in named}

    def state_dict(self) -> dict[str, Tensor]:
        named = ((index, module.state_dict()) for index, module in self.layers)
        return {f"{index}.{name}": tensor for index, state in named for name, tensor in state.items()}

    def versions(self) -> dict[str, dict[str, Any]]:
        named = ((index, versions_of(module)) for index, module in self.layers)
        return {f"{index}.{name}".rstrip("."): each for index, found in named for name, each in found.items()}

    def forward(self, tree: Tree, fields: Tree, seed: Seed) -> Tree:
        for index, module in self.layers:
            if index in self._seeded:
                seed(index, 0)
            try:
                tree = output_alone(module(tree, state=None)) if index in self._stateful else module(tree)
            except Exception as error:
                note(error, f"in layer {index} ({type(module).__name__})")
                raise
        return tree


def place_of_state(module: nn.Module) -> tuple[str, int] | None:
    """Return name and place of a forward's parameter for a state; None: it has none."""
    if isinstance(module, nn.RNNBase):
        return "hx", 1
    # A forward of torch may show no signature; FSDP2 puts a class of torch before the user's.
    owner = next(cls for cls in type(module).__mro__ if "forward" in vars(cls))
    if owner.__module__.startswith("torch."):
        return None
    names = list(inspect.signature(module.forward).parameters)
    return ("state", names.index("state")) if "state" in names else None


def has_own_state(layer: nn.Module) -> bool:
    """Return whether a layer of the user's has a state: in a list it hands on its output alone, also without slices."""
    return not isinstance(layer, nn.RNNBase) and place_of_state(layer) is not None


def output_alone(found: Tree) -> Tree:
    """Return the output of (output, state)."""
    return found[0] if isinstance(found, tuple) else found


def note(error: Exception, where: str) -> None:
    """Add to an error where it happened, as `add_note` does from Python 3.11 on."""
    with suppress(Exception):  # of a class of the user's that takes none, or has something else there
        error.__notes__ = [*getattr(error, "__notes__", ()), where]
