"""Data larger than memory: loads, memory, speed, resumption and mixing, measured.

    python bench/data.py [terabyte] [index] [throughput] [resume] [kills] [sorted]

Each prints a JSON line. `terabyte` reads sparse files, which take no room on the disk; `--blocks` says how much of the
epoch is really read, the loads of all of it are counted without reading. `throughput` reads the same files with torch's
DataLoader, and with grain where it is installed. `kills` kills real processes with SIGKILL and resumes them with other
numbers of workers.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

if __package__ is None or __package__ == "":
    sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from bench import killed
from rpc_pipe import Pipeline, Training
from rpc_pipe.data import Loader, Order, dataset, tokens
from rpc_pipe.data.batch_making import Residency
from rpc_pipe.data.source import ALL, Busy, Source, Wanted

_SHARD, _TERABYTE = 64 * 10**6, 10**12
_CONTEXT, _ROWS = 1024, 64


def terabyte(blocks: int) -> dict[str, Any]:
    """Read a sparse terabyte in a process of its own, whose memory is looked at."""
    done = subprocess.run(
        [sys.executable, __file__, "--inside", str(blocks)], capture_output=True, text=True, timeout=600, check=True
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _inside(blocks: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        for number in range(_TERABYTE // _SHARD):
            with open(f"{folder}/{number:05}.u16", "wb") as file:
                file.truncate(_SHARD)
        before, cpu = _rss_mb(), time.process_time()
        begin = time.perf_counter()
        loader = Loader(tokens(folder, _CONTEXT), rows=_ROWS, memory="2GB", epochs=1)
        next(iter(loader))[0]
        first_s, first_cpu_s = time.perf_counter() - begin, time.process_time() - cpu
        epoch = loader.order.epoch(0)
        for block in range(blocks):  # one batch of each block: all of its chunks are loaded
            loader.seek(epoch.begin(block))
            next(iter(loader))[0]
        read_s = time.perf_counter() - begin - first_s
        loads, most = loader.loads, loader.peak_bytes
        loader.close()
        counted = Residency(_Unread(loader.source), loader.order, loader.room, 60.0, epochs=1)
        for block in range(epoch.num_blocks):
            counted.enter(0, block)
        counted.close()
    return {
        "bar": "terabyte", "chunks": loader.order.num_chunks, "samples": loader.order.num_samples,
        "window": loader.window, "loads_per_epoch": counted.loads / loader.order.num_chunks, "first_batch_s": first_s,
        "first_batch_cpu_s": first_cpu_s, "blocks_read": blocks,
        "loads_while_read": loads, "most_chunks_mb": most / 1e6,
        "mb_per_s": loads * float(loader.source.num_bytes.mean()) / 1e6 / read_s,
        "rss_before_mb": before, "peak_rss_mb": _rss_mb(), "cap_mb": 2000,
    }  # fmt: skip


class _Unread(Source):
    """Chunks that take room, and are not read."""

    def __init__(self, source: Source) -> None:
        self.busy, self.sizes, self.num_bytes = Busy(), source.sizes, source.num_bytes

    def load(self, chunk: int, wanted: Wanted = ALL) -> None:
        return None


def _rss_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


def index() -> dict[str, Any]:
    """Order ten million samples."""
    tracemalloc.start()
    begin = time.perf_counter()
    order = Order([1000] * 10_000, 0, 500)
    order.samples(5_000_000, 5_000_064)
    took, (_, peak) = time.perf_counter() - begin, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    begin = time.perf_counter()
    order.samples(0, 1_000_000)
    return {
        "bar": "index", "samples": order.num_samples, "seconds": took, "peak_mb": peak / 1e6,
        "located_per_s": 1e6 / (time.perf_counter() - begin),
    }  # fmt: skip


class _Rows(Dataset[tuple[Tensor, Tensor]]):
    """The same files for torch's DataLoader."""

    def __init__(self, paths: list[Path]) -> None:
        self._files = [np.memmap(path, np.uint16, "r") for path in paths]
        self._each = (len(self._files[0]) - 1) // _CONTEXT

    def __len__(self) -> int:
        return self._each * len(self._files)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        file, row = divmod(index, self._each)
        found = torch.from_numpy(self._files[file][row * _CONTEXT : row * _CONTEXT + _CONTEXT + 1].astype(np.int64))
        return found[:-1], found[1:]


