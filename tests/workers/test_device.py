"""The road between a device and the outbox, on a device that does everything as late as it may."""

import contextlib
import queue
import random
import threading
from functools import partial

import pytest
import torch
from fake_cuda import DEVICE, Apart, FakeCuda, Stream, StrictCuda, is_there, put_there
from refusals import refused
from small_models import Cached
from training_options import pipeline_with
from unkind import MODELS, batches_for, differences

from rpc_pipe import Pipeline, Training, own_workers, session
from rpc_pipe.dependency import ConfigError, WorkerFailure
from rpc_pipe.launching.job import current_job
from rpc_pipe.workers import thread_pool
from rpc_pipe.workers.compute.devices import accelerator
from rpc_pipe.workers.compute.devices import backends as choice
from rpc_pipe.workers.compute.devices.accelerator import AcceleratorBackend
from rpc_pipe.workers.compute.devices.backends import usual_device
from rpc_pipe.workers.compute.modules import randomness
from rpc_pipe.workers.transport.local import LocalPost
from rpc_pipe.workers.transport.payload import pack, unpack


@pytest.fixture
def by_host(monkeypatch):
    """Let payloads between workers of a process go by the host, as those of several devices do."""
    monkeypatch.setattr(LocalPost, "takes_from_device", lambda post, peer, device: False)


@pytest.fixture
def backends(by_host, monkeypatch):
    """Let pipelines' workers compute on such devices; the list of them."""
    return made_backends(monkeypatch)


def made_backends(monkeypatch):
    made = []

    def backend_for(name, place=0):
        made.append(AcceleratorBackend(FakeCuda()))
        return made[-1]

    monkeypatch.setattr(own_workers, "backend_for", backend_for)
    return made


#: of two hosts with two workers each
TORCHRUN = {"WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29400"}
CASES = [
    *(("in place", schedule) for schedule in ("1f1b", "interleaved", "zb-h1")),
    *((name, ("zb-v", "chimera")[i % 2]) for i, name in enumerate(MODELS)),
    *((name, "1f1b with owners") for name in MODELS if name.startswith(("sparse", "complex", "gradients", "batch"))),
]


@pytest.mark.parametrize("name, schedule", dict.fromkeys(CASES))
def test_nothing_is_read_before_it_is_there_nor_written_before_it_has_left(backends, name, schedule):
    draw, model = random.Random(name + schedule), MODELS[name]
    microbatches, max_grad_norm = draw.choice([3, 4]), draw.choice([None, 1e9])
    torch.manual_seed(0)
    schedule, owners, _ = schedule.partition(" with owners")
    replicas = {"replicas": 2, "zero": draw.choice([0, 1])} if owners else {}
    pipe = Pipeline(
        list(model.layers),
        model.loss_fn,
        training=Training(model.optimizer, max_grad_norm=None if name == "sparse" else max_grad_norm),
        schedule=schedule,
        num_workers=4,
        num_microbatches=microbatches,
        seed=1,
        stall_s=30,
        **replicas,
    )
    assert differences(pipe, model, batches_for(name, microbatches), 1) == []
    assert all(backend._accelerator.num_copies for backend in backends)


@pytest.mark.parametrize("name, schedule", [("in place", "zb-v"), ("weights handed on", "1f1b"), ("views", "chimera")])
def test_workers_that_share_a_device_hand_payloads_on_without_a_copy(monkeypatch, name, schedule):
    """Between threads of one process 64 MiB went to the host and back, which took 7.2 ms on an H100."""
    backends, model, copied = made_backends(monkeypatch), MODELS[name], []
    made = FakeCuda._copied
    monkeypatch.setattr(FakeCuda, "_copied", lambda cuda, tensor: copied.append(tensor) or made(cuda, tensor))
    torch.manual_seed(0)
    pipe = Pipeline(
        list(model.layers), model.loss_fn, training=Training(model.optimizer), schedule=schedule, num_workers=4,
        num_microbatches=4, seed=1, stall_s=30,
    )  # fmt: skip
    assert differences(pipe, model, batches_for(name, 4), 1) == []
    assert len(backends) == 4
    assert all(each.dim() < 2 for each in copied), "the host decides by losses, which are no matrices"


