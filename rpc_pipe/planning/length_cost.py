"""The time of a microbatch by its rows and their length, from a profile. Loads without torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from ..dependency import Action, B, ConfigError, F, Kind
from ..model.cut import cut
from ..system.files import read_json
from .profile import THOUSAND, Profile
from .profile_file import from_json
from .unequal import Relative


class LengthCost(NamedTuple):
    """Predicts seconds of a forward and a backward: fixed + token * tokens + attention * tokens * length."""

    fixed: float
    token: float
    attention: float

    def seconds(self, rows: int, length: int) -> float:
        """Return the time of a microbatch of `rows` rows that are padded to `length`."""
        return self.fixed + rows * length * (self.token + self.attention * length)

    @classmethod
    def of(cls, profile: Profile) -> LengthCost:
        """Return the cost of a whole model."""

        def total(name: str) -> float:
            return float(sum(getattr(block, name).get(kind, 0) for block in profile.by_length for kind in (F, B)))

        # From milliseconds and thousands.
        return cls(*(total(name) / THOUSAND ** (1 + power) for power, name in enumerate(cls._fields)))


def refuse_without(profile: Profile, where: str) -> None:
    """Raise ConfigError if a profile has no times by length."""
    if not profile.by_length or not profile.length:
        raise ConfigError(f"{where}: has no times by length; measure these by rpc-pipe profile --lengths 64,128,256")


def relative_times(profile: Profile, lengths: Sequence[float], num_stages: int) -> Relative:
    """Return the times of microbatches of one row each, relative to their mean, by stage and kind of an even cut."""
    stages = cut(profile.num_blocks, num_stages, None)

    @cache
    def times(stage: int, kind: Kind) -> list[float]:
        blocks = [profile.by_length[block] for block in stages[stage]]
        took = [sum(terms.ms(kind, 1, length) for terms in blocks) for length in lengths]
        return [each * len(took) / sum(took) for each in took] if sum(took) else [1.0] * len(took)

    def relative(action: Action, microbatch: int) -> float:
        return times(action.stage, action.kind)[microbatch]

    return relative


def read_cost(source: str | Path | Mapping[str, Any]) -> LengthCost:
    """Return the cost in a profile, or its file.

    Raises:
        ConfigError: it is neither, or has no times by length.
    """
    if not isinstance(source, (str, Path, Mapping)):
        raise ConfigError(f"microbatch_cost={source!r}: must be a function that returns seconds, or a profile's file")
    where = "microbatch_cost" if isinstance(source, Mapping) else f"microbatch_cost={str(source)!r}"
    return LengthCost.of(read_measured(source, where))


def read_measured(source: str | Path | Mapping[str, Any], where: str) -> Profile:
    """Return the profile in a mapping or a file, which must have times by length."""
    profile = from_json(source if isinstance(source, Mapping) else read_json(Path(source), where), where)
    refuse_without(profile, where)
    return profile
