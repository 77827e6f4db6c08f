"""Samples of every format are those that were stored."""

import json

import numpy as np
import pytest
import torch
from refusals import refused

from rpc_pipe.data import Loader, dataset, images, open_source, table, tables, text, tokens
from rpc_pipe.data.source import ALL
from rpc_pipe.data.storage import Storage
from rpc_pipe.dependency import DataError

pa = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")
feather = pytest.importorskip("pyarrow.feather")


def epoch(source, **options):
    """Return all inputs and targets of an epoch, sorted by input."""
    batches = list(Loader(source, **{"rows": 7, "epochs": 1, **options}))
    inputs, targets = (torch.cat([batch[i] for batch in batches]) for i in range(2))
    order = inputs.flatten(1)[:, 0].argsort() if inputs.dim() > 1 else inputs.argsort()
    return inputs[order], targets[order]


@pytest.fixture
def rows(tmp_path):
    """Two files, 25 rows each, in row groups of 10; x is a list of two, y is its double."""
    for i in range(2):
        x = np.arange(i * 25, i * 25 + 25, dtype=np.float32)
        made = pa.table({"x": [[v, v + 0.5] for v in x.tolist()], "y": 2 * x, "name": [f"row {v}" for v in x]})
        parquet.write_table(made, tmp_path / f"{i}.parquet", row_group_size=10)
        with pa.OSFile(str(tmp_path / f"{i}.arrow"), "wb") as file, pa.ipc.new_file(file, made.schema) as writer:
            writer.write_table(made, max_chunksize=10)
    return tmp_path


@pytest.mark.parametrize("ending", ["parquet", "arrow"])
def test_rows_of_a_table(rows, ending):
    source = table(str(rows / f"*.{ending}"), "x", "y")
    assert source.sizes.tolist() == [10, 10, 5, 10, 10, 5] and len(source.shards) == 2
    inputs, targets = epoch(source, window=2)
    assert torch.equal(inputs, torch.stack([torch.arange(50) + 0.0, torch.arange(50) + 0.5], 1))
    assert torch.equal(targets, 2.0 * torch.arange(50))