def test_compute_waits_for_what_was_handed_on_and_holds_it(monkeypatch):
    producer, consumer, held = AcceleratorBackend(FakeCuda()), AcceleratorBackend(FakeCuda()), []
    compute, tensor = Stream(), torch.zeros(3)
    monkeypatch.setattr(consumer._accelerator, "hold", lambda each, stream: held.append((each, stream)))
    with producer._accelerator.on(compute):
        compute.issue(lambda: tensor.fill_(1.0))
        entered = consumer.enter(producer.staying(pack(tensor), print))
    assert not tensor.any(), "no thread waits for the device"
    found = unpack(consumer.ready(entered))
    assert found.data_ptr() == tensor.data_ptr() and found.equal(torch.ones(3))
    assert [stream for _, stream in held] == [consumer._accelerator.current()]


def test_workers_compute_in_the_stream_of_the_caller(backends):
    """Another stream does not wait for the batch that the caller makes in his."""
    seen = []

    class Sees(torch.nn.Linear):
        def forward(self, x):
            seen.append({backend._accelerator.current() for backend in backends})
            return super().forward(x)

    pipe = Pipeline([Sees(2, 2), Sees(2, 2)], torch.nn.functional.mse_loss, num_workers=2, num_microbatches=1)
    batch, streams = (torch.ones(2, 2), torch.zeros(2, 2)), [Stream(eager=True) for _ in backends]
    with contextlib.ExitStack() as stack:
        for backend, stream in zip(backends, streams, strict=True):
            stack.enter_context(backend._accelerator.on(stream))
        pipe.evaluate(batch)
    assert [streams[0] in seen[0], streams[1] in seen[1]] == [True, True]
    pipe.evaluate(batch)
    assert not {*streams} & (seen[2] | seen[3]), "the caller has left it"


def test_a_payload_is_published_when_it_has_been_copied_and_not_before():
    backend, published = AcceleratorBackend(FakeCuda()), threading.Event()
    held = threading.Event()
    backend._out.issue(held.wait)  # something before it on the stream takes its time
    source = torch.ones(3)
    found: list[torch.Tensor] = []
    backend.leave(pack(source), lambda payload: (found.append(unpack(payload)), published.set()), found.append)
    assert not published.wait(0.05)
    held.set()
    assert published.wait(10)
    assert found[0].equal(source)


def test_what_is_shown_conjugate_or_negative_is_copied_as_it_is():
    """Torch copies it without waiting and then changes the host's copy, which may not be there yet (Copy.cu)."""

    class Cuda(FakeCuda):
        def down(self, tensor):
            assert not tensor.is_conj() and not tensor.is_neg()
            return super().down(tensor)

    backend, found = AcceleratorBackend(Cuda()), queue.SimpleQueue()
    source = torch.randn(3, 2, dtype=torch.complex64)
    backend.leave(pack((source.mH, source.conj().imag)), found.put, found.put)
    conjugate, negative = unpack(found.get(timeout=10))
    assert conjugate.is_conj() and torch.equal(conjugate, source.mH) and torch.equal(negative, -source.imag)


def test_a_closed_pipeline_leaves_no_thread(backends):
    def helpers():
        return [thread for thread in threading.enumerate() if thread.name == "backend"]

    model, before = MODELS["frozen"], len(helpers())
    with Pipeline(list(model.layers), model.loss_fn, num_workers=2, num_microbatches=2):
        assert len(helpers()) == before + 2
    for thread in helpers()[before:]:
        thread.join(10)
    assert len(helpers()) == before


def test_compute_waits_for_what_has_arrived():
    backend = AcceleratorBackend(FakeCuda())
    entered = backend.enter(pack(torch.ones(3)))
    assert not entered.tensors[0].equal(torch.ones(3))  # the copy has been issued
    assert unpack(backend.ready(entered)).equal(torch.ones(3))


