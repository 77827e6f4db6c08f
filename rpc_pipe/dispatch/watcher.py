"""The loop of `rpc-pipe watch`: it polls a run, and updates screen, page, files, metrics, and scalars for TensorBoard.

TensorBoard needs the extra `.[tensorboard]`.
"""

import asyncio
import contextlib
import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live as Display

from ..boards.run_boards import RunBoards
from ..boards.view import View
from ..dependency import ConfigError
from ..drawing.timeline import idle
from ..tracing.lost_time import lost_time
from ..tracing.run_summary import lost_lines
from ..tracing.trace import spans_of, trace_of
from .rows import describe, learning_rate
from .terminal import Screen


def scalars_of(view: View, step: int) -> dict[str, float]:
    """Return the known figures of a step by name; rates are from end to end of steps, as a script's report has them."""
    records, seconds = view.records(step), view.took_ms(step) / 1e3
    found: dict[str, float | None] = {
        "loss": records[0].loss, "gradient norm": records[0].grad_norm, "rows per s": records[0].rows / seconds,
        "learning rate": learning_rate(records),
        "tokens per s": records[0].tokens / seconds or None, "step/ms": view.length_ms(step),
    }  # fmt: skip
    for record, share in zip(records, idle(spans_of(records), len(records)), strict=True):
        found |= {f"bubble/worker {record.worker}": share, f"peak MB/worker {record.worker}": record.peak_bytes / 1e6}
    return {name: value for name, value in found.items() if value is not None and not math.isnan(value)}


