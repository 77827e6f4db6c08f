"""A training whose workers die: `python -m rpc_pipe run mortal.py ... -- FOLDER HOW STEPS STAGES KILLS`.

HOW: `step`, or `train` with an evaluation, a prediction and a checkpoint within its loop. KILLS: `worker:step:what`
with commas, `what` a kind of action, `meet` (within a recovery), or a part of the loop: `evaluate`, `predict`,
`pretrained`, `save`, `write` (within a checkpoint); of step 0 (-1: behind it) a function in the making of the
pipeline; `evict`: SIGTERM; or `cut`: the connection to another worker
breaks. With WAITS=on in the environment a step takes 100 ms (`long`: 500 ms) more while a worker is missing, so that
a newcomer can come; with `shape` it waits until all rest for another shape, with `back` also for a newcomer.
ACCUMULATE: steps of an update.
MODEL: `conv`: residual blocks with batch normalisation, and a moving average in a buffer; `deferred`: with
deferred_batch_norm; `tied`: the first and the last layer share a weight. The losses are written with the buffers of all
replicas.
"""

import os
import signal
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import rpc_pipe.elastic.recovery
from rpc_pipe import Pipeline, Training
from rpc_pipe.checkpoints import resume_options
from rpc_pipe.checkpoints.facade import Checkpoints
from rpc_pipe.checkpoints.writing import Snapshot
from rpc_pipe.dependency import Action
from rpc_pipe.elastic.heir import Heir
from rpc_pipe.model.shard_maker import ShardMaker
from rpc_pipe.workers.hooks import Listener

FOLDER, HOW, STEPS, STAGES, KILLS = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5:]
ACCUMULATE = int(os.environ.get("ACCUMULATE", "1"))
RANK = int(os.environ["RANK"])
kills = [(int(step), what) for kill in KILLS for rank, step, what in [kill.split(":")] if int(rank) == RANK]


def die_if(step: int, what: str) -> None:
    """End this process as a kill does, if it is to be killed here."""
    if (step, what) in kills and "RPC_PIPE_NEWCOMER" not in os.environ:
        os.kill(os.getpid(), signal.SIGKILL)


class Mortal(Listener):
    """Kills its process when an action begins."""

    def action_started(self, step: int, action: Action) -> None:
        die_if(step, action.kind.letter)


class Residual(nn.Module):
    """A residual block with running statistics of torch's and of its own."""

    average: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 1, 3, padding=1), nn.BatchNorm2d(1)
        self.register_buffer("average", torch.zeros(16))

    def forward(self, x: Tensor) -> Tensor:
        """Add a normalised convolution, and note the average."""
        if self.training:
            self.average.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        found: Tensor = x + self.norm(self.conv(x.view(-1, 1, 4, 4))).relu().flatten(1) - self.average
        return found


class Noisy(nn.Module):
    """Draws numbers at random."""

    def __init__(self) -> None:
        super().__init__()
        self.drop, self.norm = nn.Dropout(0.1), nn.LayerNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        """Drop and normalise."""
        dropped: Tensor = self.norm(self.drop(x))
        return dropped


def batch(number: int) -> tuple[Tensor, Tensor]:
    """Return a batch."""
    generator = torch.Generator().manual_seed(number)
    return torch.randn(32, 16, generator=generator), torch.randint(4, (32,), generator=generator)


JOIN: Any = vars(rpc_pipe.elastic.recovery)["join"]


def joined(place: Any, cancelled: Any = None) -> Any:
    """Meet, or die."""
    for step in range(STEPS):
        die_if(step, "meet")
    return JOIN(place, cancelled)


WRITE = Snapshot.write


def written(snapshot: Snapshot, place: Path) -> None:
    """Write a worker's part of a checkpoint, or die in the middle of it."""
    die_if(step_now[0], "write")
    WRITE(snapshot, place)


def mortally(owner: Any, name: str) -> None:
    """Let a function that makes the pipeline die, before or behind it."""
    usual = getattr(owner, name)

    def dies(*args: Any, **more: Any) -> Any:
        (FOLDER / f"{name}-{RANK}").touch()
        while name == "begin" and (0, name) in kills and len([*FOLDER.glob("begin-*")]) < int(os.environ["WORLD_SIZE"]):
            time.sleep(0.01)  # until all are ready
        die_if(0, name)
        done = usual(*args, **more)
        die_if(-1, name)
        return done

    setattr(owner, name, dies)


