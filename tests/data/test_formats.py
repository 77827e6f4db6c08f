"""Samples of every reader are those that were stored."""

import numpy as np
import pytest
import torch
from refusals import refused

from rpc_pipe.data import Loader, RangeReader, Ranges, dataset, hugging_face, parquet
from rpc_pipe.data.source import Wanted
from rpc_pipe.dependency import ConfigError, DataError

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")


def epoch(source, **options):
    """Return all inputs and targets of an epoch, sorted by input."""
    batches = list(Loader(source, **{"rows": 7, "epochs": 1, **options}))
    inputs, targets = (torch.cat([batch[i] for batch in batches]) for i in range(2))
    order = inputs.flatten(1)[:, 0].argsort() if inputs.dim() > 1 else inputs.argsort()
    return inputs[order], targets[order]


def columns(begin, end):
    """Return x, a list of two; y, its double; z, which differs in length; and a text."""
    x = np.arange(begin, end, dtype=np.float32)
    pairs, ragged = [[v, v + 0.5] for v in x.tolist()], [[n] * (n % 3 + 1) for n in range(begin, end)]
    return {"x": pairs, "y": 2 * x, "z": ragged, "name": [f"row {v}" for v in x]}


@pytest.fixture
def rows(tmp_path):
    """Two files, 25 rows each, in row groups of 10."""
    for i in range(2):
        pq.write_table(pa.table(columns(i * 25, i * 25 + 25)), tmp_path / f"{i}.parquet", row_group_size=10)
    return tmp_path


def of_datasets(held, *sides):
    return hugging_face(pytest.importorskip("datasets").Dataset.from_dict(held), *sides)


@pytest.fixture(params=["stored", "picked", "streamed"])
def samples(request, tmp_path):
    """Return the same 50 rows, and options of the source and of the loader."""
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_dict(columns(0, 50)).save_to_disk(tmp_path / "rows")
    held = datasets.load_from_disk(tmp_path / "rows")
    if request.param == "streamed":
        return held.to_iterable_dataset(num_shards=2), {"rows": 50}, {"shuffle": False}
    return held.select([*range(50)]) if request.param == "picked" else held, {}, {}


def test_rows_of_parquet(rows):
    source = parquet(rows, "x", "y")
    assert source.sizes.tolist() == [10, 10, 5, 10, 10, 5]
    inputs, targets = epoch(source, window=2)
    assert torch.equal(inputs, torch.stack([torch.arange(50) + 0.0, torch.arange(50) + 0.5], 1))
    assert torch.equal(targets, 2.0 * torch.arange(50))