def test_what_is_shown_conjugate_enters_conjugate():
    """On a GPU it arrived as other memory with the same numbers, of which products choose other kernels."""
    backend = AcceleratorBackend(FakeCuda())
    source = torch.randn(3, 2, dtype=torch.complex64)
    found = unpack(backend.ready(backend.enter(pack((source.conj(), source[:, :1].expand(3, 4).conj())))))
    assert all(each.is_conj() for each in found)
    assert torch.equal(found[0], source.conj()) and found[1].stride() == (2, 0)


def test_timestamps_that_come_out_of_order_are_told_in_the_order_of_their_times():
    """A copy's end is noted when its thread comes round to it, which may be after a later timestamp of compute."""
    backend = AcceleratorBackend(FakeCuda())
    early, late = backend.timestamp(), backend.timestamp()
    side = backend._accelerator.recorded(backend._out)  # nobody has waited for it yet
    times = backend.resolve([late, early, side])
    assert times[1] <= times[0] <= times[2]
    assert backend._origin is side
    assert backend.resolve([backend.timestamp()])[0] >= times[2]
    assert backend.resolve([]) == []


def test_a_copy_that_fails_fails_the_worker(backends, monkeypatch):
    model = MODELS["frozen"]
    pipe = Pipeline(list(model.layers), model.loss_fn, num_workers=2, num_microbatches=2, stall_s=30)

    def broken():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(backends[0]._accelerator, "down", lambda tensor: (backends[0]._out.issue(broken), tensor)[1])
    with refused("cpu", WorkerFailure):
        pipe.evaluate(batches_for("frozen", 2)[0])


def test_the_backend_of_a_gpu_is_made_of_torchs_own():
    """On a machine without one: that the names exist and are called as torch has them."""
    streams = "current_stream", "set_stream", "set_device_index", "device_index", "synchronize"
    memory = "memory_allocated", "reset_peak_memory_stats", "max_memory_allocated"
    for name in (*streams, *memory, "current_accelerator", "device_count", "is_available"):
        assert hasattr(torch.accelerator, name)
    assert hasattr(torch.Stream, "wait_event")
    assert all(hasattr(torch.Event, name) for name in ("record", "synchronize", "query", "elapsed_time"))
    for name in ("Stream", "current_stream", "Event", "get_device_properties"):
        assert hasattr(torch.cuda, name)
    for kind in ("cuda", "xpu"):
        package = torch.get_device_module(kind)
        assert hasattr(package, "init") and hasattr(package, "default_generators")
    needed = {name for cls in (accelerator.Accelerator, accelerator.Cuda) for name in vars(cls) if name[0] != "_"}
    assert needed <= set(vars(FakeCuda)) | {"device"}


@pytest.fixture
def apart(by_host, monkeypatch):
    """Let workers compute on devices that take no tensor of the host."""
    to_host, device_of, settings = torch.Tensor.cpu, torch.Tensor.device, thread_pool.callers_settings

    def settings_apart():
        own = settings()

        @contextlib.contextmanager
        def both():
            with own(), Apart():
                yield

        return both

    # What torch does not do, as it has one device here.
    monkeypatch.setattr(
        torch.Tensor, "cpu", lambda t: put_there(t.detach().clone(), False) if is_there(t) else to_host(t)
    )
    where = property(lambda tensor: DEVICE if is_there(tensor) else device_of.__get__(tensor))
    monkeypatch.setattr(torch.Tensor, "device", where, raising=False)
    monkeypatch.setattr(thread_pool, "callers_settings", settings_apart)
    monkeypatch.setattr(own_workers, "backend_for", lambda name, place=0: AcceleratorBackend(StrictCuda()))


def _pipe(schedule, **options):
    torch.manual_seed(0)
    layers = [torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Dropout(0.1))] * 1
    layers += [torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh()) for _ in range(7)]
    options = {"loss_fn": torch.nn.functional.mse_loss, **options}
    return pipeline_with(
        layers,
        optimizer=partial(torch.optim.AdamW, lr=1e-2),
        schedule=schedule,
        num_workers=2 * options.get("replicas", 1),
        num_microbatches=4,
        stall_s=30,
        **options,
    )


