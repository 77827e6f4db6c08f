"""The state that the parts of a worker share, and the records of its steps: inputs, bound tasks, state."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from ..dependency import NO_REDUCTIONS, Action, Entry, Order, Part, Reductions, Spec
from ..dependency.pipeline_options import Options
from .compute.devices.device import DeviceBackend, Timestamp
from .compute.modules.module_state import ModuleState
from .compute.result import Loss, Result
from .compute.shard import Shard
from .hooks import Arrived, Listeners
from .mailbox import Mailbox
from .state import WorkerState
from .transport.call import Call
from .transport.payload import Payload, Tree

if TYPE_CHECKING:
    from .compute.before_update import BeforeUpdate
    from .compute.parts.members import Members
    from .transport.scatter import Scatter


@dataclass(frozen=True)
class StepData:
    """The microbatches of a step on a worker."""

    #: model inputs, one tree per microbatch; read by the worker of stage 0, and by all workers if stages take fields
    inputs: list[Tree]
    #: targets, one tree per microbatch; read by the worker of the last stage. None: return outputs, not the loss
    targets: list[Tree] | None
    #: fraction of the batch's rows in each microbatch
    shares: list[float]
    #: rows and tokens of the whole batch; 0 tokens if the inputs are not integers; whether padding counts
    rows: int = 0
    tokens: int = 0
    with_padding: bool = False
    #: time (ns) spent waiting for the batch to be read, and the cause: disk, network or decode
    waited: tuple[int, str] = (0, "")
    #: if steps overlap: each microbatch's fraction of the rows of the update that takes its gradients
    scales: list[float] | None = None
    #: if microbatches are slices of sequences: where each begins and ends, and the sequence's length
    places: list[tuple[int, int, int]] | None = None
    #: the distribution from the reading worker; None: every worker reads the parts that it uses
    scatter: Scatter | None = None
    #: if microbatches run in another order than given: their numbers as given, in the order of the run
    order: tuple[int, ...] = ()
    #: of a round of generation: runs a forward in place of the shard's
    decode: Handler | None = None


@dataclass(frozen=True)
class StepInput:
    """One training step, evaluation or prediction on a worker: its actions, and its microbatches."""

    part: Part
    order: Order
    #: describes the call; other workers compare it with theirs
    call: Call
    data: StepData
    train: bool = True
    #: (number of a training step, norm of all gradients) -> whether the update is left out; None: it never is
    skips: Callable[[int, float], bool] | None = None
    #: results of other stages that an update waits for; `part` was compiled for them
    reductions: Reductions = NO_REDUCTIONS
    #: whether the step ends with an update; False while gradients accumulate over several steps
    updates: bool = True
    #: whether the pipeline drains after this step although steps overlap, because a checkpoint follows
    last: bool = False

    @property
    def spec(self) -> Spec:
        return self.part.spec


class Task(NamedTuple):
    """An action bound to its shard and handler; reused in every step."""

    entry: Entry
    name: str
    #: name under which its end is offered to peers
    done: str
    shard: Shard
    handler: Handler
    #: contexts that it runs in, the outermost first, made from what is running
    around: tuple[Around, ...]
    #: of a forward: whether its saved tensors are managed here (split backward, offload), and whether it is recomputed
    saves: bool
    recomputes: bool
    #: whether it is of the last stage
    is_last: bool
    #: numbers of the milestones in it that other actions need
    milestones: tuple[int, ...] = ()


class Question(NamedTuple):
    """The pulls from one worker in every step."""

    peer: int
    names: list[str]
    #: whether this worker computes from it
    to_compute: bool


class Bound(NamedTuple):
    """A part of a schedule bound to its worker; made once, for all its steps."""

    tasks: dict[Action, Task]
    questions: list[Question]
    #: by the name of the arrival
    arriving: dict[str, Action]


@dataclass(eq=False)
class Tally:
    """The results of a step, and the times of its actions."""

    #: by microbatch
    losses: dict[int, Loss] = field(default_factory=dict)
    outputs: dict[int, Tree] = field(default_factory=dict)
    #: set when `D` has run
    result: Result | None = None
    timestamps: list[tuple[Action, Timestamp, Timestamp]] = field(default_factory=list)
    arrived: list[Arrived] = field(default_factory=list)


@dataclass(eq=False)
class EndOfStep:
    """The shards at a step's end, and the reasons to undo updates."""

    #: shards and updates with complete gradients: summed over replicas and divided by the step's weight
    completed: set[tuple[Shard, int]] = field(default_factory=set)
    #: by such shard, with a scaled loss: whether all gradients are finite
    finite: dict[Shard, Tensor] = field(default_factory=dict)
    #: of shards updated before the global gradient norm was known: their norms, and the state before the update
    own_norms: dict[int, Tensor] = field(default_factory=dict)
    early: dict[Shard, BeforeUpdate] = field(default_factory=dict)
    #: whether such an update was undone, which invalidates the begun part of the next step
    taken_back: bool = False
    #: error raised by a step with weights that may still be undone, and the action that raised it
    failure: Exception | None = None
    failed: str = ""


