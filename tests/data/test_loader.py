import gc
import os
import random
import resource
import threading
import time
import weakref

import numpy as np
import pytest
import torch
from refusals import refused

from rpc_pipe.data import Loader, dataset, tokens
from rpc_pipe.data.batch_making import Reader
from rpc_pipe.dependency import DataError, Stalled

CONTEXT = 4


@pytest.fixture
def shards(tmp_path):
    """Eight shards of 10 samples; the first token of sample n is 4 n."""
    folder = tmp_path / "shards"
    folder.mkdir()
    for i in range(8):
        np.save(folder / f"{i}.npy", np.arange(i * 40, i * 40 + 41, dtype=np.uint16))
    return folder


def loader(folder, **options):
    return Loader(tokens(folder, CONTEXT), **{"rows": 6, "memory": 20_000, "window": 3, **options})


def read(batches):
    """Return the numbers of the samples that batches hold, read from the samples themselves."""
    return [n // CONTEXT for inputs, _ in batches for n in inputs[:, 0].tolist()]


def test_samples_are_tokens_and_the_tokens_after_them(shards):
    (inputs, targets), *_ = loader(shards, epochs=1)
    assert inputs.shape == targets.shape == (6, CONTEXT) and inputs.dtype == torch.int64
    assert torch.equal(inputs + 1, targets)


def test_every_epoch_has_every_sample_once_and_another_order(shards):
    both = read(loader(shards, epochs=2))
    assert sorted(both[:80]) == sorted(both[80:]) == list(range(80))
    assert both[:80] != both[80:]
    assert both == loader(shards).samples(0, 160).tolist()


def test_a_chunk_is_loaded_once_an_epoch(shards):
    # 82 bytes a chunk: four of them, and the batches made ahead
    small = loader(shards, epochs=1, memory=1200, rows=1)
    assert small.window == 3
    read(small)
    assert small.loads == 8 and small.peak_bytes <= 0.8 * 1200


def test_what_fits_into_memory_is_loaded_once_for_all_epochs(shards):
    roomy = loader(shards, epochs=3)
    read(roomy)
    assert roomy.loads == 8


def test_few_batches_are_made_ahead(shards, monkeypatch):
    """Thousands of small ones fitted into the memory: to make them took a small run more time than to train."""
    made, real = [], Reader._made
    monkeypatch.setattr(Reader, "_made", lambda reader, located: made.append(1) or real(reader, located))
    small = loader(shards, rows=1, memory=2**20, window=None)
    _inputs, _targets = next(iter(small))
    deadline = time.monotonic() + 10
    while len(made) < 33 and time.monotonic() < deadline:
        time.sleep(0.001)
    time.sleep(0.02)
    small.close()
    assert len(made) == 1 + 32


def test_resumed_at_any_position_with_other_rows(shards):
    expected = loader(shards).samples(0, 160).tolist()
    for seed, rows in ((3, 5), (41, 7), (80, 1), (119, 11)):
        resumed = loader(shards, rows=rows, epochs=2, memory=40_000, window=None)
        resumed.load_state_dict({"position": seed, "identity": loader(shards).identity})
        assert read(resumed) == expected[seed:]


class Flipped:
    """Samples that draw, from torch's, Python's and numpy's generators: (image, mask), flipped alike."""

    def __len__(self):
        return 12

    def __getitem__(self, number):
        drawn = torch.rand(()) + random.random() + np.random.rand()
        return number + drawn, drawn


def test_a_sample_draws_the_same_for_everybody_who_reads_it():
    """A worker that reads images and one that reads their masks cropped each elsewhere, and disturbed who draws."""

    def flipped(*wanted, steps=6, start=0, rows=4):
        here = Loader(dataset(Flipped()), rows=rows)
        here.seek(start)
        return torch.cat([batch.read(*wanted)[wanted[1]] for batch, _ in zip(here, range(steps), strict=False)])

    torch.manual_seed(5)
    images = flipped(True, False)
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    masks = flipped(False, True)
    assert torch.equal(states[0], torch.get_rng_state()) and random.getstate() == states[1], "the user draws from them"
    assert np.random.get_state()[1].tolist() == states[2]
    numbers = Loader(dataset(Flipped()), rows=4).samples(0, 24)
    assert torch.allclose(images - masks, torch.from_numpy(numbers).float(), atol=1e-5), "they belong together"
    assert not set(masks[:12].tolist()) & set(masks[12:].tolist()), "another epoch draws others"
    assert torch.equal(flipped(False, True, steps=3, start=12, rows=3), masks[12:21]), "as in a run that is resumed"


def test_pipelines_share_a_batch(shards):
    whole = read(loader(shards, epochs=1))
    parts = [list(loader(shards, epochs=1, pipeline=r, pipelines=2)) for r in range(2)]
    joined = [n for pair in zip(*parts, strict=True) for n in read(pair)]
    assert joined == whole[: len(joined)] and len(joined) == 80


def test_position_counts_what_was_yielded(shards):
    batches = loader(shards)
    assert batches.position == 0
    for number, _ in zip(range(3), batches, strict=False):
        assert batches.position == 6 * (number + 1)


def test_unshuffled_samples_come_as_they_are_stored(shards):
    assert read(loader(shards, epochs=1, shuffle=False)) == list(range(80))


def test_what_is_made_late_is_not_taken_for_another_batch(shards, monkeypatch):
    """Whoever went elsewhere while a batch was being made was given that one for the one that he asked for."""
    release, begun, made = threading.Event(), threading.Event(), Reader._made

    def late(reader, located):
        found = made(reader, located)
        if found[0][0, 0] == 6 * CONTEXT:  # the second batch
            begun.set()
            release.wait(20)
        return found

    monkeypatch.setattr(Reader, "_made", late)
    slow = Loader(tokens(shards, CONTEXT), rows=6, shuffle=False, timeout_s=20)
    assert read([next(iter(slow))])[0] == 0 and begun.wait(20)
    slow.seek(0)
    with monkeypatch.context() as impatient:
        impatient.setattr(slow._reader, "_timeout_s", 0.2)
        with refused("data", Stalled):
            next(iter(slow))[0]
    release.set()
    slow.seek(0)
    assert read([next(iter(slow))])[0] == 0


@pytest.mark.parametrize(
    "options, message",
    [
        ({"rows": 0}, "rows"),
        ({"pipeline": 2, "pipelines": 2}, "pipeline"),
        ({"memory": "2 XB"}, "memory"),
        (
            {"memory": 300},
            "memory",
        ),
        ({"memory": 1200, "window": 99, "rows": 1}, "window"),
    ],
)
def test_options_that_cannot_work(shards, options, message):
    with refused(message):
        loader(shards, **options)


def test_other_data_under_a_resumed_run(shards):
    state = loader(shards).state_dict()
    np.save(shards / "8.npy", np.zeros(41, np.uint16))
    with refused("data"):
        loader(shards).load_state_dict(state)


@pytest.mark.parametrize("at", [0, 5 * 2**20, -1])
def test_one_byte_that_has_changed(tmp_path, at):
    np.zeros(5 * 2**20 + 1, np.uint16).tofile(tmp_path / "a.u16")
    state = Loader(tokens(tmp_path, 1024), rows=4).state_dict()
    with (tmp_path / "a.u16").open("r+b") as file:
        file.seek(at, 0 if at >= 0 else 2)
        file.write(b"x")
    with refused("data"):
        Loader(tokens(tmp_path, 1024), rows=4).load_state_dict(state)


def test_a_shard_that_is_written_anew_in_a_run(shards):
    source = tokens(shards, CONTEXT)
    np.save(shards / "3.npy", np.zeros(41, np.uint16))
    os.utime(shards / "3.npy", ns=(0, 0))
    with refused("file", DataError):
        read(Loader(source, rows=6, epochs=1))


def test_more_shards_than_files_may_be_open(tmp_path):
    for number in range(100):
        np.full(9, number, np.uint16).tofile(tmp_path / f"{number:03}.u16")
    allowed, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    batches = Loader(tokens(tmp_path, 8), rows=10, epochs=1)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 20, most))
    try:
        assert sorted(int(row[0]) for inputs, _ in batches for row in inputs) == list(range(100))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, most))