class _Tied(torch.nn.Module):
    """A model that is cut as it is, makes positions where its input is, and has a weight in two stages."""

    def __init__(self):
        super().__init__()
        self.words, self.places = torch.nn.Embedding(11, 8), torch.nn.Embedding(4, 8)
        self.blocks = torch.nn.ModuleList(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()) for _ in "1234")
        self.register_buffer("scale", torch.full((8,), 2.0))

    def forward(self, ids):
        x = self.words(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = x + block(x * self.scale)
        return x @ self.words.weight.T


def _next_word(output, target):
    return torch.nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


def test_a_model_cut_as_it_is_computes_on_the_device_alone(apart, monkeypatch):
    ids = torch.randint(11, (6, 4), generator=torch.Generator().manual_seed(0))
    told = []
    for devices in (True, False):
        if not devices:
            monkeypatch.undo()
        torch.manual_seed(0)
        options = {"schedule": "zb-h1", "max_grad_norm": 1e-2, "stall_s": 30}
        optimizer = partial(torch.optim.AdamW, lr=1e-2)
        with (
            Apart() if devices else contextlib.nullcontext(),
            pipeline_with(
                _Tied(), _next_word, optimizer=optimizer, num_workers=3, num_microbatches=3, **options
            ) as pipe,
        ):
            told.append(([pipe.step((ids, ids)) for _ in range(2)], pipe.predict(ids)))
    assert told[0][0] == told[1][0] and told[0][1].equal(told[1][1])


def test_slices_come_to_the_device_with_what_they_know_of_the_whole(apart, monkeypatch):
    """Slices ended in "SliceCache, which cannot travel between workers": a batch of slices holds more than tensors."""
    ids = torch.randint(11, (6, 9), generator=torch.Generator().manual_seed(0))
    told = []
    for devices in (True, False):
        if not devices:
            monkeypatch.undo()
        torch.manual_seed(0)
        options = {"num_workers": 2, "num_microbatches": 3, "slices": 3, "stall_s": 30}
        with (
            Apart() if devices else contextlib.nullcontext(),
            pipeline_with(Cached(), _next_word, optimizer=partial(torch.optim.SGD, lr=0.1), **options) as pipe,
        ):
            told.append([pipe.step((ids, ids)) for _ in range(3)])
    assert told[0] == told[1] and told[0][2] < told[0][0]


def _summed(output, target):
    return (output - target).square().sum(), torch.tensor(output.numel())


def _right(output, target):
    """A metric that is told in numbers of the host."""
    return float((output > target).sum()), len(target)


USES = {
    "clipped early": ("zb-h1", {"max_grad_norm": 1e-1}),
    "clipped on two routes": ("chimera", {"max_grad_norm": 1e-3}),
    "summed": ("zb-v", {"loss_fn": _summed, "max_grad_norm": 1e-3}),
    "scaled": ("1f1b", {"grad_scaler": torch.amp.GradScaler("cpu", init_scale=2.0**8), "max_grad_norm": 1e-3}),
    "averaged": ("gpipe-recompute", {"ema_decay": 0.9, "deferred_batch_norm": True, "accumulate": 2}),
    "owned": ("zb-h1", {"ema_decay": 0.9, "max_grad_norm": 1e-3, "replicas": 2, "zero": 1}),
    "asynchronous": ("pipedream", {"max_grad_norm": 1e-3}),
}


@pytest.mark.parametrize("use", USES)
def test_no_tensor_of_the_host_is_taken_for_one_of_the_device(apart, monkeypatch, tmp_path, use):
    schedule, options = USES[use]
    x, y = torch.randn(10, 4, generator=torch.Generator().manual_seed(0)), torch.zeros(4).expand(10, 4)
    told = []
    for devices in (True, False):
        if not devices:
            monkeypatch.undo()
        with Apart() if devices else contextlib.nullcontext(), _pipe(schedule, **options) as pipe:
            losses = list(pipe.train([(x, y)] * 2))
            losses += [pipe.evaluate((x, y)), pipe.evaluate((x, y), metric=_right)]
            predicted, state = pipe.predict(x), pipe.weights.state_dict()
            folder = pipe.checkpoints.save(tmp_path / str(devices))
        with Apart() if devices else contextlib.nullcontext(), _pipe(schedule, **options) as pipe:
            pipe.checkpoints.load(folder)
            losses.append(pipe.step((x, y)))
        assert not any(map(is_there, (predicted, *state.values())))
        told.append((losses, pipe.grad_norm, [predicted, *state.values()]))
    assert told[0][:2] == told[1][:2]
    assert all(map(torch.equal, told[0][2], told[1][2]))


def has_gpus(monkeypatch, count, kind="cuda"):
    def current(check_available=False):
        return torch.device(kind) if count or not check_available else None

    monkeypatch.setattr(torch.accelerator, "current_accelerator", current)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)