class Scalars:
    """Writes figures of every step, evaluations, and the lost time by cause.

    Raises:
        ConfigError: TensorBoard is not installed.
    """

    def __init__(self, folder: str | Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ConfigError(f"--tensorboard: needs {error.name}; pip install '.[tensorboard]'") from error
        self._writer, self.close = (writer := SummaryWriter(str(folder))), writer.close
        self._run, self._last, self._seen = dict[int, int](), -1, set[tuple[str, float, int]]()

    def write(self, view: View) -> None:
        """Write what is new since the last call."""
        if view.pipelines != self._run:
            self._run, self._last = view.pipelines, -1
        steps = [step for step in view.complete_steps(0) if step > self._last]
        self._last = max([self._last, *steps])
        found = [(name, value, step) for step in steps for name, value in scalars_of(view, step).items()]
        beside = {("held-out loss", loss, step) for step, loss in view.held_out_losses}
        if steps and (lost := lost_time(view)) is not None:
            found += [(f"lost ms/{cause}", ms, self._last) for cause, ms in lost.parts.items()]
        for name, value, step in [*found, *(beside - self._seen)]:
            self._writer.add_scalar(name, value, step)
        self._seen = beside
        self._writer.flush()


#: seconds between polls; boards keep more steps than pass meanwhile, unless steps are very short
_LOOK_EVERY_S = 0.5
#: more steps than a board keeps
_MOST_STEPS = 4096
#: seconds that `--once` waits for a first step
_ONCE_S = 10.0
#: seconds between lines where the screen cannot be redrawn
_LINE_EVERY_S = 5.0


class Watcher:
    """Polls `source` and passes what is new to the view and the outputs.

    Args:
        typed: the options of `rpc-pipe watch` by name; `steps` are the first and the last for `trace`.
    """

    def __init__(self, source: RunBoards, typed: Mapping[str, Any]) -> None:
        self._source, self._typed = source, typed
        first, last = typed.get("steps", (0, 0))
        self._view = View(keep=_MOST_STEPS + last - first) if "trace" in typed else View()
        self._scalars: Scalars | None = None
        self.console = Console(highlight=False, emoji=False)

    async def run(self) -> None:
        async with contextlib.AsyncExitStack() as stack:
            if "tensorboard" in self._typed:
                self._scalars = Scalars(self._typed["tensorboard"])
                stack.callback(self._scalars.close)
            await self._serve(stack)
            if "trace" in self._typed:
                await self._trace()
            elif "once" in self._typed:
                await self._once()
            else:
                await self._follow(stack)

    async def _serve(self, stack: contextlib.AsyncExitStack) -> None:
        for name in (name for name in ("web", "metrics") if name in self._typed):
            option = f"--{name}"
            try:
                from .web import Server, parse_address
            except ImportError as error:
                raise ConfigError(f"{option}: needs {error.name}; pip install '.[dispatch]'") from error
            at = parse_address(option, self._typed[name])
            server = Server(self._view, self._source, option, *at, page=name == "web")
            address = await server.start()
            stack.push_async_callback(server.stop)
            self.console.print(f"{name} at {address}", markup=False, soft_wrap=True)

    def _look(self) -> None:
        stalled = self._view.stalled
        self._view.take(self._source.look())
        if self._view.stalled and not stalled:
            for line in self._view.hanging(self._source)[1]:
                self._view.note(line, warning=True)
        if self._scalars is not None:
            self._scalars.write(self._view)

    async def _follow(self, stack: contextlib.AsyncExitStack) -> None:
        screen = Screen(self._view, self._source.name)
        display, said, over_before, ended_before = None, 0.0, False, False
        if self.console.is_terminal and "web" not in self._typed:
            whole: dict[str, Any] = {"screen": True, "auto_refresh": False, "vertical_overflow": "crop"}
            display = stack.enter_context(Display(screen, console=self.console, **whole))
        while True:
            over = self._source.over
            self._look()
            ended = over and over_before  # twice in a row, as failed workers may be restarting
            if display is not None:
                display.update(screen, refresh=True)
            elif not ended and time.monotonic() > said + _LINE_EVERY_S and self._view.complete_steps(1):
                said = time.monotonic()
                self.console.print(screen.title(), soft_wrap=True)
            if ended and not ended_before:
                if display is not None:
                    display.stop()
                self._say_the_end()
            if ended and "web" not in self._typed:
                break  # a page stays, to be looked at
            over_before, ended_before = over, ended
            await asyncio.sleep(_LOOK_EVERY_S)

    def _say_the_end(self) -> None:
        ending = self._view.latest.ending
        how, style = ("has ended", None) if ending is None else (str(ending), "bold red")
        self.console.print(f"{self._source.name} {how}", style=style, markup=False, soft_wrap=True)
        lost = lost_time(self._view, fresh=True)
        for line in () if lost is None else lost_lines({"lost": lost.as_json()}):
            self.console.print(line, markup=False, soft_wrap=True)

    async def _once(self) -> None:
        deadline = time.monotonic() + _ONCE_S
        self._look()
        # Two steps, for the time between them.
        while not self._source.over and len(self._view.complete_steps(2)) < 2 and time.monotonic() < deadline:
            await asyncio.sleep(_LOOK_EVERY_S / 5)
            self._look()
        if "json" in self._typed:
            print(json.dumps({"name": self._source.name, **describe(self._view)}))
        else:
            self.console.print(Screen(self._view, self._source.name))

    async def _trace(self) -> None:
        """Wait until the last of the wanted steps is done, then write them."""
        path: str = self._typed["trace"]
        deadline, asked, told = time.monotonic() + _ONCE_S, self._typed.get("steps"), False
        option = "--trace" if asked is None else f"--steps {asked[0]}-{asked[1]}"
        while True:
            over = self._source.over
            self._look()
            there = self._view.complete_steps(0)
            if asked and there:
                if asked[0] < there[0]:
                    raise ConfigError(f"{option}: step {asked[0]} is over; the earliest still there is {there[0]}")
                if there[-1] < asked[1] and not told:
                    told = True
                    self.console.print(f"waiting for step {asked[1]}; the last one done is {there[-1]}")
            done = there[-1:] >= [asked[1]] if asked else there
            if over or done or (not there and time.monotonic() > deadline):
                break
            await asyncio.sleep(_LOOK_EVERY_S / 5)
        wanted = range(asked[0], asked[1] + 1) if asked else there
        missing = next((step for step in wanted if step not in set(there)), None)
        trace = trace_of(self._view, wanted) if there and missing is None else None
        if trace is None:
            what = "it has no complete step" if missing is None else f"step {missing} is not there"
            raise ConfigError(f"{option}: {self._source.name}: {what}")
        trace.write_chrome(path)
        said = f"steps {wanted[0]} to {wanted[-1]} written to {path}; clocks of workers agree within"
        self.console.print(f"{said} {trace.clock_error_ms:.3f} ms", markup=False, soft_wrap=True)