def test_row_groups_of_the_window_are_in_memory(rows):
    batches = Loader(parquet(rows, "x", "y"), rows=3, window=2, memory=9600, epochs=2)
    assert batches.identity.endswith(", window 2") and batches.order.mixed == 2
    read = [int(y) // 2 for _, targets in batches for y in targets]
    assert read == batches.samples(0, 100).tolist()
    assert batches.loads <= 2 * 6 and batches.peak_bytes <= batches.room
    batches.seek(13)
    assert [int(y) // 2 for _, targets in batches for y in targets] == read[13:]


def test_rows_of_datasets(samples, monkeypatch):
    held, of_source, of_loader = samples
    monkeypatch.setattr("rpc_pipe.data.stored_rows.CHUNK_BYTES", 200)
    monkeypatch.setattr("rpc_pipe.data.stored_rows._STREAMED_BYTES", 200)
    source = hugging_face(held, ["x", "y"], "y", **of_source)
    assert len(source.sizes) > 3
    batches = Loader(source, rows=7, epochs=2, memory=3000, **of_loader)
    read = [row for inputs, targets in batches for row in zip(*inputs.values(), targets, strict=True)]
    numbers = [int(y) // 2 for *_, y in read]
    assert numbers == batches.samples(0, 100).tolist() and sorted(numbers) == sorted([*range(50)] * 2)
    assert all(torch.equal(x, torch.tensor([y / 2, y / 2 + 0.5])) and y == again for x, y, again in read)
    assert batches.loads <= 2 * len(source.sizes)
    batches.seek(31)
    assert [int(y) // 2 for _, targets in batches for y in targets] == numbers[31:]


def test_rows_of_different_lengths(samples, rows):
    held, of_source, of_loader = samples
    lengths = [n % 3 + 1 for n in range(50)]
    for source, more in ((hugging_face(held, ["z"], ["y"], **of_source), of_loader), (parquet(rows, ["z"], ["y"]), {})):
        for inputs, targets in Loader(source, rows=7, epochs=1, lengths=lengths, most_tokens=20, **more):
            assert torch.equal(inputs["attention_mask"].sum(1) - 1.0, (targets["y"] / 2) % 3)
            assert torch.equal(inputs["z"][:, 0] * 2.0, targets["y"])
        with pytest.raises(ConfigError) as raised:
            epoch(source, **more)
        assert "rows of z differ in length" in str(raised.value)


def test_a_stream_comes_in_its_order_and_says_where_it_ends():
    stream = pytest.importorskip("datasets").Dataset.from_dict({"x": [*range(10)]}).to_iterable_dataset()
    with refused("shuffle"):
        Loader(hugging_face(stream, "x", "x", rows=10), rows=2)
    with refused("hugging_face"):
        hugging_face(stream, "x", "x")
    with refused("stream", DataError):
        epoch(hugging_face(stream, "x", "x", rows=12), shuffle=False)
    assert epoch(hugging_face(stream, "x", "x", rows=9), shuffle=False)[0].tolist() == [*range(9)]


def test_only_the_columns_that_are_wanted_are_read(rows):
    for source in parquet(rows, ["x", "y"], "y"), of_datasets(columns(0, 50), ["x", "y"], "y"):
        read = [source.load(0, Wanted(*sides)).keys() for sides in ((True, False), (False, True))]
        assert [set(each) for each in read] == [{"x", "y"}, {"y"}]


def test_columns_that_cannot_be_read(rows):
    for subject, make in (
        ("file", lambda *sides: parquet(rows / "0.parquet", *sides)),
        (
            "hugging_face",
            lambda *sides: of_datasets(columns(0, 50), *sides),
        ),
    ):
        with refused(subject):
            make("absent", "y")
        with pytest.raises(ConfigError) as raised:
            epoch(make("name", "y"))
        assert "column name is string" in str(raised.value)
    with refused("hugging_face"):
        hugging_face([(1, 2)], "x", "y")
    held = pytest.importorskip("datasets").Dataset.from_dict(columns(0, 50))
    with refused("hugging_face"):
        hugging_face(held.with_transform(lambda rows: {name: [0] * 50 for name in rows}), "x", "y")
    with refused("dataset", DataError):
        epoch(of_datasets({"x": [1, None], "y": [1, 2]}, "x", "y"))


def test_data_that_change_are_refused(rows):
    source = parquet(rows, "x", "y")
    (rows / "1.parquet").write_bytes((rows / "1.parquet").read_bytes()[:-20])
    with refused("file", DataError):
        epoch(source)
    with refused("file", DataError):
        parquet(rows, "x", "y")
    held = columns(0, 50)
    before = of_datasets(held, "x", "y").identity
    held["y"][49] = -1
    assert of_datasets(held, "x", "y").identity != before


def test_any_map_style_dataset():
    pairs = [(torch.tensor([float(n)]), n % 3) for n in range(20)]
    inputs, targets = epoch(pairs)
    assert inputs.flatten().tolist() == list(range(20)) and targets.tolist() == [n % 3 for n in range(20)]
    named = [{"a": x, "b": y} for x, y in pairs]
    assert torch.equal(epoch(dataset(named, inputs="a", targets="b", chunk=4), window=2)[0], inputs)
    both = next(iter(Loader(dataset(named, inputs=["a", "b"], targets=["b"]), rows=20)))
    assert set(both[0]) == {"a", "b"} and torch.equal(both[0]["b"], both[1]["b"])
    assert both.read(False, True)[0] is None
    with refused("dataset"):
        dataset(named)
    with refused("dataset"):
        dataset(iter(pairs))
    with refused("dataset"):
        Loader(3, rows=2)


def test_a_reader_of_ranges_is_a_source():
    class Squares(RangeReader):
        name, identity, sizes, num_bytes = "squares", "squares", np.array([3, 4]), np.array([24, 32])

        def read(self, chunk, columns):
            numbers = np.arange(3) if chunk == 0 else np.arange(3, 7)
            return {name: numbers**2 if name == "squared" else numbers for name in columns}

    inputs, targets = epoch(Ranges(Squares(), "number", "squared"))
    assert inputs.tolist() == [*range(7)] and targets.tolist() == [n * n for n in range(7)]