@pytest.fixture
def two_gpus(monkeypatch):
    """Let this host have two GPUs, as far as backends ask."""

    class Cuda(FakeCuda):
        def __init__(self, device):
            super().__init__()
            self.device = device

    monkeypatch.setattr(accelerator, "Cuda", Cuda)
    has_gpus(monkeypatch, 2)


def test_each_worker_of_a_host_has_a_gpu_of_its_own(two_gpus, caplog):
    found = [choice.backend_for("cuda", place).device for place in range(2)]
    assert [str(each) for each in found] == ["cuda:0", "cuda:1"] and not caplog.records
    assert str(choice.backend_for("cuda:1", 0).device) == "cuda:1"
    assert str(choice.backend_for("cuda", 2).device) == "cuda:0"
    assert "this host has 2, so worker 2 of it shares cuda:0" in caplog.text


def test_an_accelerator_that_is_no_gpu_of_cuda_has_the_same_road(monkeypatch):
    """Intel's GPUs and devices of other packages were refused: "must be cpu, cuda or cuda:N"."""

    class Other(FakeCuda):
        def __init__(self, device):
            super().__init__()
            self.device = device

    has_gpus(monkeypatch, 2, "xpu")
    monkeypatch.setattr(accelerator, "Accelerator", Other)
    monkeypatch.setattr(accelerator, "Cuda", None)
    assert usual_device(2) == "xpu"
    assert [str(choice.backend_for(name, 1).device) for name in ("xpu", "xpu:0")] == ["xpu:1", "xpu:0"]
    for name in ("xpu:2", "cuda", "mtia", "tpu"):
        with pytest.raises(ConfigError):
            choice.backend_for(name)


def test_shards_are_made_on_their_workers_gpu(two_gpus, monkeypatch):
    moved = []
    monkeypatch.setattr(torch.nn.Module, "to", lambda self, where: moved.append(str(where)) or self)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "default_generators", [torch.Generator(), torch.Generator()])
    for module in (session, randomness):
        monkeypatch.setattr(module, "preserved", lambda *devices: contextlib.nullcontext())
    with Pipeline(
        [partial(torch.nn.Linear, 2, 2)] * 2,
        torch.nn.functional.mse_loss,
        num_workers=2,
        num_microbatches=2,
        device="cuda",
    ) as pipe:
        assert moved == ["cuda:0", "cuda:1"]
        assert [str(actor.backend.device) for actor in pipe.actors] == ["cuda:0", "cuda:1"]


@pytest.mark.parametrize(
    "environ, place",
    [
        ({"RPC_PIPE_INIT": "file:///x", "RANK": "3", "WORLD_SIZE": "4"}, 3),
        ({**TORCHRUN, "RANK": "3", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}, 1),
        ({**TORCHRUN, "RANK": "3"}, 3),
    ],
)
def test_a_job_knows_the_place_of_its_worker_on_the_host(environ, place):
    assert current_job(environ).place == place


@pytest.mark.parametrize(("gpus", "workers", "device"), [(0, 1, "cpu"), (1, 2, "cpu"), (2, 2, "cuda"), (8, 2, "cuda")])
def test_without_a_word_gpus_are_used_where_each_worker_has_one(monkeypatch, gpus, workers, device):
    has_gpus(monkeypatch, gpus)
    assert usual_device(workers) == device