def throughput(seconds: float) -> Iterator[dict[str, Any]]:
    """Read 256 MB of tokens over and over, shuffled."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        draw = np.random.default_rng(0)
        for number in range(4):
            draw.integers(2**16, size=_SHARD // 2, dtype=np.uint16).tofile(folder / f"{number}.u16")
        paths = sorted(folder.iterdir())
        systems: dict[str, Callable[[], Iterator[Any]]] = {
            "rpc-pipe": lambda: iter(map(tuple, Loader(tokens(folder, _CONTEXT), rows=_ROWS, memory="1GB"))),
            "torch DataLoader": lambda: _epochs(DataLoader(_Rows(paths), _ROWS, shuffle=True)),
            "torch DataLoader, 2 processes": lambda: _epochs(
                DataLoader(
                    _Rows(paths),
                    _ROWS,
                    shuffle=True,
                    num_workers=2,
                    multiprocessing_context="fork",
                    persistent_workers=True,
                )
            ),
        }
        try:
            import grain

            systems["grain"] = lambda: iter(
                grain.MapDataset.source(_Rows(paths)).seed(0).shuffle().repeat().batch(_ROWS).to_iter_dataset()
            )
        except ImportError:
            pass
        for system, batches in systems.items():
            yield {"bar": "throughput", "system": system, **_rate(batches(), seconds)}
        yield {"bar": "throughput", "system": "rpc-pipe at the demo's rate x 20", **_paced(Loader(
            tokens(folder, 128), rows=16, memory="1GB"), 20 * 12_000, seconds)}  # fmt: skip


def _epochs(loader: DataLoader[Any]) -> Iterator[Any]:
    while True:
        yield from loader


def _rate(batches: Iterator[Any], seconds: float) -> dict[str, Any]:
    begin = time.perf_counter()
    next(batches)
    first, count = time.perf_counter(), 0
    while time.perf_counter() - first < seconds:
        next(batches)
        count += 1
    took = time.perf_counter() - first
    return {"first_batch_s": first - begin, "tokens_per_s": round(count * _ROWS * _CONTEXT / took)}


def _paced(loader: Loader, tokens_per_s: float, seconds: float) -> dict[str, Any]:
    """Take batches at a rate; return how long they were waited for, behind the first ones."""
    pause, waited, missed = 16 * 128 / tokens_per_s, [], 0
    begin = time.perf_counter()
    for batch in loader:
        asked = time.perf_counter()
        batch[0]
        waited.append(time.perf_counter() - asked)
        missed += len(waited) > 10 and batch.waited_ns > 0
        time.sleep(max(0.0, pause - waited[-1]))
        if time.perf_counter() - begin > seconds:
            break
    steady = waited[10:]
    return {
        "tokens_per_s": round(tokens_per_s), "batches": len(steady), "batches_that_were_not_ready": missed,
        "share_taking": sum(steady) / (pause * len(steady)),
        "median_taking_us": 1e6 * statistics.median(steady), "longest_taking_ms": 1e3 * max(steady),
    }  # fmt: skip


def resume(kills: int) -> dict[str, Any]:
    """Kill runs at random positions and go on with 4, 2 and 3 workers; compare the samples that were trained on."""
    draw = random.Random(0)
    with tempfile.TemporaryDirectory() as name:
        for number in range(6):
            np.arange(number * 160, number * 160 + 161, dtype=np.uint16).tofile(f"{name}/{number}.u16")
        make = partial(Loader, epochs=2, window=2, memory="1MB")
        total = 2 * 6 * 40
        expected = make(tokens(name, 4), rows=8).samples(0, total).tolist()
        equal = 0
        for _ in range(kills):
            ends = [*sorted(draw.sample(range(1, total), 2)), total]
            state, seen = make(tokens(name, 4), rows=8).state_dict(), []
            for workers, end in zip((4, 2, 3), ends, strict=True):
                loader = make(tokens(name, 4), rows=draw.choice((4, 8, 12)))
                loader.load_state_dict(json.loads(json.dumps(state)))
                seen += _trained(loader, workers, end)
                state = loader.state_dict()
            equal += seen == expected
    return {"bar": "resume", "kills": 2 * kills, "runs": kills, "runs_with_the_same_sequence": equal}


def _trained(loader: Loader, workers: int, end: int) -> list[int]:
    """Train until the position is `end` or behind it; return the samples of the steps that were complete."""
    layers: list[Callable[[], nn.Module]] = [
        partial(nn.Embedding, 1024, 4),
        nn.Tanh,
        nn.Tanh,
        partial(nn.Linear, 4, 1024),
    ]
    seen: list[int] = []
    batches = iter(loader)
    read: list[Any] = []

    def noted() -> Iterator[Any]:
        for batch in batches:
            read.append(batch)
            yield batch

    with Pipeline(
        layers, _loss, training=Training(partial(torch.optim.SGD, lr=0.1)), num_microbatches=2, num_workers=workers
    ) as pipe:
        for number, _ in enumerate(pipe.train(noted())):
            seen += [n // 4 for n in read[number][0][:, 0].tolist()]
            if loader.position >= end:
                break
    loader.close()
    return seen


def _loss(logits: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def kills(count: int) -> dict[str, Any]:
    """Kill a run `count` times at random steps, with workers in turn 4, 2 and 3; compare with one that was not."""
    steps, draw = 8 * count, random.Random(0)
    at = sorted(draw.sample(range(1, steps), count))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "shards").mkdir()
        for number in range(6):
            first = number * 160
            np.arange(first, first + 161, dtype=np.uint16).tofile(folder / f"shards/{number}.u16")
        begin = time.perf_counter()
        for number, stop in enumerate([*at, None]):
            _until_killed(folder, "killed", (4, 2, 3)[number % 3], steps, stop)
        seconds = time.perf_counter() - begin
        _until_killed(folder, "undisturbed", 1, steps, None)
        noted, undisturbed = _notes(folder, "killed"), _notes(folder, "undisturbed")
        order = killed.loader(f"{name}/shards").samples(0, steps * killed.ROWS).tolist()
    last = {note["step"]: note for note in noted}
    again = [note for note in noted if note is not last[note["step"]]]
    losses = [(last[note["step"]]["loss"], note["loss"]) for note in undisturbed]
    return {
        "bar": "kills", "kills": count, "workers": [4, 2, 3], "steps": steps, "seconds": seconds,
        "same_sequence": [n for step in range(steps) for n in last[step]["samples"]] == order,
        "undisturbed_too": [n for note in undisturbed for n in note["samples"]] == order,
        "steps_done_again": len(again),
        "of_these_alike": sum(note["samples"] == last[note["step"]]["samples"] for note in again),
        "losses_with_the_same_bits": sum(a == b for a, b in losses),
        "largest_difference_of_a_loss": max(abs(a - b) for a, b in losses),
    }  # fmt: skip


def _until_killed(folder: Path, run: str, workers: int, steps: int, stop: int | None) -> None:
    """Let a run begin or go on, and kill its launcher when step `stop` is behind; None: let it end."""
    command = [sys.executable, "-m", "rpc_pipe", "run", killed.__file__, "--workers", str(workers)]
    command += ["--checkpoint-every", "3", "--checkpoint-keep", "2", "--checkpoint-folder", f"{folder}/{run}"]
    command += ["--resume", "auto", "--", f"{folder}/shards", f"{folder}/{run}.jsonl", str(steps)]
    root = Path(__file__).parents[1]
    path = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    with open(folder / f"{run}.log", "a") as log:
        process = subprocess.Popen(command, cwd=root, env=environment, stdout=log, stderr=subprocess.STDOUT)
    deadline = time.monotonic() + 300
    while process.poll() is None and (stop is None or _last_step(folder, run) < stop):
        if time.monotonic() > deadline:
            process.kill()
            raise SystemExit(f"{run}: no end after 300 s; {(folder / f'{run}.log').read_text()[-2000:]}")
        time.sleep(0.005)
    if stop is None:
        if process.returncode:
            raise SystemExit(f"{run}: {(folder / f'{run}.log').read_text()[-2000:]}")
    else:
        process.kill()  # workers end when their launcher is gone
        process.wait()


def _notes(folder: Path, run: str) -> list[dict[str, Any]]:
    path = folder / f"{run}.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n") and line.startswith("{")]


def _last_step(folder: Path, run: str) -> int:
    noted = _notes(folder, run)
    return noted[-1]["step"] + 1 if noted else 0


#: chunks, epochs and step size of the classifier, and how many seeds: the first is the one of the bar
_SORTED = (
    (100, 2, 3e-3, 3),
    (400, 2, 3e-3, 3),
    (100, 2, 3e-3, 10),
    (100, 2, 1e-3, 10),
    (100, 5, 3e-3, 10),
    (200, 2, 1e-3, 10),
)


def sorted_labels(chunks: int, epochs: int, lr: float, seeds: int) -> dict[str, Any]:
    """Train a small classifier on data sorted by label: full shuffle against 5 % of the chunks."""
    found: dict[str, Any] = {"bar": "sorted", "chunks": chunks, "at_a_time": chunks // 20, "epochs": epochs}
    found |= {"lr": lr, "seeds": seeds}
    for name, window in (("full", None), ("window", chunks // 20), ("chunks only", 1)):
        losses = [_classifier(chunks, window, seed, epochs, lr) for seed in range(seeds)]
        found[name] = {"mean": statistics.mean(losses), "deviation": statistics.stdev(losses)}
    return found


def _classifier(chunks: int, window: int | None, seed: int, epochs: int, lr: float) -> float:
    made = torch.Generator().manual_seed(1)
    centres = torch.randn(10, 32, generator=made)
    labels = torch.arange(8_000) * 10 // 8_000
    pairs = list(zip(centres[labels] + 1.5 * torch.randn(8_000, 32, generator=made), labels.tolist(), strict=True))
    held = torch.randint(10, (2_000,), generator=made)
    inputs = centres[held] + 1.5 * torch.randn(2_000, 32, generator=made)
    source = dataset(pairs, chunk=8_000 // chunks)
    loader = Loader(source, rows=64, seed=seed, window=window, memory="1GB", epochs=epochs)
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    with torch.no_grad():
        return float(nn.functional.cross_entropy(model(inputs), held))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    every = ["terabyte", "index", "throughput", "resume", "kills", "sorted"]
    parser.add_argument("bars", nargs="*", metavar="BAR", help=" ".join(every))
    parser.add_argument("--blocks", type=int, default=100, help="of the terabyte that are read (100)")
    parser.add_argument("--seconds", type=float, default=3.0, help="for each reader (3)")
    parser.add_argument("--kills", type=int, default=50, help="how often runs are killed (50)")
    parser.add_argument("--inside", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.inside is not None:
        print(json.dumps(_inside(options.inside)))
        return
    for bar in options.bars or every:
        found: list[dict[str, Any]]
        if bar == "terabyte":
            found = [terabyte(options.blocks)]
        elif bar == "throughput":
            found = list(throughput(options.seconds))
        elif bar == "sorted":
            found = [sorted_labels(*setting) for setting in _SORTED]
        elif bar == "kills":
            found = [kills(options.kills)]
        else:
            found = [index() if bar == "index" else resume(options.kills // 2)]
        for line in found:
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
