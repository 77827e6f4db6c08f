"""Data larger than memory: a function gives the order of samples, and every chunk is loaded once an epoch.

sample_order.py  sample number = f(seed, position)
batch_making.py  which chunks are in memory, which come next, which go
source.py     anything with a length, or rows in chunks
stored_rows.py   rows of `datasets`, Parquet, or tokens
loader.py     batches
by_length.py  batches of rows of different lengths
"""

from .by_length import batches_by_length
from .loader import Batch, Loader
from .sample_order import Order
from .source import RangeReader, Ranges, Source, dataset
from .stored_rows import hugging_face, parquet, tokens

__all__ = [
    "Batch", "Loader", "Order", "RangeReader", "Ranges", "Source", "batches_by_length", "dataset", "hugging_face",
    "parquet", "tokens",
]  # fmt: skip
