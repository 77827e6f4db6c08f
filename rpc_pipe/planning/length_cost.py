"""The time of a microbatch by its rows and their length, from a profile. Loads without torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ..dependency import B, ConfigError, F
from ..system.files import read_json
from .profile import THOUSAND, Profile, from_json


class LengthCost(NamedTuple):
    """Predicts seconds of a forward and a backward: fixed + token * tokens + attention * tokens * length."""

    fixed: float
    token: float
    attention: float

    def seconds(self, rows: int, length: int) -> float:
        """Return the time of a microbatch of `rows` rows that are padded to `length`."""
        return self.fixed + rows * length * (self.token + self.attention * length)

    @classmethod
    def of(cls, profile: Profile, where: str) -> LengthCost:
        """Return the cost of a whole model.

        Raises:
            ConfigError: its profile has no times by length.
        """
        if not profile.by_length:
            raise ConfigError(
                f"{where}: has no times by length; measure these by rpc-pipe profile --lengths 64,128,256"
            )
        sums = [
            sum(
                terms.get(kind, 0) for block in profile.by_length for kind in (F, B) for terms in [getattr(block, name)]
            )
            for name in cls._fields
        ]
        # From milliseconds and thousands.
        return cls(*(total / THOUSAND ** (1 + power) for power, total in enumerate(sums)))


def read_cost(source: str | Path | Mapping[str, Any]) -> LengthCost:
    """Return the cost in a profile, or its file.

    Raises:
        ConfigError: it is neither, or has no times by length.
    """
    if not isinstance(source, (str, Path, Mapping)):
        raise ConfigError(
            f"microbatch_cost={source!r}: must be a function of a microbatch that returns seconds, or a profile's file"
        )
    where = "microbatch_cost" if isinstance(source, Mapping) else f"microbatch_cost={str(source)!r}"
    content = source if isinstance(source, Mapping) else read_json(Path(source), where)
    return LengthCost.of(from_json(content, where), where)