def test_another_seed_under_a_resumed_run(shards):
    with refused("data"):
        loader(shards).load_state_dict(loader(shards, seed=1).state_dict())


def test_a_shard_that_is_missing_truncated_or_no_shard(shards):
    source = tokens(shards, CONTEXT)
    (shards / "3.npy").unlink()
    with refused("file", DataError):
        list(read(Loader(source, rows=6, epochs=1)))
    (shards / "3.npy").write_bytes((shards / "2.npy").read_bytes()[:-20])
    with refused("file", DataError):
        tokens(shards, CONTEXT)
    (shards / "3.npy").write_bytes(b"nonsense")
    with refused("file", DataError):
        tokens(shards, CONTEXT)


def test_a_shard_that_changes_while_it_is_in_use(shards):
    """A changed one gives other samples."""
    batches = iter(loader(shards, rows=1, window=1, memory=600))
    next(batches)[0]
    for path in shards.iterdir():
        with path.open("r+b") as file:
            file.truncate(100)
    with refused("file", DataError):
        for batch in batches:
            batch[0]


def test_readers_that_are_closed_are_let_go_of(shards):
    batches = loader(shards)
    first = next(iter(batches))
    held = []
    for _ in range(3):
        first.read(True, True)
        held.append(weakref.ref(batches._reader))
        first.read(False, False)
    gc.collect()
    assert [reader() for reader in held] == [None] * 3


