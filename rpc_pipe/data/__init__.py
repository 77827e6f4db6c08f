"""Data larger than memory: which sample comes when is a function, and every chunk is loaded once an epoch.

    order.py      sample number = f(seed, position)
    residency.py  which chunks are in memory, which come next, which go
    storage.py    shards from elsewhere, through a cache on this machine's disk
    sources       token_files.py, tables.py, image_files.py, maps.py: what a chunk is and how samples are made of it
    loader.py     batches
    packing.py    shards made of text

Names are loaded when they are looked up: what plans and the command line do without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .image_files import images
    from .loader import Batch, Loader
    from .maps import dataset
    from .opening import open_source
    from .order import Order
    from .packing import pack
    from .source import Source
    from .storage import Storage
    from .tables import table
    from .text_files import text
    from .token_files import tokens

_HOMES = {
    "Batch": "loader",
    "Loader": "loader",
    "Order": "order",
    "Source": "source",
    "Storage": "storage",
    "dataset": "maps",
    "images": "image_files",
    "open_source": "opening",
    "pack": "packing",
    "table": "tables",
    "text": "text_files",
    "tokens": "token_files",
}
__all__ = [
    "Batch", "Loader", "Order", "Source", "Storage", "dataset", "images", "open_source", "pack", "table", "text",
    "tokens",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
