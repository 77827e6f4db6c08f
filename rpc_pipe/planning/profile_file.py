"""A profile as JSON, to be kept and edited. Loads without torch."""

from __future__ import annotations

from typing import Any

from ..dependency import B, ConfigError, F, I, R, W
from ..system.files import DAMAGED
from .json_fields import from_json_value, to_json_value
from .profile import Profile


def as_json(profile: Profile) -> dict[str, Any]:
    """Return a profile as JSON values; times in milliseconds, sizes in bytes; the blocks come last."""
    content: dict[str, Any] = to_json_value(profile)
    rows = content.pop("rows")
    return {
        **content,
        "num_blocks": profile.num_blocks,
        "rows": {count: rows[count] for count in sorted(rows, key=int)},
    }


def from_json(content: Any, where: str) -> Profile:
    """Return the profile that `as_json` has written and a user may have edited.

    Raises:
        ConfigError: it is no profile; the text names the place.
    """
    try:
        profile: Profile = from_json_value(Profile, content)
    except DAMAGED as error:
        raise ConfigError(f"{where}: is no profile ({type(error).__name__}: {error})") from None
    _refuse(profile, where)
    return profile


def _refuse(profile: Profile, where: str) -> None:
    """Raise if the blocks of a profile do not fit together.

    Raises:
        ConfigError: blocks differ from one number of rows to another, or lack a time.
    """
    measured = profile.measured
    if not measured or len({len(blocks) for blocks in measured.values()}) != 1 or not profile.num_blocks:
        raise ConfigError(f"{where}: every number of rows must list the same blocks, at least one")
    for rows, blocks in measured.items():
        for block in blocks:
            if lacking := [kind for kind in (F, B, I, W, R) if kind not in block.times]:
                raise ConfigError(f"{where}: rows {rows}, block {block.name!r}: has no time of {lacking[0]}")
