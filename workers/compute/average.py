"""A moving average of weights, with the bits of `torch.optim.swa_utils.AveragedModel` and its EMA."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from .modules.autocast import forget_casts
from .modules.torch_internals import local


class Average:
    """Averages of parameters, by name; the first update copies them.

    Args:
        decay: factor of the old average at each update, from 0 to 1.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], decay: float) -> None:
        self._parameters = dict(parameters)
        self.tensors = {name: parameter.detach().clone() for name, parameter in self._parameters.items()}
        self.num_updates = 0
        self._average = get_ema_multi_avg_fn(decay)

    def add(self, name: str, parameter: nn.Parameter) -> None:
        """Average one more, if it is one more: it has been as it is now so far."""
        if name not in self.tensors:
            self._parameters[name], self.tensors[name] = parameter, parameter.detach().clone()

    def update(self) -> None:
        """Take in the parameters as they are now."""
        # The parts here: torch has no operation on some tensors that members divide and others that are whole.
        averages = [local(average) for average in self.tensors.values()]
        now = [local(parameter.detach()) for parameter in self._parameters.values()]
        with torch.no_grad():
            if self.num_updates == 0:
                for average, parameter in zip(averages, now, strict=True):
                    average.copy_(parameter)
            else:
                self._average(averages, now, self.num_updates)
        self.num_updates += 1

    def swap(self) -> None:
        """Exchange the averages with the parameters; once more, and all is as before."""
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                held: Tensor = self.tensors[name].clone()
                self.tensors[name].copy_(parameter)
                parameter.data.copy_(held)  # by `data`: graphs of a next step under way have noted the version


def swap(averages: Iterable[Average]) -> None:
    """Exchange averages with the averaged tensors."""
    for average in averages:
        average.swap()
    forget_casts()
