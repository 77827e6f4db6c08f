"""A run as files: scalars for TensorBoard, and JSON lines, one for each step, to look at again and for other programs.

    {"kind": "run", "workers": [...], "listings": [...]}          first, and again with another pipeline or program
    {"kind": "step", "step": 7, "loss": 2.3, "step_ms": 140.1, "tokens_per_s": ..., "bubble": 0.31, "lost": {...},
     "at": seconds since the epoch, "records": [...]}             a complete step; times in ns of the workers' clock
    {"kind": "evaluation", "step": 7, "loss": 2.4}               after so many steps
    {"kind": "event", "at": ..., "text": ..., "warning": true}
    {"kind": "end", "what": "failed", "text": why, "consequence": false}           unless all went well

`lost` stands at steps where it was worked out, for the steps since it was the last time.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO, Union

from ..dependency import ConfigError, Kind
from ..drawing.timeline import bubble, idle
from ..system.files import DAMAGED, refuse_special, refused
from ..tracing.board import Live, State, encode_record, number_or_word
from ..tracing.boards import RunBoards, RunUpdate, decode_record
from ..tracing.lost_time import LostTime
from ..tracing.run_folders import Ending
from ..tracing.trace import spans_of
from ..tracing.view import View

#: a run as a watcher sees it
Source = Union[RunBoards, "Replay"]
#: most steps of an update, fewer than a view keeps
_MOST_STEPS = 32


class _Sink:
    """Something that each step of a view is written to once."""

    def __init__(self) -> None:
        self._run: dict[int, int] = {}
        self._last_step = -1
        self._last_lost: LostTime | None = None

    def _new_steps(self, view: View) -> list[int]:
        """Return the complete steps since the last call."""
        if view.pipelines != self._run:
            self._run, self._last_step = view.pipelines, -1
        steps = [step for step in view.complete_steps(0) if step > self._last_step]
        self._last_step = max(steps, default=self._last_step)
        return steps

    def _new_lost(self, view: View) -> LostTime | None:
        """Return the lost time if it was worked out since the last call."""
        before, self._last_lost = self._last_lost, view.lost()
        return None if self._last_lost is before else self._last_lost


class Recording(_Sink):
    """Writes the updates of a view to a file.

    Raises:
        ConfigError: the file cannot be written.
    """

    def __init__(self, path: str | Path) -> None:
        super().__init__()
        with refused(ConfigError, f"--record {path}"):
            self._file: TextIO = Path(path).open("x", encoding="utf-8")
        #: the run that was written last, its epoch, and the microbatches of its listings
        self._told: tuple[dict[int, int], int, list[int]] | None = None
        self._last_event = 0.0
        self._ending: Ending | None = None

    def write(self, view: View) -> None:
        """Write everything that is new since the last call."""
        now = view.latest
        run = view.pipelines, view.epoch, [listing["microbatches"] for listing in now.listings.values()]
        if view.spec is not None and run != self._told:
            self._told = run
            self._line(
                kind="run",
                workers=[header for _, header in sorted(view.headers.items())],
                listings=[listing for _, listing in sorted(now.listings.items())],
                clock_error_ms=now.clock_error_ms,
            )
        steps = self._new_steps(view) if self._told else []
        lost = self._new_lost(view) if steps else None
        for step in steps:
            more = {"lost": lost.as_json()} if lost is not None and step == steps[-1] else {}
            records = [encode_record(record) for record in view.records(step)]
            self._line(kind="step", step=step, **_figures(view, step), **more, records=records)
        for step, loss in now.evaluations if self._told else ():
            self._line(kind="evaluation", step=step, loss=number_or_word(loss))
        for at, text, warning in view.events:
            if at > self._last_event:
                self._line(kind="event", at=at, text=text, warning=warning)
                self._last_event = at
        if now.ending not in (None, self._ending):
            self._line(kind="end", **now.ending._asdict())
        self._ending = now.ending
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def _line(self, **content: Any) -> None:
        self._file.write(json.dumps(content, separators=(",", ":")) + "\n")


def _figures(view: View, step: int) -> dict[str, Any]:
    """Return a step of a recording, for other programs."""
    records, seconds = view.records(step), view.length_ms(step) / 1e3
    return {
        "loss": number_or_word(records[0].loss),
        "step_ms": 1e3 * seconds,
        "tokens_per_s": records[0].tokens / seconds if records[0].tokens else None,
        "rows_per_s": records[0].rows / seconds,
        "bubble": bubble(spans_of(records), len(records)),
        "at": time.time(),
    }


class Replay:
    """A recording as a source of updates, at the pace of the run or as fast as it can be read.

    Args:
        speed: how many times as fast as it ran; None: as fast as it is read.

    Raises:
        ConfigError: the file cannot be read, or is no recording.
    """

    def __init__(self, path: Path, speed: float | None = None) -> None:
        self.name = str(path)
        self.speed = speed
        self._lines = list(_read(path))
        steps = [line for line in self._lines if line["kind"] == "step"]
        if not steps or self._lines[0]["kind"] != "run":
            raise ConfigError(f"watch {path}: is no recording with steps in it; rpc-pipe watch --record writes one")
        self._first_ns = min(record.start_ns for record in steps[0]["records"])
        self._began = time.monotonic()
        self._at = 0
        self._update = RunUpdate()

    def look(self) -> RunUpdate:
        now = self._first_ns + 1e9 * (time.monotonic() - self._began) * (self.speed or math.inf)
        lives = {**self._update.lives}
        self._update = update = replace(self._update, lives=lives, records=[], events=[], evaluations=[])
        while self._at < len(self._lines) and len(update.records) < _MOST_STEPS * len(update.headers or "1"):
            line = self._lines[self._at]
            if line["kind"] == "run":
                update.headers = {header.get("rank", header["worker"]): header for header in line["workers"]}
                members = max((header.get("members", 1) for header in line["workers"]), default=1)
                found = sorted(line["listings"], key=lambda listing: listing["microbatches"])
                update.listings = {listing["worker"] * members: listing for listing in found}
                update.clock_error_ms, update.ending = line["clock_error_ms"], None
            elif line["kind"] == "step":
                if max(record.end_ns for record in line["records"]) > now:
                    break
                update.records += line["records"]
            elif line["kind"] == "evaluation":
                update.evaluations.append((line["step"], float(line["loss"])))
            elif line["kind"] == "event":
                update.events.append((line["at"], line["text"], line["warning"]))
            elif line["kind"] == "end":
                update.ending = Ending(line["what"], line["text"], line["consequence"])
            self._at += 1
        for record in update.records:
            update.lives[record.worker] = Live(State.BETWEEN, record.step, since_ns=record.end_ns)
        update.now_ns = max((live.since_ns for live in update.lives.values()), default=0)
        return update

    @property
    def over(self) -> bool:
        return self._at == len(self._lines)


def _read(path: Path) -> Iterator[dict[str, Any]]:
    damaged = ""
    refuse_special(path, f"watch {path}")
    with refused(ConfigError, f"watch {path}: cannot be read"), path.open("rb") as file:
        for number, text in enumerate(file, 1):
            if damaged:  # the last line of a recording may be cut off, no other
                raise ConfigError(f"watch {path}: {damaged}")
            try:
                yield _line(text)
            except DAMAGED as error:
                damaged = f"line {number} is not of a recording: {type(error).__name__}: {error}"


def _line(text: bytes) -> dict[str, Any]:
    line: dict[str, Any] = json.loads(text.decode("utf-8-sig"))
    if line["kind"] == "run":
        for header in line["workers"]:
            Kind.learn(header.get("kinds", ()))
    elif line["kind"] == "step":
        line["records"] = [decode_record(record) for record in line["records"]]
    return line


def scalars_of(view: View, step: int) -> dict[str, float]:
    """Return the known figures of a step by name; rates are from end to end of steps, as a script's report has them."""
    records, length_ms = view.records(step), view.length_ms(step)
    seconds = view.took_ms(step) / 1e3
    found: dict[str, float | None] = {
        "loss": records[0].loss,
        "gradient norm": records[0].grad_norm,
        "learning rate": next((r.learning_rate for r in records if r.learning_rate is not None), None),
        "rows per s": records[0].rows / seconds,
        "tokens per s": records[0].tokens / seconds if records[0].tokens else None,
        "step/ms": length_ms,
    }
    for record, share in zip(records, idle(spans_of(records), len(records)), strict=True):
        found[f"bubble/worker {record.worker}"] = share
        found[f"peak MB/worker {record.worker}"] = record.peak_bytes / 1e6
    return {name: value for name, value in found.items() if value is not None and not math.isnan(value)}


class Scalars(_Sink):
    """Writes losses, gradient norm, learning rate, rates, times and bubbles of every step for TensorBoard.

    Raises:
        ConfigError: TensorBoard is not installed.
    """

    def __init__(self, folder: str | Path) -> None:
        super().__init__()
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ConfigError(f"--tensorboard: needs {error.name}; pip install '.[tensorboard]'") from error
        self._writer = SummaryWriter(str(folder))
        self._held_out: dict[int, float] = {}

    def write(self, view: View) -> None:
        """Write the steps that are new since the last call."""
        for step in self._new_steps(view):
            for name, value in scalars_of(view, step).items():
                self._writer.add_scalar(name, value, step)
        held_out = dict(view.held_out_losses)
        for step in [step for step, loss in held_out.items() if self._held_out.get(step) != loss]:
            self._writer.add_scalar("held-out loss", held_out[step], step)
        self._held_out = held_out
        lost = self._new_lost(view)
        for cause, ms in lost.parts.items() if lost is not None else ():
            self._writer.add_scalar(f"lost ms/{cause}", ms, self._last_step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
