"""Running a script in a worker: seeding, overrides of its pipelines, and outputs at its end."""

import os
import runpy
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ..boards.own_boards import collect, record, write_out
from ..dependency import ConfigError
from ..dependency.declared import OPTIONS
from ..dependency.pipeline_options import TYPED, Options
from ..launching import attaching
from ..launching import launcher_link as link
from ..launching.job import Job
from ..pipeline import Pipeline
from ..tracing.run_summary import FILES, LAST_STEPS, figures, summary
from ..workers.compute.modules.randomness import seed_process
from .options import CHECKPOINTS, MEMBERS, PIPELINE, refuse_typed, typed_checkpoints, write

#: below which the scripts are that `run` has itself: of `run --model`, and the built-in GPT
_PACKAGE = Path(__file__).parents[1]
#: options that need the last steps
_OF_STEPS = ("trace", "html", "json")
_PATHS = (*FILES, "checkpoint_folder", "resume")
#: options that have no effect without a pipeline
_OF_PIPELINE = (*PIPELINE, "save", "checkpoint_every", "resume", *_OF_STEPS)
#: options that have one without
_OF_JOB = {"workers", "seed", "threads", "transport", "nan", "trust_network", "port", *MEMBERS}


class TypedOptions(attaching.Overrides):
    """The options typed, by name, for every pipeline that is made from now on.

    The last one saves when it is closed or the script ends, and reports then.

    Args:
        schedule_options: from `--set`, `--window`, `--replicas` and `--slices`.
        tell: function that shows the user a line; called once for each difference.
    """

    def __init__(
        self, typed: Mapping[str, Any], schedule_options: Mapping[str, str], tell: Callable[[str], None], job: Job
    ) -> None:
        self._typed = {name: typed[option] for name, option in TYPED.items() if option in typed}
        self._schedule_options, self._tell, self._job = dict(schedule_options), tell, job
        self._told: set[str] = set()
        # Absolute paths, in case the script changes the working directory.
        paths = {name: os.path.abspath(typed[name]) for name in _PATHS if typed.get(name, "auto") != "auto"}
        self._asked = {**typed, **paths}
        self._pipe: Pipeline | None = None
        #: whether that pipeline has saved, and the message with its figures
        self._saved, self._result = False, dict[str, Any]()
        self._wants_steps = any(name in typed for name in _OF_STEPS)

    def over(self, said: Options) -> Options:
        """Return the options of a pipeline with the typed options in place of the script's."""
        options, planned = dict(said.schedule_options or {}), "plan" in self._typed
        for name, value in self._typed.items():
            shown = ",".join(map(str, value)) if isinstance(value, list) else str(value)
            old = getattr(said, name)
            self._replaced(TYPED[name], shown, name, old.name if name == "plan" and old else old, value)
        if planned or self._typed.get("schedule", said.schedule) != said.schedule:
            stay = {*self._schedule_options, *(() if planned else OPTIONS)}
            if gone := ", ".join(f"{name}={value!r}" for name, value in options.items() if name not in stay):
                by = "plan" if planned else "schedule"
                self._say(f"--{by} {self._typed[by]} leaves out the script's {gone}")
            options = {name: value for name, value in options.items() if name in stay}
        for name, value in self._schedule_options.items():
            self._replaced("set", f"{name}={value}", name, options.get(name), value)
        options |= self._schedule_options
        return replace(said, **{**self._typed, "schedule_options": options})

    def _replaced(self, option: str, shown: str, name: str, old: Any, new: Any) -> None:
        option = option.replace("_", "-")
        if old is not None and str(old) != str(new):
            old = old.__name__ if isinstance(old, type) else repr(old)
            self._say(f"--{option} {shown} replaces the script's {name}={old}")

    def _say(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            self._tell(text)

    def made(self, pipe: Pipeline) -> None:
        if self._pipe is not None and {"resume", "checkpoint_every"} & self._asked.keys():
            said = f"{self._asked['script']} makes several pipelines; use checkpoints.save and checkpoints.load in it"
            raise ConfigError(f"--checkpoint-every, --resume: {said}")
        self._pipe, self._saved, self._result = pipe, False, {}
        if self._asked.keys() & CHECKPOINTS:
            from ..checkpoints.resume_options import follow

            told = follow(pipe.checkpoints, *typed_checkpoints(self._asked), anew=not self._job.newcomer)
            if told and pipe.worker == 0:
                link.tell(kind="text", text=told)
        if self._wants_steps:
            record(pipe)

    def closing(self, pipe: Pipeline) -> bool:
        """Save before a pipeline is closed; return whether it stays open until the script ends.

        It does where an error ends its `with` block on some workers: the script may catch it.
        """
        error = sys.exc_info()[1]
        fails = error is not None and not (isinstance(error, KeyboardInterrupt) and link.stopping())
        if pipe is self._pipe and not fails:
            self._save()
        return pipe is self._pipe and fails

    def leave(self) -> None:
        """Save and report; every worker must call it."""
        typed, job = self._asked, self._job
        if self._pipe is None:
            named = [name for each in _OF_PIPELINE if (name := each.replace("-", "_")) not in _OF_JOB]
            refuse_typed(typed, named, f"{typed['script']} made no Pipeline")
            if job.worker == 0 and job.num_workers > 1:
                said = f"made no Pipeline: {job.num_workers} workers ran all of it, each by itself"
                link.tell(kind="text", text=f"{typed['script']} {said}")
        elif not self._saved:
            self._save()
        if self._result:
            link.tell(**self._result)

    def _save(self) -> None:
        pipe, typed, self._saved = self._pipe, self._asked, True
        assert pipe is not None
        write_out()  # worker 0 reads the files that the other workers, which may wait for it from here on, have written
        if "save" in typed:
            pipe.weights.save(typed["save"])
        if pipe.worker == 0:
            if self._wants_steps:
                from ..planning.comparison import describe_staleness

                self._report(str(pipe.actors[0].backend.device), describe_staleness(pipe.spec))
            elif "save" in typed:
                link.tell(kind="text", text=f"{FILES['save']} written to {typed['save']}")
        if "save" in typed or self._wants_steps:
            pipe.barrier()

    def _report(self, device: str, versions: list[str]) -> None:
        from ..tracing.trace import recent_trace

        history, typed = collect(), self._asked
        trace, found = recent_trace(history, LAST_STEPS), figures(history)
        if trace is None or found is None:
            raise ConfigError(f"{typed['script']} trained no step that --trace, --html or --json could tell of")
        if "trace" in typed:
            trace.write_chrome(typed["trace"], device)
        if "html" in typed:
            from ..dispatch.rows import draw_steps, whole_state
            from ..drawing.svg import draw_page

            state = whole_state(history, trace.run or typed["script"], True)
            write(typed["html"], draw_page(draw_steps(history, 1), state))
        files = {name: typed[name] for name in FILES if name in typed}
        lines = [*versions, *(f"{FILES[name]} written to {path}" for name, path in files.items())]
        self._result = {"kind": "result", "text": summary(found, *lines), "json": {**found, **files}}


def run_script(
    script: str, arguments: Sequence[str], typed: Mapping[str, Any], schedule_options: Mapping[str, str], job: Job
) -> None:
    """Run `script` as the main program with its arguments.

    Raises:
        ConfigError: a typed option needs a pipeline, and the script made none.
    """
    if "threads" in typed:
        torch.set_num_threads(typed["threads"])
    seed = typed.get("seed", 0)  # alike on every worker, because each makes a copy of the batches
    torch.manual_seed(seed)  # devices' generators too
    seed_process(seed)
    is_own = _PACKAGE in Path(script).parents

    def tell(text: str) -> None:
        if job.worker == 0 and not is_own:  # its line does not show these
            link.tell(kind="text", text=text)

    attaching.current = ending = TypedOptions(typed, schedule_options, tell, job)
    sys.argv = [script, *arguments]
    if not is_own:  # beside it lie files named as modules of Python are
        sys.path.insert(0, str(Path(script).resolve().parent))
    try:
        room = f"rpc_pipe.{Path(script).parent.name}." if is_own else ""
        runpy.run_path(script, run_name=f"{room}__main__")
    except KeyboardInterrupt:
        if link.stopping():  # the script has ignored a stop: all workers end here
            ending.leave()
        raise
    except SystemExit as stopped:
        if stopped.code not in (None, 0):
            raise
    finally:
        attaching.current = attaching.Overrides()
    ending.leave()
