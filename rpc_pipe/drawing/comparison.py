"""Schedules side by side as a table for the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from ..planning.compare import Row, format_bytes


def table(rows: Sequence[Row], num_workers: int, num_microbatches: int) -> Table:
    """Return a table of at most 80 columns.

    `acts` are activations in worker's shares; `copies` those of the weights on the worker with most. Asynchronous
    schedules are marked with the staleness of their gradients, in updates; synchronous ones that hold more than one
    copy of the weights by a star.
    """
    drawn = Table(title=f"{num_workers} workers, {num_microbatches} microbatches", box=None, pad_edge=False)
    drawn.add_column("schedule", no_wrap=True)
    headings = ["makespan", "step", "bubble", "acts"]
    with_memory = any(row.peak_memory is not None for row in rows)
    for heading in [*headings, *(["memory"] if with_memory else []), "msgs", "copies"]:
        drawn.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        if row.refused and not row.makespan:
            continue
        memory = [format_bytes(row.peak_memory or 0)] if with_memory else []
        late = f" ({max(row.staleness)} late)" if max(row.staleness) else " (asynchronous)"
        drawn.add_row(
            row.name + late * (not row.synchronous),
            f"{row.makespan:.5g}",
            f"{row.step_time:.5g}",
            f"{row.bubble:.1%}",
            f"{row.peak_activations:.3g}",
            *memory,
            str(row.messages),
            f"{max(row.weight_copies)}{'*' * row.replicates}",
            style="dim" if row.refused else None,
        )
    return drawn