mortally(ShardMaker, "hosted")
mortally(Heir, "tell_ready")
mortally(rpc_pipe.elastic.recovery, "_heed_eviction")
mortally(resume_options, "follow")
mortally(Checkpoints, "claim")
mortally(Checkpoints, "every")
mortally(rpc_pipe.elastic.recovery.Recovery, "begin")
(FOLDER / f"begun-{RANK}").write_text(str(os.getpid()))
step_now = [0]
vars(rpc_pipe.elastic.recovery)["join"] = joined
setattr(Snapshot, "write", written)  # noqa: B010
MODEL = os.environ.get("MODEL", "")
block = Residual if MODEL in ("conv", "deferred") else Noisy
while os.environ.get("WAITS") == "back" and "RPC_PIPE_NEWCOMER" in os.environ and not (FOLDER / "shaped").exists():
    time.sleep(0.02)  # else it could take the dead one's place before the shape changes
layers: list[Any] = [make for _ in range(STAGES) for make in (partial(nn.Linear, 16, 16), block)]
if MODEL == "tied":
    torch.manual_seed(0)
    layers = [nn.Linear(16, 16), *layers, *layers, nn.Linear(16, 16)]
    layers[-1].weight = layers[0].weight
else:
    layers.append(partial(nn.Linear, 16, 4))
pipe = Pipeline(
    layers,
    nn.functional.cross_entropy,
    training=Training(
        partial(torch.optim.AdamW, lr=1e-2),
        max_grad_norm=0.5,
        ema_decay=0.9,
        accumulate=ACCUMULATE,
        deferred_batch_norm=MODEL == "deferred",
    ),
    num_microbatches=4,
    stall_s=60,
)
pipe.listen(lambda worker: Mortal())
(FOLDER / f"pid-{RANK}").write_text(str(os.getpid()))


def after(step: int, loss: float) -> None:
    """Note a step, and let a newcomer come."""
    losses.append(loss)
    (FOLDER / f"step-{RANK}").write_text(str(step))
    if (step, "cut") in kills:
        carrier = pipe.actors[0].carrier
        carrier.lose(min(carrier.workers - {RANK}), "the connection broke")
    if (step, "evict") in kills:
        os.kill(os.getpid(), signal.SIGTERM)
    if "WAITS" in os.environ and not pipe.replaying:
        wait(os.environ["WAITS"])


def wait(how: str) -> None:
    """Wait while a worker is missing, so that another can come."""
    missing = len(pipe.actors[0].carrier.workers) < pipe.num_workers
    if how in ("shape", "back"):
        end = time.monotonic() + 100
        is_shaped = len(pipe.spec.workers) == pipe.spec.num_workers
        if missing and is_shaped:
            (FOLDER / "shaped").touch()
        while (not is_shaped or (missing and how == "back")) and not pipe.actors[0].rest_requested:
            time.sleep(0.02)
            assert time.monotonic() < end, "the launcher lets no worker rest"
    elif missing:
        time.sleep(0.5 if how == "long" else 0.1)


def between(step: int) -> None:
    """Do what a loop does between two steps, on all workers."""
    step_now[0] = step
    die_if(step, "evaluate")
    pipe.evaluate(batch(1000 + step))
    die_if(step, "predict")
    pipe.predict(batch(step)[0])
    die_if(step, "pretrained")
    pipe.weights.save_pretrained(FOLDER / "pretrained")
    die_if(step, "save")
    pipe.checkpoints.save(FOLDER / "checkpoints", wait=step % 2 == 0)
    if step % 2 == 0 and pipe.worker == 0:
        assert (FOLDER / "checkpoints" / f"step-{step + 1:08}" / "manifest.json").is_file()


def buffers_of(homes: Any) -> dict[str, str]:
    """Return the bytes of the buffers of replicas."""
    return {
        f"{place} {name}": tensor.cpu().numpy().tobytes().hex()
        for place, shard in homes.items()
        for name, tensor in shard.state_dict().items()
        if name not in dict(shard.named_parameters())
    }


losses: list[float] = []
if HOW == "step":
    for number in range(STEPS):
        after(number, pipe.step(batch(number)))
        if number % 4 == 1:
            losses.append(pipe.evaluate(batch(1000 + number)))
else:
    for number, found in enumerate(pipe.train(map(batch, range(STEPS)))):
        after(number, found)
        if number % 3 == 1:
            between(number)
pipe.weights.save(FOLDER / "weights.safetensors")
buffers = pipe.gather("buffers", lambda actor: buffers_of(actor.homes))
if pipe.worker == 0:
    every = sorted(buffer for each in buffers or () for buffer in each.items())
    (FOLDER / "losses").write_text(repr((losses, every)))
(FOLDER / f"descriptors-{RANK}").write_text(str(len(os.listdir("/proc/self/fd"))))
