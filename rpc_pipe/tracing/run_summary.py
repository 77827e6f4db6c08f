"""The summary of a run at its end: figures, a sentence, and the last steps as files."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..boards.view import View

#: option -> content of the file that it names
FILES = {"save": "weights", "trace": "trace", "html": "page"}
#: number of last steps that are summarised
LAST_STEPS = 12


def figures(view: View) -> dict[str, Any] | None:
    """Return the figures of a run, for JSON; None if no step is complete."""
    from .lost_time import lost_time  # at the end of a run: it simulates
    from .trace import recent_trace

    trace, lost = recent_trace(view, LAST_STEPS), lost_time(view, fresh=True)
    if trace is None or lost is None:
        return None
    planned, throughput = trace.simulated(), view.throughput()
    records, last = trace.steps[max(trace.steps)], view.complete_steps(1)[0]
    before = 0 if view.epoch else view.header.get("first_step", 1) - 1
    observations = sum(record.observations for record in records)
    observed_s = sum(record.observed_ns for record in records) / 1e9
    return {
        "steps": last - before,
        **({"epoch": view.epoch, "first_step": view.first_step} if view.epoch else {}),
        **({"first_step": before + 1} if before else {}),
        "workers": view.num_workers,
        "layout": trace.layout,
        "loss": view.losses[-1][1],
        "step_ms": trace.step_ms,
        **({"predicted_ms": view.header["predicted_ms"]} if "predicted_ms" in view.header else {}),
        **({f"{throughput[1]}_per_s": throughput[0]} if throughput else {}),
        **({"with_padding": True} if view.with_padding else {}),
        **({"observations": observations, "observed_s": observed_s} if observations else {}),
        "bubble_planned": planned.bubble,
        "bubble_actual": trace.bubble,
        "peak_activations": list(planned.peak_activations),
        "clock_error_ms": trace.clock_error_ms,
        "lost": lost.as_json(),
    }


def result_of(view: View, *more: str, told_layout: bool = False) -> dict[str, Any] | None:
    """Return a message of the summary of a run, with lines of `more`, and its figures; None if no step is complete.

    Args:
        told_layout: whether the layout has been printed before.
    """
    if (found := figures(view)) is None:
        return None
    layout = "" if told_layout and "epoch" not in found else found["layout"]
    return {"kind": "result", "text": summary(found, layout, *more), "json": found}


def sentence(found: dict[str, Any]) -> str:
    """Return a sentence on a run, from its figures."""
    planned = f" ({found['predicted_ms']:.0f} by the plan)" if "predicted_ms" in found else ""
    rates = [f", {found[f'{unit}_per_s']:,.0f} {unit}/s" for unit in ("tokens", "rows") if f"{unit}_per_s" in found]
    after = f" after step {found['first_step'] - 1}" if "first_step" in found and "epoch" not in found else ""
    rates += [" with padding"] if "with_padding" in found else []
    figures = f"{found['step_ms']:.0f} ms a step{planned}{''.join(rates)}, loss {found['loss']:.4f}"
    return f"{_count(found['steps'], 'step')}{after} on {_count(found['workers'], 'worker')}: {figures}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def summary(found: dict[str, Any], *more: str) -> str:
    """Return the summary of a run, printed at its end, from its figures; with lines of `more`."""
    epoch = f"figures are of epoch {found['epoch']}, from step {found['first_step']}" if "epoch" in found else ""
    lines = [*more, epoch and f"{epoch}: workers were others before"]
    if "observations" in found:
        times = _count(found["observations"], "time")
        lines.append(f"the model was observed {times}: {found['observed_s']:.1f} s of workers")
    return "\n".join([sentence(found), *filter(None, lines), *lost_lines(found)])


def lost_lines(found: dict[str, Any]) -> list[str]:
    """Return lines on the lost time of a run, from its figures."""
    return [f"a step's time: {found['lost']['line']}", f"costs most: {found['lost']['sentence']}"]
