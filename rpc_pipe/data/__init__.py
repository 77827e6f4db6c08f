"""Data larger than memory: a function gives the order of samples, and every chunk is loaded once an epoch.

sample_order.py  sample number = f(seed, position)
residency.py  which chunks are in memory, which come next, which go
storage.py    shards from elsewhere, through a cache on this machine's disk
sources       token_files.py, tables.py, maps.py: the chunks of a format, and their samples
loader.py     batches
by_length.py  batches of rows of different lengths
packing.py    shards made of text
"""

from .by_length import batches_by_length
from .loader import Batch, Loader
from .maps import dataset, images
from .opening import open_source
from .packing import pack, text
from .sample_order import Order
from .source import Source
from .storage import Storage
from .tables import table
from .token_files import tokens

__all__ = [
    "Batch", "Loader", "Order", "Source", "Storage", "batches_by_length", "dataset", "images", "open_source", "pack",
    "table", "text", "tokens",
]  # fmt: skip
