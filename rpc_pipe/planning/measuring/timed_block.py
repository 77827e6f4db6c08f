"""A block that runs F, B, R, I and W on one microbatch, to measure its times and its kept and allocated bytes."""

import os
import time
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, islice
from statistics import median

import torch
from torch import Tensor, nn

from ...dependency import B, F, I, Kind, R, W
from ...workers.compute.autograd_graph import children_first
from ...workers.compute.split_backward import Saved, WeightBackward, backward_inputs
from ...workers.transport.payload import Tree, pack, tensors_of, unpack
from ..footprint import Size
from ..profile import LayerCost

#: runs a forward; returns the leaves that get gradients, the next block's input, and the roots of backward
Forward = Callable[[], tuple[list[Tensor], Tree, list[Tensor]]]
#: runs an action, given its kind
Act = Callable[[Kind, Callable[[], object]], object]
#: name of the profiler event around each action
_EVENT = "rpc_pipe.planning.peak_working_bytes"


def milliseconds(run: Callable[[], object]) -> float:
    """Return how long `run` takes, the work of a GPU included."""
    _wait()
    begin = time.perf_counter()
    run()
    _wait()
    return 1e3 * (time.perf_counter() - begin)


def _wait() -> None:
    if torch.accelerator.is_available():  # does nothing where no device has been used
        torch.accelerator.synchronize()


def num_bytes(tree: Tree) -> int:
    """Return the bytes of the tensors of a tree."""
    return sum(tensor.nbytes for tensor in tensors_of(tree))


class TimedBlock:
    """A block with its measured times and kept bytes.

    Args:
        forward: runs it on one microbatch.
        named: its parameters with their names.
        inputs: the payload from the block before.
        buffers: bytes of its buffers.
    """

    def __init__(
        self,
        forward: Forward,
        named: Sequence[tuple[str, nn.Parameter]],
        name: str = "",
        inputs: Tree = (),
        buffers: float = 0,
    ) -> None:
        self.forward, self.named, self.name = forward, named, name
        self.inputs, self.buffers, self.weights = num_bytes(inputs), buffers, sum(p.nbytes for _, p in named)
        self.divided: Mapping[str, float] = {}
        self.trained = [(name, parameter) for name, parameter in named if parameter.requires_grad]
        #: milliseconds of all its runs, by kind
        self.runs: defaultdict[Kind, list[float]] = defaultdict(list)
        #: input of the next block, of the last run
        self.output: Tree = ()
        #: bytes of the last run that F keeps for backward, I for W, and F's parts in inputs and outputs
        self.kept = Size()
        #: names of the operators that have run backward, inputs first
        self._operators: tuple[str, ...] = ()

    @property
    def num_bytes(self) -> float:
        """Bytes that it keeps for backward, and of its gradients."""
        return self.kept.activations + self.weights

    @property
    def times(self) -> dict[Kind, float]:
        """The median milliseconds of each kind."""
        found = {kind: median(took) for kind, took in self.runs.items()}
        return {**found, R: found[F]}

    @property
    def cost(self) -> LayerCost:
        """The block's costs without updates and without working memory."""
        size = replace(self.kept, inputs=self.inputs, outputs=num_bytes(self.output))
        return LayerCost(self.times, size, self.name, self.divided)

    @property
    def signature(self) -> Hashable:
        """Equal for blocks that compute the same, as the layers of a transformer do."""
        shapes = tuple([(parameter.shape, parameter.dtype) for _, parameter in self.named])
        return (self._operators, shapes, self.kept, num_bytes(self.output)) if self._operators else id(self)

    @property
    def fastest(self) -> float:
        """The milliseconds of F and B at their fastest; noise only adds to them."""
        return sum(min(self.runs[kind]) for kind in (F, B))

    def run(self, act: Act | None = None) -> None:
        """Run F, B, R, I and W."""
        for _ in self.phases(act):
            pass

    def phases(self, act: Act | None = None) -> Iterator[None]:
        """Do the same in parts, so that blocks can take turns: F; B; R; I and W; freeing the gradients.

        Gradients of weights exist already and are added to, as for all microbatches but the first. R is the same as F,
        with a split backward.

        Args:
            act: runs an action; it is timed by default.
        """
        act = act or self._time
        self._set_gradients(lambda parameter: torch.full_like(parameter, 0.0))
        made: list[tuple[list[Tensor], Tree, list[Tensor]]] = []
        act(F, lambda: made.append(self.forward()))
        yield
        roots = made.pop()[2]
        starts = [torch.ones_like(root) for root in roots]
        act(B, lambda: torch.autograd.backward(roots, starts) if roots else None)
        del roots
        starts.clear()
        yield
        saved = Saved()
        with saved.hooks():
            act(R, lambda: made.append(self.forward()))
        yield
        leaves, output, roots = made.pop()
        nodes = children_first(root.grad_fn for root in roots if root.grad_fn)
        self._operators = tuple([node.name() for node in nodes])
        weights = {parameter.untyped_storage().data_ptr() for _, parameter in self.named}
        held = saved.num_bytes(weights)
        own = {leaf.untyped_storage().data_ptr() for leaf in leaves} - weights
        passed = {tensor.untyped_storage().data_ptr() for tensor in tensors_of(output)} - weights
        kept_inputs, kept_outputs = (sum(held[each] for each in held.keys() & at) for at in (own, passed))
        self.output = unpack(pack(output))
        del output
        deferred: list[WeightBackward] = []
        grads: list[Tensor | None] = [torch.ones_like(root) for root in roots]
        act(I, lambda: deferred.append(backward_inputs(roots, grads, leaves, saved)[1]))
        after = sum(saved.num_bytes(weights).values()) + deferred[0].num_bytes()
        keeps = {"kept_inputs": kept_inputs, "kept_outputs": kept_outputs}
        self.kept = Size(activations=sum(held.values()), after_inputs=after, **keeps)
        act(W, deferred[0].run)
        yield
        self._set_gradients(lambda parameter: None)

    def gradients(self) -> list[Tensor]:
        """Return the gradients of the trained parameters for one microbatch."""
        self._set_gradients(lambda parameter: torch.full_like(parameter, 0.0))
        if roots := self.forward()[2]:
            torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])
        found = [parameter.grad for _, parameter in self.trained if parameter.grad is not None]
        self._set_gradients(lambda parameter: None)
        return found

    def _set_gradients(self, make: Callable[[Tensor], Tensor | None]) -> None:
        """Make gradients: of 0, which touches their memory pages, or none."""
        for _, parameter in self.trained:
            parameter.grad = make(parameter)

    def _time(self, kind: Kind, run: Callable[[], object]) -> None:
        self.runs[kind].append(milliseconds(run))


