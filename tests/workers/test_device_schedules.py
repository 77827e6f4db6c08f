"""Random schedules, payloads and slices on the test device: no race, no wait of a host, and the bits of one process."""

import contextlib
import os
import random
from functools import partial

import pytest
import torch
from carriers import loopback_carriers
from device_races import Races, Watch, WatchedCuda
from fake_cuda import Event, Stream
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from random_specs import RandomSlots
from small_models import Cached
from training_options import pipeline_with
from unkind import MODELS, batches_for, differences

from rpc_pipe import Pipeline, Training, own_workers
from rpc_pipe.dependency import ConfigError, ScheduleError
from rpc_pipe.schedules import SCHEDULES
from rpc_pipe.workers import run, thread_pool
from rpc_pipe.workers.compute.devices.accelerator import AcceleratorBackend
from rpc_pipe.workers.transport import shared_memory
from rpc_pipe.workers.transport.device_way import HostMemory
from rpc_pipe.workers.transport.local import LocalPost, local_carriers

SYNCHRONOUS = [name for name, cls in SCHEDULES.items() if cls.synchronous]
#: how payloads go: by the host, on one device, or from device to device
WAYS = ["host", "one device", *(["blocks", "blocks of the host"] if shared_memory.POSSIBLE else [])]
#: models that read numbers themselves
READS = {"stochastic depth", "counter handed on", "views"}
RECOMPUTING = {name for name in SYNCHRONOUS if SCHEDULES[name](num_workers=2, num_microbatches=2).recomputes(0)}
#: models with buffers, which refuse an order of forwards other than that of microbatches
BUFFERED = {
    "counter handed on",
    "moving average",
    "average just moved",
    "spectral norm",
    "spectral norm of old",
    "batch norm",
    "frozen",
    "hooks",
}


@contextlib.contextmanager
def watched(model, way, pace):
    """Let workers compute on the test device; yield what is found there."""
    races, one, count = Races(), Stream(eager=True), random.Random(pace)
    settings_of, execute = thread_pool.callers_settings, run.Stream._execute
    #: blocks of the host, which the consumer must not map again: races are found by the memory that is accessed
    mapped, of_the_host, made = {}, HostMemory.block, []

    def settings_here():
        own = settings_of()

        @contextlib.contextmanager
        def both():
            with own(), Watch(races):
                yield

        return both

    def executes(loop, step, entry):
        may_wait = entry.action.kind.letter in "UV" or step.number == 0  # slices are compared in the first step
        with races.action("" if may_wait or model in READS else str(entry.action)):
            execute(loop, step, entry)

    def backend_for(name, place=0):
        return AcceleratorBackend(WatchedCuda(races, one if way == "one device" else None))

    def carriers(count):
        if "blocks" not in way:
            return local_carriers(count)
        made.extend(found := loopback_carriers(count))
        return found

    def refused(cuda, identity, handle):
        raise RuntimeError("CUDA error: invalid resource handle")

    def one_mapping(memory, size, number):
        block, event, shared = of_the_host(memory, size, number)
        mapped[shared] = block
        return block, event, shared

    with pytest.MonkeyPatch.context() as patch:
        Stream.awaited.clear()
        patch.setattr(thread_pool, "callers_settings", settings_here)
        patch.setattr(run.Stream, "_execute", executes)
        patch.setattr(own_workers, "backend_for", backend_for)
        patch.setattr(own_workers, "local_carriers", carriers)
        patch.setattr(Event, "waits", staticmethod(races.wait))
        if way == "host":
            patch.setattr(LocalPost, "takes_from_device", lambda post, peer, device: False)
        if way == "blocks of the host":
            patch.setattr(WatchedCuda, "opened", refused)
            patch.setattr(HostMemory, "block", one_mapping)
            patch.setattr(HostMemory, "opened", lambda memory, shared: (mapped[shared], None))
        if pace:
            patch.setattr(Stream, "pace", staticmethod(lambda waiting: count.randrange(waiting + 1)))
        try:
            yield races
        finally:
            for carrier in made:
                carrier.close()
                carrier.post.link.end_threads()


