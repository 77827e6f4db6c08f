"""Schedules by name. One file each; add one by a file and an entry here. Each is loaded when it is looked up."""

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any

from ..dependency import Spec

#: name -> file and class
_FOUND_IN = {
    "naive": "naive.Naive",
    "gpipe": "gpipe.GPipe",
    "gpipe-recompute": "gpipe_recompute.GPipeRecompute",
    "1f1b": "one_f_one_b.OneFOneB",
    "eager-1f1b": "eager_1f1b.EagerOneFOneB",
    "interleaved": "interleaved.Interleaved",
    "bfs": "bfs.LoopedBFS",
    "hanayo": "hanayo.Hanayo",
    "chimera": "chimera.Chimera",
    "mixpipe": "mixpipe.MixPipe",
    "zb-h1": "zb_h1.ZBH1",
    "zb-h2": "zb_h2.ZBH2",
    "zb-v": "zb_v.ZBV",
    "v-half": "v_half.VHalf",
    "v-min": "v_min.VMin",
    "dualpipe": "dualpipe.DualPipe",
    "dualpipev": "dualpipev.DualPipeV",
    "varuna": "varuna.Varuna",
    "pipedream": "pipedream.PipeDream",
    "pipedream-2bw": "pipedream_2bw.PipeDream2BW",
    "avgpipe": "avgpipe.AvgPipe",
}


class _Schedules(Mapping[str, type[Spec]]):
    def __getitem__(self, name: str) -> type[Spec]:
        file, cls = _FOUND_IN[name].split(".")
        found: type[Spec] = getattr(import_module(f".{file}", __name__), cls)
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(_FOUND_IN)

    def __len__(self) -> int:
        return len(_FOUND_IN)


SCHEDULES: Mapping[str, type[Spec]] = _Schedules()
_NAMES = {f"{__name__}.{place}": name for name, place in _FOUND_IN.items()}
_BY_CLASS = {place.split(".")[1]: name for name, place in _FOUND_IN.items()}

__all__ = ["SCHEDULES", "name_of", *_BY_CLASS]


def name_of(spec: Spec) -> str:
    """Return the name of a built-in schedule, or that of the class."""
    cls = type(spec)
    return _NAMES.get(f"{cls.__module__}.{cls.__name__}", cls.__name__)


def __getattr__(name: str) -> Any:
    if name not in _BY_CLASS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return SCHEDULES[_BY_CLASS[name]]