def test_a_shard_that_does_not_come_is_named(shards, monkeypatch):
    slow, release = tokens(shards, CONTEXT), threading.Event()
    load = slow.load
    monkeypatch.setattr(slow, "load", lambda *asked: (release.wait(20), load(*asked))[1])
    with pytest.raises(Stalled):
        next(iter(Loader(slow, rows=6, timeout_s=1)))[0]
    release.set()


@pytest.mark.parametrize(
    "options, message",
    [
        ({"readers": "last"}, "readers"),
        ({"readers": "first", "epochs": 1}, "epochs"),
    ],
)
def test_readers(shards, options, message):
    with refused(message):
        loader(shards, **options)


def test_where_only_the_reader_opens_the_data(shards):
    def make(folder=shards):
        return tokens(folder, CONTEXT)

    state = loader(shards, window=2).state_dict() | {"position": 17}
    first = Loader(make, rows=6, memory=20_000, readers="first")
    first.load_state_dict(state)
    assert first.state_dict() == state, "on a worker that has not opened them"
    assert (
        read([batch for batch, _ in zip(first, range(3), strict=False)])
        == loader(shards, window=2).samples(17, 35).tolist()
    )
    assert first.window == 2
    np.save(shards / "8.npy", np.zeros(41, np.uint16))
    changed = Loader(make, rows=6, readers="first")
    changed.load_state_dict(state)
    with refused("data"):
        next(iter(changed))[0]


def test_files_that_cannot_be_tokens_are_refused(shards, tmp_path):
    """A text was read as 16-bit tokens, and a pipe would be waited for."""
    (tmp_path / "README").write_text("text, not tokens")
    os.mkfifo(tmp_path / "pipe.u16")
    for path in (tmp_path / "README", tmp_path / "pipe.u16", tmp_path / "nowhere.npy"):
        with refused("data"):
            tokens([shards / "0.npy", path], CONTEXT)
    np.save(shards / "8.npy", np.zeros(41, np.int32))
    with refused("file"):
        tokens(shards, CONTEXT)


def test_raw_numbers(tmp_path):
    np.arange(41, dtype=np.uint32).tofile(tmp_path / "a.u32")
    inputs, _ = next(iter(Loader(tokens(tmp_path / "a.u32", 4), rows=10, shuffle=False)))
    assert inputs.flatten().tolist() == list(range(40))
    (tmp_path / "a.u32").write_bytes(b"12345")
    with refused("file", DataError):
        tokens(tmp_path / "a.u32", 4)
