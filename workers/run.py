"""One run of a worker's program: the state machine's instructions, carried out."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from ..dependency import PER_REPLICA, Action, B, Entry, F, G, I, Order, R, Spec, U, W
from .compute.device import Mark
from .compute.result import Losses, Result, pack_outputs
from .compute.shard import Shard
from .hooks import Arrived, Blocked, LayerTime, Record, StepRecord
from .mailbox import Arrival
from .state import Instruction, Pull, WorkerState
from .transport.payload import Payload, Tree, pack, unpack

if TYPE_CHECKING:
    from .actor import WorkerActor


_RESULT = "result of worker "


@dataclass(frozen=True)
class Work:
    """What a worker is asked to do once: a training step, an evaluation or a prediction."""

    spec: Spec
    program: Sequence[Entry]
    order: Order
    #: inputs of the model by microbatch; read where stage 0 is
    inputs: Sequence[Tree]
    #: targets by microbatch; read where the last stage is. None: outputs are wanted, not the loss
    targets: Sequence[Tree] | None
    #: each microbatch's share of the rows
    shares: Sequence[float]
    train: bool = True
    #: of the whole batch; tokens are counted if the inputs are whole numbers
    rows: int = 0
    tokens: int = 0


class Task(NamedTuple):
    """What an action means on this worker."""

    name: str
    shard: Shard
    #: whose payload it computes from; None: the batch, the loss, or nothing
    source: Action | None
    #: whether a successor here takes its payload, and which other workers' successors do
    here: bool
    others: tuple[int, ...]
    #: of a forward: whether its backward comes in two parts, and whether its activations are recomputed
    split: bool
    recompute: bool


class Tasks(dict[Action, Task]):
    """The tasks of a worker, each worked out when first looked up: the relation says the same in every step."""

    def __init__(self, spec: Spec, worker: int, shards: Mapping[tuple[int, int], Shard]) -> None:
        super().__init__()
        self._spec = spec
        self._worker = worker
        self._shards = shards

    def __missing__(self, action: Action) -> Task:
        spec, (stage, kind, microbatch) = self._spec, action
        source = None
        if kind is F and stage > 0:
            source = F(stage - 1, microbatch)
        elif kind in (B, I) and stage < spec.last_stage:
            source = spec.backward(stage + 1, microbatch)
        consumers = {spec.worker(successor) for successor in spec.successors(action)}
        task = self[action] = Task(
            str(action),
            self._shards[stage, microbatch if kind in PER_REPLICA else spec.route(microbatch)],
            source,
            self._worker in consumers,
            tuple(sorted(consumers - {self._worker})),
            kind is F and spec.splits(stage, microbatch),
            kind is F and spec.recomputes(stage),
        )
        return task


class Run:
    """Carries a WorkerState through one `Work` on the thread that computes."""

    def __init__(self, actor: WorkerActor, work: Work, lookahead: int, run: int) -> None:
        self._actor = actor
        self._work = work
        self._spec = spec = work.spec
        self._mailbox = actor.mailbox
        #: its number
        self._run = run
        self._tasks = actor.tasks(spec)
        self._state = WorkerState(work.program, work.order, lookahead)
        #: payloads by the action that made them: from other workers, or handed over on this one
        self._payloads: dict[Action, Payload] = {}
        self._marks: list[tuple[Action, Mark, Mark]] = []
        self._arrived: list[Arrived] = []
        hosts = [spec.worker(F(spec.last_stage, m)) for m in range(len(work.shares))]
        self._result = Result(hosts)
        self._outputs: dict[int, Tree] = {}
        #: forwards of the last stage still to come here, after which this worker tells its part of the result
        self._last_forwards = hosts.count(actor.worker)

    def complete(self) -> Result:
        """Run everything; return when this worker is done."""
        start_ns = time.perf_counter_ns()
        for shard in self._actor.shards.values():
            shard.train(self._work.train)
            shard.losses = Losses()
            shard.layer_times = [] if self._work.train and self._actor.courier.in_step else None
        for host in self._result.missing - {self._actor.worker}:
            self._mailbox.pull(self._run, self._towards(host), [(f"{_RESULT}{host}", True)])
        self._carry(self._state.start())
        while not self._state.complete:
            for arrival in self._mailbox.arrivals((self._run,)):
                self._take_in(arrival)
            action = self._state.take()
            if action is None:
                self._wait()
            else:
                self._execute(action)
        while self._result.missing:
            self._wait()
        self._mailbox.end(self._run)
        self._report(start_ns)
        # The count goes up only after a training step, which this may not have been.
        self._actor.listeners.idle(self._actor.step if self._work.train else self._actor.step - 1)
        return self._result

    def _carry(self, instructions: list[Instruction]) -> None:
        wanted: dict[int, list[tuple[Action | str, bool]]] = {}
        for instruction in instructions:
            if isinstance(instruction, Pull):
                wanted.setdefault(instruction.worker, []).append((instruction.action, instruction.carries))
        for peer, questions in wanted.items():
            self._mailbox.pull(self._run, peer, questions)

    def _take_in(self, arrival: Arrival) -> None:
        if isinstance(arrival.what, str):
            assert arrival.payload is not None
            host = int(arrival.what.removeprefix(_RESULT))
            self._result.add(host, arrival.payload)
            if host != self._actor.worker:
                self._tell(host, arrival.payload, [2 * self._actor.worker - self._towards(host)])
            return
        if arrival.payload is not None:
            self._payloads[arrival.what] = arrival.payload
            self._arrived.append(Arrived(arrival.what, arrival.peer, arrival.payload.num_bytes, arrival.at_ns))
        self._carry(self._state.arrived(arrival.what))

    def _wait(self) -> None:
        self._actor.listeners.waiting(self._actor.step, self._blocked)
        for arrival in self._mailbox.next_arrivals((self._run,), lambda: str(self._blocked())):
            self._take_in(arrival)

    def _blocked(self) -> Blocked:
        blocked = self._state.blocked()
        return Blocked(None, []) if blocked is None else Blocked(*blocked)

    def _execute(self, action: Action) -> None:
        if action.kind is U:
            while self._result.missing:  # the divisor; known long before, unless the last stage is late
                self._wait()
        actor, task = self._actor, self._tasks[action]
        actor.running = task.name
        actor.listeners.action_started(actor.step, action)
        begin = actor.courier.mark()
        payload = self._compute(action, task)
        end = actor.courier.mark()
        if payload is not None:
            self._hand_over(action, task, payload)  # first of all: others wait for it
        self._marks.append((action, begin, end))
        actor.running = ""
        self._mailbox.finished(self._run, task.name)
        self._carry(self._state.finished(action))

    def _hand_over(self, action: Action, task: Task, payload: Payload) -> None:
        """Give the payload to those its successors belong to: this worker, or others through the outbox."""
        if task.here:
            self._payloads[action] = payload
        if task.others:
            self._mailbox.publish(self._run, task.name, payload, task.others)

    def _compute(self, action: Action, task: Task) -> Payload | None:
        kind, microbatch, shard = action.kind, action.microbatch, task.shard
        if kind is F:
            return self._forward(action, task)
        if kind is W:
            shard.backward_weights(microbatch)
        elif kind is R:
            shard.recompute(self._actor.step, microbatch)
        elif kind is G:
            return shard.gradients()
        elif kind is U:
            self._update(shard, action)
        else:
            grads = None if task.source is None else self._actor.courier.ready(self._payloads.pop(task.source))
            return (shard.backward if kind is B else shard.backward_inputs)(microbatch, grads)
        return None

    def _update(self, shard: Shard, action: Action) -> None:
        """Sum the gradients of all replicas, in the order of routes, and apply them."""
        stage, _, route = action
        if self._spec.num_routes > 1:
            ready = self._actor.courier.ready
            # Not taken out: several replicas may be on this worker.
            shard.sum_gradients([
                shard.gradients() if r == route else ready(self._payloads[G(stage, r)])
                for r in range(self._spec.num_routes)
            ])  # fmt: skip
        shard.update(self._result.divisor)

    def _forward(self, action: Action, task: Task) -> Payload | None:
        work, courier, shard, step, m = self._work, self._actor.courier, task.shard, self._actor.step, action.microbatch
        if task.source is None:
            inputs = pack(courier.load(work.inputs[m]))
        else:
            inputs = courier.ready(self._payloads.pop(task.source))
        if action.stage < self._spec.last_stage:
            return shard.forward(step, m, inputs, split=task.split, recompute=task.recompute)
        if work.targets is None:
            output = shard.forward(step, m, inputs)
            assert output is not None
            self._outputs[m] = unpack(output)
        else:
            target = courier.load(work.targets[m])
            share = work.shares[m]
            split, recompute = task.split, task.recompute
            shard.forward(step, m, inputs, target=target, share=share, split=split, recompute=recompute)
        self._last_forwards -= 1
        if self._last_forwards == 0:
            self._tell_result()
        return None

    def _tell_result(self) -> None:
        """Every forward of the last stage on this worker is done: tell all workers, this one included."""
        stop = self._actor.stop_requested
        if self._work.targets is None:
            part = pack_outputs(self._outputs, stop)
        else:
            losses = Losses()
            for shard in self._actor.shards.values():
                losses.parts |= shard.losses.parts
                losses.summed |= shard.losses.summed
            part = losses.pack(stop)
        me = self._actor.worker
        self._tell(me, part, [me - 1, me, me + 1])

    def _tell(self, host: int, part: Payload, workers: Iterable[int]) -> None:
        there = [worker for worker in workers if 0 <= worker < self._actor.carrier.num_workers]
        others = [worker for worker in there if worker != self._actor.worker]
        self._mailbox.publish(self._run, f"{_RESULT}{host}", part, others, here=len(others) < len(there))

    def _towards(self, host: int) -> int:
        """The neighbour on the way to `host`: results go from worker to worker, as payloads mostly do."""
        return self._actor.worker + (1 if host > self._actor.worker else -1)

    def _report(self, start_ns: int) -> None:
        if not self._work.train:
            return
        actor = self._actor
        times = actor.courier.resolve([mark for _, begin, end in self._marks for mark in (begin, end)])
        records = [Record(a, b, e) for (a, _, _), b, e in zip(self._marks, times[::2], times[1::2], strict=True)]
        loss = self._result.loss
        actor.listeners.step_finished(
            StepRecord(
                actor.worker,
                actor.step,
                start_ns,
                time.perf_counter_ns(),
                records,
                self._arrived,
                [LayerTime(*time) for shard in actor.shards.values() for time in shard.layer_times or ()],
                float("nan") if loss is None else loss,
                self._work.rows,
                self._work.tokens,
                actor.courier.peak_bytes(),
                len(actor.carrier.outbox),
                len(self._work.shares),
            )
        )
