"""A stream of steps through one worker: the state machines' instructions, carried out on the thread that computes.

A stream has two open steps at most. The next one is opened when the last forward of this one has been started: its
forwards wait only for their stage's update, so the pipeline stays full from step to step.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import TYPE_CHECKING

import torch

from ..dependency import Action, Entry, Milestone
from .between_steps import BetweenSteps
from .compute.modules.autocast import forget_casts
from .compute.result import IGNORED, Result
from .hooks import Arrived, Blocked, Record, StepRecord
from .state import WorkerState
from .step import ActionContext, Bound, Context, Step, StepData, StepInput
from .transport.carrier import Delivered
from .transport.payload import Payload, pack, tensors_of, unpack

if TYPE_CHECKING:
    from .overlap import Overlap

_MOST_OPEN = 2


class Stream:
    """Carries batches through a worker; gives the result of each, in order.

    Args:
        bound_for: returns the tasks of a batch's part on the worker.
        overlap: opens the steps of a schedule that is not synchronous, and chooses between their actions.
    """

    def __init__(
        self, worker: Context, batches: Iterator[StepInput], bound_for: Callable[[StepInput], Bound],
        overlap: Overlap | None,
    ) -> None:  # fmt: skip
        self._worker = worker
        self._mailbox, self._carrier = worker.mailbox, worker.mailbox.carrier
        self._batches = batches
        self._bound_for, self._overlap = bound_for, overlap
        self._ended = False
        self._between_steps = BetweenSteps(worker)
        #: open steps, the oldest first, by their number among runs
        self._steps: dict[int, Step] = {}
        #: the one that was opened last, while it is open
        self._newest: Step | None = None
        #: results of steps that have been completed before they were asked for
        self._flushed = deque[Result]()

    def next(self) -> Result | None:
        """Run until the oldest step is complete on this worker; None: there are no more.

        No iterator: a StopIteration that a model raises would end it.
        """
        if self._flushed:
            return self._flushed.popleft()
        self._between_steps.end(self._begun())  # modules are as forwards of the next step have left them
        if self._steps:
            self._carrier.calls.go_on(next(iter(self._steps)))
        self._open_next()
        if not self._steps:
            return None
        oldest = next(iter(self._steps.values()))
        for shard in self._worker.shards.values():
            shard.train(oldest.batch.train)
        with torch.set_grad_enabled(oldest.batch.train):
            while oldest.state.left:
                self._take_arrivals()
                chosen, has_moved = self._choose_beside()
                if chosen is None and not has_moved and oldest.state.left:  # the last one may have been a copy
                    self._wait()
                    chosen, _ = self._choose_beside()
                if chosen is not None:
                    self._execute(*chosen)
                self._open_next()
        result = self._close(oldest)
        self._carrier.calls.go_on(0)
        self._between_steps.begin(self._begun())
        return result

    def _begun(self) -> Step | None:
        """Return the oldest step if a forward of it has run."""
        oldest = next(iter(self._steps.values()), None)
        return None if oldest is None or oldest.forwards_left == oldest.batch.part.num_forwards else oldest

    def _open_next(self) -> None:
        if self._overlap is not None:
            if not self._ended:
                self._overlap.open_next(self._batches, self._steps, self._open)
            return
        newest = self._newest
        if self._ended or (newest is not None and newest.forwards_left) or len(self._steps) == _MOST_OPEN:
            return
        batch = next(self._batches, None)
        if batch is None:
            self._ended = True
            return
        self._open(batch, [] if newest is None else [newest.state])

    def _open(self, batch: StepInput, before: Sequence[WorkerState], most_open: int = _MOST_OPEN) -> Step:
        """Begin a step, and ask other workers for its inputs."""
        scatter, me = batch.data.scatter, self._worker.worker
        awaited = scatter.parts_for(me) if scatter is not None else set()
        state = WorkerState(
            batch.part, batch.order, before, apart=self._worker.members is not None, awaits_inputs=bool(awaited)
        )
        # In the middle of a stream, too, an evaluation draws the numbers of the step that would be next.
        number = self._worker.next_step if batch.train else self._worker.step
        # It may have to be undone, or rests while the caller acts.
        undoable = self._overlap is not None or self._worker.recovers or bool(self._steps and batch.train)
        for shard in self._worker.shards.values() if batch.train else ():
            shard.updating.refuse_untrained()
        run, (tasks, questions, arriving) = self._mailbox.begin(batch.call, most_open - 1), self._bound_for(batch)
        if not self._steps:
            self._carrier.calls.go_on(run)
        self._worker.next_step += batch.train
        step = self._newest = self._steps[run] = Step(
            batch, state, tasks, arriving, self._reached, run, number, time.perf_counter_ns()
        )  # fmt: skip
        step.forwards_left, step.undoable, step.awaited_inputs = batch.part.num_forwards, undoable, awaited
        for peer, names, to_compute in questions:
            self._mailbox.pull(run, peer, names, to_compute=to_compute)
        if scatter is not None:
            for what in awaited:
                self._mailbox.pull(run, scatter.reader, [what])
            for what, takers in scatter.takers.items() if me == scatter.reader else ():
                # It has been read into memory: no device is waited for.
                self._carrier.outbox.offer((run, what), pack(scatter.lists[what]), takers)
        return step

    def flush(self) -> None:
        """Complete the steps that overlap; their results are given next. No synchronous step waits for a later one."""
        if self._overlap is not None:
            self._overlap.flush(self.next, self._steps, self._flushed)

    def abandon(self) -> None:
        """Undo incomplete steps; all workers do so after the same step."""
        if not self._steps:
            if self._overlap is not None:
                self._overlap.abandon()
            return
        self._between_steps.abandon(next(iter(self._steps.values())))
        for shard in self._worker.shards.values():
            shard.train(True)  # back to the modes that their owner gave them
            shard.abandon()
        for run in self._steps:
            self._carrier.abandon(run)
        self._steps.clear()
        self._newest = None
        self._worker.next_step = self._worker.step

    def _choose_beside(self) -> tuple[tuple[Step, Entry] | None, bool]:
        """Run all actions beside compute; return the next compute action, and whether anything ran."""
        has_moved = False
        for step in self._steps.values():
            state = step.state
            if not (state.controls or state.links or state.copies):
                continue
            while (entry := state.take("control") or state.take("link")) is not None:
                self._execute(step, entry)
                has_moved = True
            while (entry := step.state.take("copy")) is not None:
                self._copy(step, entry)
        return self._choose(), has_moved

    def _choose(self) -> tuple[Step, Entry] | None:
        """Return the next compute action; None if nothing may run now."""
        if self._overlap is not None:
            return self._overlap.choose(self._steps)
        for step in self._steps.values():
            entry = step.state.take()
            if entry is not None:
                return step, entry
            if not step.state.may_be_overtaken:
                break
        return None

    def _take_arrivals(self) -> None:
        for arrival in self._mailbox.arrivals(self._steps):
            self._take_in(arrival)

    def _take_in(self, arrival: Delivered) -> None:
        peer, (run, name), payload, at_ns = arrival
        assert payload is None or isinstance(payload, Payload)
        step = self._steps[run]
        action = step.arriving.get(name)
        if action is None:  # a part of the batch
            assert payload is not None and step.batch.data.scatter is not None
            step.batch.data.scatter.lists[name][:] = unpack(payload)
            step.awaited_inputs.remove(name)
            if not step.awaited_inputs:
                step.state.inputs_arrived()
        elif peer == self._worker.worker:  # a copy made on this worker
            self._finish(step, action, payload)
        else:
            if payload is not None:
                step.payloads[action] = payload
                if step.batch.train:  # a report tells them
                    step.tally.arrived.append(Arrived(action, peer, payload.num_bytes, at_ns))
            step.state.arrived(action)

    def _reached(self, step: Step, action: Action, number: int) -> None:
        """Run the exchanges that a milestone lets run, within the action that has reached it."""
        worker = self._worker
        step.state.reached(Milestone(action, number))
        if worker.backend.in_step:  # a GPU has the whole action in its queue long before payloads arrive
            self._take_arrivals()
        outer = worker.running, worker.given
        while (entry := step.state.take("link")) is not None:
            self._execute(step, entry)
        worker.running, worker.given = outer

    def _wait(self) -> None:
        self._worker.listeners.tell("waiting", next(iter(self._steps.values())).ordinal, self._blocked)
        for arrival in self._mailbox.next_arrivals(self._steps, self._awaited, looked=True):
            self._take_in(arrival)

    def _awaited(self) -> str:
        """Return the things that the oldest step waits for, for an error."""
        oldest = next(iter(self._steps.values()))
        if oldest.awaited_inputs:
            return f"{' and '.join(sorted(oldest.awaited_inputs))} of step {oldest.ordinal}"
        return str(self._blocked())

    def _blocked(self) -> Blocked:
        for step in self._steps.values():
            blocked = step.state.blocked()
            if blocked is not None:
                return Blocked(*blocked)
        return Blocked(None, [])

    def _execute(self, step: Step, entry: Entry) -> None:
        worker, action = self._worker, entry.action
        task = step.tasks[action]
        if step.undoable and action.kind.way == 1 and task.shard not in step.before:
            task.shard.turn()
            step.before[task.shard] = task.shard.state.probe.before(task.shard.state.weights, whole_step=True)
        worker.running, worker.running_step, worker.given = task.name, step.ordinal, None
        worker.listeners.tell("action_started", step.ordinal, action)
        begin = worker.backend.timestamp()
        try:
            ctx = ActionContext(worker, step, task)
            payload = ctx.run() if task.around else task.handler(ctx)
        except Exception as error:
            before = next(iter(self._steps.values()))
            if before is step or not before.batch.reductions.validated:
                raise
            # Its weights may be undone.
            step.end.failure, step.end.failed = error, task.name  # it counts if the step before stands
            worker.running = ""
            return
        end = worker.backend.timestamp()
        step.tally.timestamps.append((action, begin, end))
        step.forwards_left -= action.kind.way == 1
        self._finish(step, action, payload)
        worker.running, worker.given = "", None

    def _finish(self, step: Step, action: Action, payload: Payload | None) -> None:
        task = step.tasks[action]
        if payload is not None:  # first of all: peers wait for it
            if task.entry.consumed_locally:
                step.payloads[action] = payload
            if task.entry.consumers:
                self._mailbox.publish(
                    step.run, task.name, payload, task.entry.consumers, to_compute=action.kind.resource != "control"
                )
        self._carrier.outbox.finish((step.run, task.done))
        step.state.finished(action)

    def _copy(self, step: Step, entry: Entry) -> None:
        """Let an action run beside compute; that it is finished arrives like everything else."""
        task = step.tasks[entry.action]
        self._worker.listeners.tell("action_started", step.ordinal, entry.action)
        begin, follow = self._worker.backend.timestamp(), self._worker.backend.as_here()

        def does() -> Payload | None:
            follow()  # the current device and stream belong to a thread
            payload = ActionContext(self._worker, step, task).run()
            step.tally.timestamps.append((entry.action, begin, self._worker.backend.timestamp()))
            return payload

        def copied(future: Future[Payload | None]) -> None:
            self._carrier.deliver((step.run, task.name), future.exception() or future.result())

        _copier(self._worker.worker).submit(does).add_done_callback(copied)

    def _close(self, step: Step) -> Result:
        worker = self._worker
        del self._steps[step.run]
        if not self._steps:
            self._newest = None
        self._carrier.end(step.run)
        for shard, module_state in step.before.items():
            shard.turn()
            shard.state.probe.note(module_state)
        if step.batch.train:
            self._report(step)
            worker.step += 1
        else:
            for shard in worker.shards.values():
                shard.train(True)  # back to the modes that their owner gave them
            forget_casts()  # made without gradients
            worker.evaluated += 1
        # The count grows only after a training step, which this may not have been.
        worker.listeners.tell("idle", worker.step)
        assert step.tally.result is not None
        self._ended |= step.tally.result.stop
        self._confirm(step)
        if step.batch.train and step.tally.result.loss is not None and not math.isfinite(step.tally.result.loss):
            from .not_finite import report

            report(self._worker, step, step.tally.result)
        elif step.batch.train and step.ordinal == 1 and (step.tally.result.summed or _ignores(step.batch.data)):
            from .not_finite import report_weights

            report_weights(self._worker, step, step.tally.result)
        return step.tally.result

    def _confirm(self, step: Step) -> None:
        """Go on with the step after `step`, or begin it again if the update of `step` was undone."""
        assert step.tally.result is not None
        if step.tally.result.stop:
            return  # all workers stop
        for other in list(self._steps.values()):
            if step.end.taken_back:
                for module_state in other.before.values():
                    module_state.forget_weights()
                self.abandon()
                # Payloads that peers have not taken, of the step before and of the abandoned run, are kept for them.
                self._open(other.batch, [], _MOST_OPEN + 1).undoable = True
            elif other.end.failure is not None:
                self._worker.running, self._worker.running_step = other.end.failed, other.ordinal
                raise other.end.failure

    def _report(self, step: Step) -> None:
        worker = self._worker
        actions, begins, ends = zip(*step.tally.timestamps, strict=True)
        times = worker.backend.resolve([*begins, *ends])
        records = list(map(Record, actions, times[: len(begins)], times[len(begins) :]))
        loss, norm = (None, None) if step.tally.result is None else (step.tally.result.loss, step.tally.result.norm)
        worker.listeners.tell(
            "step_finished",
            StepRecord(
                worker.worker, step.ordinal, step.start_ns, time.perf_counter_ns(), records, step.tally.arrived,
                float("nan") if loss is None else loss, step.batch.data.rows, step.batch.data.tokens,
                worker.backend.peak_bytes(), len(self._carrier.outbox), len(step.batch.data.shares),
                *step.batch.data.waited, step.batch.data.order, step.batch.data.with_padding, norm,
                worker.learning_rate, observations=sum(shard.slice.observed[0] for shard in worker.shards.values()),
                observed_ns=sum(shard.slice.observed[1] for shard in worker.shards.values()),
            ),
        )  # fmt: skip


@cache
def _copier(worker: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, f"copies_of_worker_{worker}")


def _ignores(data: StepData) -> bool:
    """Return whether some labels of a batch are to be left out."""
    given = (each for each in tensors_of([data.inputs, data.targets]) if each.dtype == torch.int64)
    return any(not each.is_meta and bool((each == IGNORED).any()) for each in given)
