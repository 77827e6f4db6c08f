"""What splitting backward costs: (I + W) / B of a transformer layer, in turn, medians.

python bench/split_backward.py [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
from torch import nn

from rpc_pipe.workers.compute.split_backward import Saved, backward_inputs

#: width, rows, sequence
_SHAPES = ((256, 2, 64), (512, 4, 128), (768, 2, 128), (1024, 2, 128))


def measure(width: int, rows: int, sequence: int, repeats: int) -> dict[str, float]:
    """Return milliseconds of F, B, I and W and the ratio, one layer, one thread."""
    layer = nn.TransformerEncoderLayer(width, 8, 4 * width, batch_first=True, dropout=0.1, norm_first=True)
    x, grad = torch.randn(2, rows, sequence, width)
    times: dict[str, list[float]] = {name: [] for name in ("F", "B", "I", "W", "ratio")}
    for _ in range(repeats):
        leaf = x.clone().requires_grad_()
        t0 = time.perf_counter()
        out = layer(leaf)
        t1 = time.perf_counter()
        torch.autograd.backward([out], [grad])
        whole = time.perf_counter() - t1
        del out
        leaf, saved = x.clone().requires_grad_(), Saved()
        with saved.hooks():
            out = layer(leaf)
        t2 = time.perf_counter()
        _, later = backward_inputs([out], [grad], [leaf], saved)
        t3 = time.perf_counter()
        del out
        later.run()
        t4 = time.perf_counter()
        for name, value in zip(times, (t1 - t0, whole, t3 - t2, t4 - t3, (t4 - t2) / whole), strict=True):
            times[name].append(value)
    found = {name: statistics.median(values) for name, values in times.items()}
    return {name: value if name == "ratio" else 1e3 * value for name, value in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--repeats", type=int, default=25, help="(25)")
    parser.add_argument("--json", help="write the figures to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    print("width  rows x seq       F       B       I       W ms   (I+W)/B")
    for width, batch, sequence in _SHAPES:
        found = measure(width, batch, sequence, options.repeats)
        rows.append({"width": width, "rows": batch, "sequence": sequence, **found})
        numbers = "".join(f"{found[name]:8.2f}" for name in "FBIW")
        print(f"{width:5}  {batch:4} x {sequence:<4}{numbers}      {found['ratio']:.3f}")
    if options.json:
        Path(options.json).write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
