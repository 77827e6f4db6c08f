"""Schedules by name. One file each; add one by a file and an entry here."""

from ..dependency import Spec
from .avgpipe import AvgPipe
from .bfs import LoopedBFS
from .chimera import Chimera
from .dualpipe import DualPipe
from .dualpipev import DualPipeV
from .eager_1f1b import EagerOneFOneB
from .gpipe import GPipe
from .gpipe_recompute import GPipeRecompute
from .hanayo import Hanayo
from .interleaved import Interleaved
from .mixpipe import MixPipe
from .naive import Naive
from .one_f_one_b import OneFOneB
from .pipedream import PipeDream
from .pipedream_2bw import PipeDream2BW
from .v_half import VHalf
from .v_min import VMin
from .varuna import Varuna
from .zb_h1 import ZBH1
from .zb_h2 import ZBH2
from .zb_v import ZBV

SCHEDULES: dict[str, type[Spec]] = {
    "naive": Naive,
    "gpipe": GPipe,
    "gpipe-recompute": GPipeRecompute,
    "1f1b": OneFOneB,
    "eager-1f1b": EagerOneFOneB,
    "interleaved": Interleaved,
    "bfs": LoopedBFS,
    "hanayo": Hanayo,
    "chimera": Chimera,
    "mixpipe": MixPipe,
    "zb-h1": ZBH1,
    "zb-h2": ZBH2,
    "zb-v": ZBV,
    "v-half": VHalf,
    "v-min": VMin,
    "dualpipe": DualPipe,
    "dualpipev": DualPipeV,
    "varuna": Varuna,
    "pipedream": PipeDream,
    "pipedream-2bw": PipeDream2BW,
    "avgpipe": AvgPipe,
}

__all__ = ["SCHEDULES", *(cls.__name__ for cls in SCHEDULES.values())]