def with_working_memory(costs: Sequence[LayerCost], blocks: Sequence[TimedBlock]) -> list[LayerCost]:
    """Return the costs of blocks with the bytes that they allocate while they run, besides the kept bytes."""
    on_gpu = any(parameter.device.type != "cpu" for block in blocks for _, parameter in block.named)
    peaks, found = iter((_peaks_on_gpu if on_gpu else _peaks_on_cpu)(blocks)), []
    for cost in costs:
        first, *others = islice(peaks, 5)  # of F, B, R, I and W, above the bytes at the start of each
        forward = first - (cost.size.activations - cost.size.kept_inputs)
        found.append(replace(cost, size=replace(cost.size, working=max(0.0, forward, *others))))
    return found


def _peaks_on_gpu(blocks: Sequence[TimedBlock]) -> list[float]:
    peaks: list[float] = []

    def act(kind: Kind, run: Callable[[], object]) -> None:
        before = torch.accelerator.memory_allocated()
        torch.accelerator.reset_peak_memory_stats()
        run()
        peaks.append(float(torch.accelerator.max_memory_allocated() - before))

    for block in blocks:
        block.run(act)
    return peaks


def _peaks_on_cpu(blocks: Sequence[TimedBlock]) -> list[float]:
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else it writes to stderr that it begins and ends

    def act(kind: Kind, run: Callable[[], object]) -> None:
        with torch.profiler.record_function(_EVENT):
            run()

    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True, acc_events=True) as seen:
        for block in blocks:
            block.run(act)
    assert seen.profiler is not None and seen.profiler.kineto_results is not None
    events = seen.profiler.kineto_results.events()
    windows = sorted((e.start_ns(), e.start_ns() + e.duration_ns()) for e in events if e.name() == _EVENT)
    changes = sorted(((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"), key=lambda c: c[0])
    starts = [start for start, _ in changes]
    inside = [changes[bisect_left(starts, begin) : bisect_right(starts, end)] for begin, end in windows]
    return [float(max(accumulate((amount for _, amount in each), initial=0))) for each in inside]