def test_what_no_event_orders_is_a_race():
    races = Races()
    cuda, tensor, late = WatchedCuda(races), torch.zeros(3), Stream()
    with cuda.on(late):
        cuda.copy(tensor, torch.ones(3))
    event = cuda.recorded(late)
    cuda.copy(torch.zeros(3), tensor)
    assert [race.split(" ")[:3] for race in races.found] == [["a", "copy", "reads"]]
    cuda.current().wait_event(event)
    cuda.copy(torch.zeros(3), tensor)
    assert len(races.found) == 1


class AnySlots(RandomSlots):
    """Random edges and slots, with the claim that a worker keeps everything."""

    def peak_activations(self, worker):
        return 3 * self.num_microbatches


@st.composite
def pipelines(draw):
    """Draw a model, the options of its pipeline, how payloads go, and the pace of copies."""
    workers, by_name = draw(st.integers(2, 4)), draw(st.booleans())
    models = [*MODELS] * 2 + ["slices"] * 4 if by_name else sorted(MODELS.keys() - BUFFERED)
    options = {
        "schedule": draw(st.sampled_from(SYNCHRONOUS)) if by_name else AnySlots,
        "schedule_options": {} if by_name else {"seed": draw(st.integers(0, 10**6))},
        "num_microbatches": draw(st.integers(2, 4)),
        "order": draw(st.sampled_from(["fixed", "ready", None])),
        "seed": draw(st.integers(0, 99)),
    }
    if (model := draw(st.sampled_from(models))) == "slices":
        options["slices"] = draw(st.sampled_from([2, 3]))
    elif model != "sparse":
        options["max_grad_norm"] = draw(st.sampled_from([None, 1e9]))
    if draw(st.integers(0, 3)) == 0:
        options |= {"replicas": 2, "zero": draw(st.sampled_from([0, 1]))}
        workers -= workers % 2
    return model, {**options, "num_workers": workers}, draw(st.sampled_from(WAYS)), draw(st.integers(0, 9))


@settings(max_examples=int(os.environ.get("RPC_PIPE_DEVICE_EXAMPLES", "6")))
@given(pipelines())
def test_nothing_is_read_before_it_is_there_nor_written_before_it_has_left(drawn):
    """`RPC_PIPE_DEVICE_EXAMPLES=1000` draws more."""
    # A forward that counts its runs is refused where it is run once more, on any device.
    assume((drawn[0], drawn[1]["schedule"]) not in {("counter handed on", each) for each in RECOMPUTING})
    try:
        found, races = trained(*drawn)
    except (ConfigError, ScheduleError):
        assume(False)
    assert races == []
    assert found == []


def trained(model, options, way, pace):
    """Return what differs from one process, or on the host, and what has been found on the device."""
    torch.manual_seed(options["seed"])
    with watched(model, way, pace) as races:
        if model != "slices":
            batches = batches_for(model, options["num_microbatches"])
            parts = MODELS[model]
            layers = list(parts.layers)
            with pipeline_with(layers, parts.loss_fn, optimizer=parts.optimizer, stall_s=30, **options) as pipe:
                use_devices(pipe, way)
                return differences(pipe, parts, batches, options["seed"]), races.found
        ids = torch.randint(11, (2 * options["num_microbatches"], 9))
        losses = losses_of(options, ids, way)
    return [] if losses == losses_of(options, ids, "") else ["losses"], races.found


def losses_of(options, ids, way):
    torch.manual_seed(0)
    sgd = partial(torch.optim.SGD, lr=0.1)
    with Pipeline(Cached(), next_word, training=Training(sgd), stall_s=30, **options) as pipe:
        use_devices(pipe, way)
        return [pipe.step((ids, ids)) for _ in range(2)]


def use_devices(pipe, way):
    """Let payloads go from device to device, as between processes."""
    for actor in pipe.actors if "blocks" in way else ():
        actor.carrier.post.use_device(actor.backend.way())


def next_word(output, target):
    return torch.nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())
