"""The verdict of a comparison of a pipeline with one process."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..launching import launcher_link as link
from .verify_options import VerifyOptions

#: allowed difference of sums in another order, in units of the float's precision, relative to the largest number
_ROUNDINGS = 256
#: tensors with all numbers below this part of the model's largest are compared with the largest
_SMALL = 1e-2
#: options that the report in JSON repeats
_TOLD = "steps", "schedule", "order", "transport", "model"


class Compared:
    """Tensors by name, as found and as expected.

    Args:
        precision: of a float type that the model computes in and that is coarser than the tensors'.
        roundings: how often a number is rounded otherwise, where that is known; `_ROUNDINGS` at most.
    """

    def __init__(self, precision: float = 0.0, roundings: int | None = None) -> None:
        self._coarsest = precision
        self._roundings = _ROUNDINGS if roundings is None else min(_ROUNDINGS, roundings)
        #: (name, largest difference, largest expected number, group, dtype)
        self._errors: list[tuple[str, float, float, str, torch.dtype]] = []
        self.num_same = self.num_tensors = 0
        self.identical = True

    def numbers(self, what: str, found: Sequence[float], expected: Sequence[float]) -> None:
        """Compare a number of every step, such as the loss."""
        if found or expected:
            self._compare(what, what, torch.tensor(found), torch.tensor(expected))

    def tensors(self, found: Mapping[str, Tensor], expected: Mapping[str, Tensor], what: str = "") -> None:
        """Compare tensors by name; a tensor missing on one side differs.

        Args:
            what: text behind the names; each group of tensors has a scale.
        """
        for name in expected.keys() | found.keys():
            there = [side[name].detach().cpu() if name in side else None for side in (found, expected)]
            self.num_same += self._compare(name + what, what, *there)
            self.num_tensors += 1

    def _compare(self, name: str, group: str, found: Tensor | None, expected: Tensor | None) -> bool:
        error, size, dtype = math.inf, 1.0, torch.float32
        if found is not None and expected is not None and found.shape == expected.shape:
            (error, size), dtype = _difference(found, expected), expected.dtype
        self._errors.append((name, error, size, group, dtype))
        self.identical &= error == 0
        return error == 0

    def relative(self) -> dict[str, float]:
        """Return by name the largest difference relative to the largest number (see `_SMALL`)."""
        largest: dict[str, float] = {}
        for _, _, size, group, _ in self._errors:
            largest[group] = max(largest.get(group, 0.0), size)
        return {name: error / max(size, _SMALL * largest[group], 1e-30) for name, error, size, group, _ in self._errors}

    @property
    def rounding(self) -> bool:
        """Whether nothing differs by more than other orders of sums explain."""
        relative = self.relative()
        least = {name: max(_precision(dtype), self._coarsest) for name, *_, dtype in self._errors}
        return all(relative[name] <= self._roundings * precision for name, precision in least.items())

    @property
    def bound(self) -> float:
        """The largest relative difference of float32 that counts as rounding."""
        return self._roundings * max(_precision(torch.float32), self._coarsest)

    @property
    def max_abs_error(self) -> float:
        return max(error for _, error, *_ in self._errors)


def tell(
    compared: Compared, options: VerifyOptions, about: Mapping[str, Any], *, exactly: bool = False, because: str
) -> None:
    """Report the verdict, and return the exit code: 0 also for differences by the order of sums alone.

    Args:
        about: what the report says of the run: rows of a batch, its microbatches, and more.
        exactly: whether such a difference is none that can be, as the order of sums is the same.
        because: why it may not be the same.
    """
    relative = compared.relative()
    worst = max(relative, key=lambda name: relative[name])
    verdict = "identical" if compared.identical else "rounding" if compared.rounding and not exactly else "different"
    because = because if verdict == "rounding" else ""
    report: dict[str, Any] = {
        "identical": compared.identical,
        "verdict": verdict,
        "because": because,
        "max_rel_error": relative[worst],
        "max_abs_error": compared.max_abs_error,
        "worst": worst,
        "parameters": compared.num_tensors,
        **{name: getattr(options, name) for name in _TOLD},
        "workers": options.num_workers,
        **about,
    }
    said = {
        "identical": "identical to one process",
        "rounding": f"within the rounding of floats of one process, because the order of sums differs: {because}",
        "different": "DIFFERENT from one process",
    }
    apart = f"; worst {worst}: relative {relative[worst]:.1e}, absolute {compared.max_abs_error:.1e}"
    largest = "" if compared.identical else apart
    steps = f"{options.steps} steps of {about['rows']} rows in {about['microbatches']} microbatches"
    same = f"({compared.num_same} of {compared.num_tensors} tensors bit for bit{largest})"
    text = f"{options.schedule} on {options.num_workers} workers, {steps}: {said[verdict]} {same}"
    link.tell(kind="result", text=text, json=report, exit_code=int(verdict == "different"))


def summed_by_stages(names: Sequence[str]) -> str:
    """Return why gradients of parameters that several stages use may differ by rounding."""
    if not names:
        return "something is summed otherwise than in one process"
    named = ", ".join(names[:2]) + f" and {len(names) - 2} more" * (len(names) > 2)
    return f"several stages use {named}, whose uses one process does not tell apart where it computes again"


def _difference(found: Tensor, expected: Tensor) -> tuple[float, float]:
    """Return the largest difference and the largest expected number; where both are no numbers they do not differ."""
    if not expected.numel():
        return 0.0, 0.0
    found, expected = (each.to(torch.promote_types(each.dtype, torch.double)) for each in (found, expected))
    apart = torch.where((found == expected) | (found.isnan() & expected.isnan()), 0.0, (found - expected).abs())
    apart = apart.nan_to_num(math.inf, math.inf)
    return float(apart.max()), float(expected.abs().nan_to_num(0.0, 0.0).max())


def _precision(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps if dtype.is_floating_point or dtype.is_complex else 0.0
