"""Schedules by name. One file each; add one by a file and an entry here."""

from ..dependency import Spec
from .bfs import LoopedBFS
from .eager_1f1b import EagerOneFOneB
from .gpipe import GPipe
from .hanayo import Hanayo
from .interleaved import Interleaved
from .naive import Naive
from .one_f_one_b import OneFOneB

SCHEDULES: dict[str, type[Spec]] = {
    "naive": Naive,
    "gpipe": GPipe,
    "1f1b": OneFOneB,
    "eager-1f1b": EagerOneFOneB,
    "interleaved": Interleaved,
    "bfs": LoopedBFS,
    "hanayo": Hanayo,
}

__all__ = ["SCHEDULES", "EagerOneFOneB", "GPipe", "Hanayo", "Interleaved", "LoopedBFS", "Naive", "OneFOneB"]