def test_row_groups_of_the_window_are_in_memory(rows):
    batches = Loader(table(str(rows / "*.parquet"), "x", "y"), rows=3, window=2, memory=9600, epochs=2)
    assert batches.identity.endswith(", window 2") and batches.order.mixed == 2
    read = [int(y) // 2 for _, targets in batches for y in targets]
    assert read == batches.samples(0, 100).tolist()
    assert batches.loads <= 2 * 6 and batches.peak_bytes <= batches.room
    batches.seek(13)
    assert [int(y) // 2 for _, targets in batches for y in targets] == read[13:]


def test_several_columns_are_a_dict(rows):
    inputs, targets = next(iter(Loader(table(rows / "0.parquet", ["x", "y"], "y"), rows=25)))
    assert set(inputs) == {"x", "y"} and torch.equal(inputs["y"], targets)
    inputs, targets = next(iter(Loader(table(rows / "0.parquet", "y", ["y", "x"]), rows=25)))
    assert torch.equal(inputs, targets["y"]) and torch.equal(2 * targets["x"][:, 0], inputs), "one is both"


@pytest.mark.parametrize("ending", ["parquet", "arrow"])
def test_only_the_columns_that_are_wanted_are_read(rows, monkeypatch, ending):
    asked, reads = set(), {"parquet": tables._ParquetFile, "arrow": tables._ArrowFile}[ending]
    read = reads.read
    monkeypatch.setattr(
        reads, "read", lambda file, group, columns: asked.add(tuple(columns)) or read(file, group, columns)
    )
    source = table(str(rows / f"*.{ending}"), ["x", "y"], "y")
    batches = iter(Loader(source, rows=30))
    batch = next(batches)
    inputs, targets = batch.read(False, True)
    assert inputs is None and asked == {("y",)}
    whole, doubled = batch.read(True, True)
    assert list(whole) == ["x", "y"] and torch.equal(whole["y"], targets) and torch.equal(doubled, targets)
    assert asked == {("y",), ("x", "y")}, "chunks that lack a column are loaded anew"
    assert next(batches).read(False, True)[0] is None


def test_of_a_compressed_file_one_batch_is_in_memory_at_a_time(tmp_path):
    """All were, whichever chunk was wanted; and `datasets` and pandas compress Feather."""
    made = pa.table({"x": np.arange(100_000) % 7, "y": np.arange(100_000) % 7})
    feather.write_feather(made, tmp_path / "a.feather", compression="lz4", chunksize=1000)
    usual, pool = pa.default_memory_pool(), pa.proxy_memory_pool(pa.default_memory_pool())
    pa.set_memory_pool(pool)
    try:
        source = table(tmp_path / "a.feather", "x", "y")
        held = source.load(50)
    finally:
        pa.set_memory_pool(usual)
    assert len(source.sizes) == 100 and pool.max_memory() < 4 * 16_000
    assert source.rows(held, np.arange(3), ALL)["x"].tolist() == [row % 7 for row in range(50_000, 50_003)]


def test_tables_that_cannot_be_read(rows):
    with refused("shard"):
        table(str(rows / "*.parquet"), "z", "y")
    with refused("shard"):
        epoch(table(rows / "0.parquet", "name", "y"))
    content = (rows / "1.parquet").read_bytes()
    (rows / "1.parquet").write_bytes(content[: len(content) // 2])
    with refused("shard", DataError):
        table(str(rows / "*.parquet"), "x", "y")


def test_images_by_class(tmp_path):
    pillow = pytest.importorskip("PIL.Image")
    for number in range(12):
        folder = tmp_path / ("cat" if number % 2 else "dog")
        folder.mkdir(exist_ok=True)
        pillow.new("RGB", (8, 6), (10 * number, 0, 0)).save(folder / f"{number:02}.png")
    source = images(tmp_path, size=4)
    assert source.classes == ["cat", "dog"]
    inputs, targets = epoch(source)
    assert inputs.shape == (12, 3, 4, 4)
    assert (inputs[:, 0, 0, 0] * 255).round().int().tolist() == [10 * n for n in range(12)]
    assert targets.tolist() == [1 - n % 2 for n in range(12)]

    def brighter(image):
        return float(np.asarray(image)[0, 0, 0]) + torch.rand(())

    before, drawn = torch.get_rng_state(), epoch(images(tmp_path, transform=brighter))[0]
    assert torch.equal(before, torch.get_rng_state()), "drawn for images, not from the user's generator"
    assert torch.equal(drawn, epoch(images(tmp_path, transform=brighter, threads=1))[0])
    assert drawn.int().tolist() == [10 * n for n in range(12)] and len(set((drawn % 1).tolist())) == 12
    (tmp_path / "cat" / "01.png").write_bytes(b"no image")
    with refused("image", DataError):
        epoch(images(tmp_path, size=4))


def test_any_map_style_dataset():
    pairs = [(torch.tensor([float(n)]), n % 3) for n in range(20)]
    inputs, targets = epoch(dataset(pairs))
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


def test_text_is_made_into_tokens_once(tmp_path):
    lines = [{"text": f"line {n} "} for n in range(40)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    storage = Storage(tmp_path / "cache" / "shards")
    source = text(tmp_path / "a.jsonl", 8, storage=storage)
    whole = "".join(line["text"] for line in lines).encode()
    inputs = torch.cat([batch[0] for batch in Loader(source, rows=4, epochs=1, shuffle=False)])
    assert bytes(inputs.flatten().tolist()) == whole[: (len(whole) - 1) // 8 * 8]
    assert source.shards == ["a.jsonl"] and source.stored_bytes == (tmp_path / "a.jsonl").stat().st_size
    (packed,) = (tmp_path / "cache" / "packed").iterdir()
    before = (packed / "index.json").stat().st_mtime_ns
    assert text(tmp_path / "a.jsonl", 8, storage=storage).identity == source.identity
    assert (packed / "index.json").stat().st_mtime_ns == before
    edited = (tmp_path / "a.jsonl").read_text().replace("line 7 ", "LINE 7 ")
    (tmp_path / "a.jsonl").write_text(edited)
    assert text(tmp_path / "a.jsonl", 8, storage=storage).identity != source.identity, "of the same size"


def test_kinds_by_name(rows, tmp_path):
    assert open_source(str(rows / "*.parquet")).sizes.sum() == 50
    parquet.write_table(pa.table({"of": [{"a": 1}], "x": [2.0], "z": [3]}), tmp_path / "struct.parquet")
    (batch,) = Loader(open_source(tmp_path / "struct.parquet"), rows=1, epochs=1)
    assert (batch[0].tolist(), batch[1].tolist()) == ([2.0], [3]), "columns of structs are left out"
    np.save(tmp_path / "t.npy", np.zeros(100, np.uint8))
    assert open_source(tmp_path / "t.npy", context=9).identity == tokens(tmp_path / "t.npy", 9).identity
