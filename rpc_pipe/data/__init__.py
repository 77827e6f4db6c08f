"""Data larger than memory: a function gives the order of samples, and every chunk is loaded once an epoch.

sample_order.py  sample number = f(seed, position)
residency.py  which chunks are in memory, which come next, which go
readers       maps.py: anything with a length; ranges.py: rows in chunks, of `datasets`, Parquet, or tokens
loader.py     batches
by_length.py  batches of rows of different lengths
"""

from .by_length import batches_by_length
from .datasets_reader import hugging_face
from .loader import Batch, Loader
from .maps import dataset
from .parquet_reader import parquet
from .ranges import RangeReader, Ranges
from .sample_order import Order
from .source import Source
from .token_reader import tokens

__all__ = [
    "Batch", "Loader", "Order", "RangeReader", "Ranges", "Source", "batches_by_length", "dataset", "hugging_face",
    "parquet", "tokens",
]  # fmt: skip
