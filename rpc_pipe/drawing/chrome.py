"""Chrome's trace event format, which Perfetto reads. Loads without torch."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..dependency import Spec
from ..planning.span import Span
from ..system.files import write


def write_chrome(
    path: str | Path,
    spec: Spec,
    steps: Mapping[int, Sequence[Span]],
    *,
    device: str = "cpu",
    clock_error_ms: float = 0.0,
) -> None:
    """Write the actions of `steps` to a file.

    Args:
        steps: step -> its spans, in milliseconds.
        clock_error_ms: largest difference of two workers' clocks, written to the file's `otherData`.
    """
    whole = {"traceEvents": _events(spec, steps, device), "otherData": {"clock_error_ms": clock_error_ms}}
    write(path, json.dumps(whole))


def _events(spec: Spec, steps: Mapping[int, Sequence[Span]], device: str) -> list[dict[str, Any]]:
    origin = min(span.start for spans in steps.values() for span in spans)
    events: list[dict[str, Any]] = []
    for worker in range(spec.num_workers):
        stages = ",".join(str(stage) for stage, _ in spec.hosted(worker))
        name = f"worker {worker} · stage {stages} · {device}"
        events.append({"ph": "M", "name": "thread_name", "pid": 0, "tid": worker, "args": {"name": name}})
    for step, spans in sorted(steps.items()):
        at = {span.action: span for span in spans}
        for span in spans:
            start, end = 1e3 * (span.start - origin), 1e3 * (span.end - origin)
            base = {"pid": 0, "tid": span.worker, "cat": span.action.kind.letter}
            args = {"step": step, "stage": span.action.stage, "microbatch": span.action.microbatch}
            events.append(base | {"ph": "X", "name": str(span.action), "ts": start, "dur": end - start, "args": args})
            for follower in spec.successors(span.action):
                if follower not in at or at[follower].worker == span.worker:
                    continue
                arrow = {"name": "payload", "cat": "payload", "id": f"{step}.{span.action}.{follower}", "pid": 0}
                events.append(arrow | {"ph": "s", "tid": span.worker, "ts": end})
                begin = 1e3 * (at[follower].start - origin)
                events.append(arrow | {"ph": "f", "bp": "e", "tid": at[follower].worker, "ts": begin})
    return events
