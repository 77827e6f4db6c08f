"""Which fields of a batch the stages of small models of transformers read, and whether numbers stay what they are.

    python -m bench.fields [--only REGEX] [--tasks causal,masked,...] [--every 1] [--limit-s 600]

Each model of `bench.model_zoo` is cut into three stages. They run once with whole batches, and once with fields that
they were seen to use: what they hand on and return must have the same bits.
"""

from __future__ import annotations

import argparse
import re
import resource
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from bench import model_zoo
from rpc_pipe.dependency import ConfigError
from rpc_pipe.model.cut import cut
from rpc_pipe.model.observe.trees import tensors
from rpc_pipe.model.observe.unread_fields import FieldNeeded, filled
from rpc_pipe.model.observed_model import ObservedModel, observe

STAGES = 3
_MOST_BYTES = 8 * 2**30
TASKS = "causal,masked,seq2seq,classify,tokens,answers,image"


def padded(batch: dict[str, Any]) -> dict[str, Any]:
    """Return a batch of text with a mask."""
    if "input_ids" in batch:
        lengths = torch.tensor([[12], [7], [9], [12]])
        batch["attention_mask"] = (torch.arange(batch["input_ids"].shape[1]) < lengths).long()
    return batch


def compared(observed: ObservedModel, batch: dict[str, Any]) -> tuple[list[list[str]], str]:
    """Return the fields that each stage reads, and what was found."""
    ranges = cut(observed.num_blocks, STAGES)
    whole, less = ([observed.build(stage, ranges, copied=True) for stage in range(STAGES)] for _ in range(2))
    payload: Any = ()
    read: list[list[str]] = []
    found = "same bits"
    for stage, unread in enumerate(observed.unused(ranges)):
        forms = {path: (batch[path[1][1]].shape, batch[path[1][1]].dtype) for path in unread}
        left = {name: None if any(path[1][1] == name for path in unread) else field for name, field in batch.items()}
        expected = whole[stage].run(payload, (), batch)
        try:
            got = less[stage].run(payload, *filled(less[stage]._skeleton, ((), left), forms))
        except FieldNeeded:
            got, left, found = expected, batch, "reads whole batches"
        pairs = zip(tensors(expected), tensors(got), strict=True)
        if not all(a.shape == b.shape and torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in pairs):
            return read, "OTHER BITS"
        read.append([name for name, field in left.items() if isinstance(field, Tensor)])
        payload = tuple(tensor.detach() for tensor in expected) if stage < STAGES - 1 else ()
    return read, found


def models(tasks: str, only: str, every: int) -> Iterator[tuple[str, str]]:
    """Yield tasks and families."""
    for task in tasks.split(","):
        kinds = [kind for kind in model_zoo.families(task) if re.search(only, kind)]
        yield from ((task, kind) for kind in kinds[::every])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="families whose name it matches")
    parser.add_argument("--tasks", default=TASKS)
    parser.add_argument("--every", type=int, default=1, help="take one family of so many (1)")
    parser.add_argument("--limit-s", type=float, default=600, help="begin no other model after so long (600)")
    options = parser.parse_args()
    model_zoo.quiet()
    resource.setrlimit(resource.RLIMIT_AS, (_MOST_BYTES, _MOST_BYTES))  # of some families configurations stay large
    begin, counts = time.monotonic(), Counter[str]()
    for task, kind in models(options.tasks, options.only, options.every):
        if time.monotonic() - begin > options.limit_s:
            break
        try:
            model, batch = model_zoo.made(task, kind)
            batch = padded(batch)
            model.eval()
            with torch.no_grad():
                model(**batch)
        except Exception:  # no model, or none that runs with such a batch
            counts["does not run"] += 1
            continue
        try:
            with torch.no_grad():
                read, found = compared(observe(model, (), batch, at_least=STAGES), batch)
        except ConfigError as error:
            read, found = [], f"not cut: {str(error)[:80]}"
        counts[found.partition(":")[0]] += 1
        print(f"{task}_{kind}: {found}; {' | '.join(', '.join(names) or '-' for names in read)}", flush=True)
    print(", ".join(f"{number} {what}" for what, number in counts.most_common()))


if __name__ == "__main__":
    main()
