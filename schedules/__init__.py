"""Schedules by name. One file each; add one by a file and an entry here."""

from ..dependency import Spec
from .gpipe import GPipe
from .naive import Naive
from .one_f_one_b import OneFOneB

SCHEDULES: dict[str, type[Spec]] = {
    "naive": Naive,
    "gpipe": GPipe,
    "1f1b": OneFOneB,
}

__all__ = ["SCHEDULES", "GPipe", "Naive", "OneFOneB"]