class Offsets(NamedTuple):
    """The place of a step in a stream of overlapping steps: its first microbatch, update and slot."""

    microbatch: int = 0
    update: int = 0
    slot: int = 0


@dataclass(eq=False)
class Step:
    """The state of one step on a worker, from its first action to its last."""

    batch: StepInput
    state: WorkerState
    #: its actions on this worker
    tasks: dict[Action, Task]
    #: arriving actions, such as other workers', by name
    arriving: dict[str, Action]
    #: runs the actions that a milestone of this step lets run at once
    reached: Callable[[Step, Action, int], None]
    #: number under which workers exchange its payloads
    run: int
    #: index of the training step, from 0: random numbers are keyed by it
    number: int
    start_ns: int
    #: received payloads by the action that produced them, on another worker or on this one
    payloads: dict[Action, Payload] = field(default_factory=dict)
    forwards_left: int = 0
    #: parts of the batch that have not arrived from the worker that reads it
    awaited_inputs: set[str] = field(default_factory=set)
    tally: Tally = field(default_factory=Tally)
    end: EndOfStep = field(default_factory=EndOfStep)
    offsets: Offsets = field(default_factory=Offsets)
    #: whether it may have to be undone; if so, the state of modules before the first forward of each shard
    undoable: bool = False
    before: dict[Shard, ModuleState] = field(default_factory=dict)

    @property
    def ordinal(self) -> int:
        """Number of the training step from 1, as errors, listeners and watchers show it."""
        return self.number + 1


class ActionContext(NamedTuple):
    """An action that is running."""

    worker: Context
    step: Step
    task: Task

    def source(self) -> Payload | None:
        """Take the input payload of the action; None if it has none, as the backward of the loss."""
        sources = self.task.entry.sources
        if not sources:
            return None
        payload, backend = self.step.payloads.pop(sources[0]), self.worker.backend
        self.worker.given = payload = payload if backend.in_step else backend.ready(payload)
        return payload

    @property
    def microbatch(self) -> int:
        """The microbatch index as shards count it: through the whole stream if steps overlap."""
        return self.step.offsets.microbatch + self.task.entry.action.index

    def run(self) -> Payload | None:
        """Run the action in its contexts."""
        with ExitStack() as stack:
            for around in self.task.around:
                stack.enter_context(around(self))
            return self.task.handler(self)

    def reached(self, number: int) -> None:
        """Announce a milestone of the action."""
        self.step.reached(self.step, self.task.entry.action, number)


#: runs an action and returns its payload; actions on the resource `copy` run in a separate thread
Handler = Callable[[ActionContext], "Payload | None"]
Around = Callable[[ActionContext], AbstractContextManager[object]]


@dataclass(eq=False)
class Context:
    """A worker's shards, connections and settings, and its running action."""

    worker: int
    backend: DeviceBackend
    mailbox: Mailbox
    #: by (stage, route)
    shards: dict[tuple[int, int], Shard]
    #: the gradients of the whole model are clipped to this norm; None: no clipping
    max_grad_norm: float | None = None
    #: of the pipeline
    options: Options = field(default_factory=Options)
    #: reaction to a loss that is not finite: "stop", "warn" or "ignore"
    nan: str = "stop"
    listeners: Listeners = field(default_factory=Listeners)
    #: whether training can continue after a failed step: if all workers are threads of one process
    recovers: bool = False
    #: the processes that are this worker together; None: this one alone
    members: Members | None = None
    #: training steps that are complete, and that have begun
    step: int = 0
    next_step: int = 0
    #: evaluations and predictions that are complete
    evaluated: int = 0
    #: the action that runs now, such as `2B3`, and its step, for error messages
    running: str = ""
    running_step: int = 1
    #: the payload that it computes from
    given: Payload | None = None
    #: set by signal handlers or the caller; all workers then stop after the same step (see Result.stop)
    stop_requested: bool = False
    #: set by the launcher of an elastic job; all workers then rest after the same step (see Result.rest)
    rest_requested: bool = False

    @property
    def learning_rate(self) -> float | None:
        """Learning rate of the next update, of the first parameter group here; None: nothing here is trained."""
        optimizers = (shard.optimizer for shard in self.shards.values() if shard.optimizer is not None)
        groups = (group for each in optimizers for group in each.param_groups)
        return next((float(g["lr"]) for g in groups if g.get("lr") is not None), None)
