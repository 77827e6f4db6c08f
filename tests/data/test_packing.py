import json

import numpy as np
import pytest
from processes import ROOT, rpc_pipe
from refusals import refused

from rpc_pipe.commands.main import main
from rpc_pipe.data import Loader, pack, tokens
from rpc_pipe.data.packing import _ShardWriter
from rpc_pipe.data.survey import survey
from rpc_pipe.dependency import DataError


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "text"
    made.mkdir()
    for i in range(3):
        lines = [json.dumps({"text": f"document {i} {n} " + "x" * (n % 50)}) for n in range(200)]
        (made / f"{i}.jsonl").write_text("\n".join(lines))
    (made / "z.txt").write_text("the last one, not ASCII: ä€😀\n" * 100)
    return made


def content(out):
    return np.concatenate([np.load(path) for path in sorted(out.glob("*.npy"))])


def test_shards_hold_the_text(folder, tmp_path):
    pack(folder, tmp_path / "out", shard_bytes=1000)
    text = bytes(content(tmp_path / "out"))
    assert text.startswith(b"document 0 0 document 0 1 x") and text.endswith("ä€😀\n".encode())
    index = json.loads((tmp_path / "out" / "index.json").read_text())
    assert index["tokens"] == len(text) and len(index["shards"]) == -(-len(text) // 1000)
    assert index["dtype"] == "uint8"


def test_killed_after_any_shard_it_goes_on_to_the_same_shards(folder, tmp_path, monkeypatch):
    pack(folder, tmp_path / "whole", shard_bytes=1000)
    write = _ShardWriter._write
    for last in (0, 3, 17):

        def killed(self, file, at, skip, last=last):
            if len(self._packed.shards) == last:
                raise KeyboardInterrupt
            write(self, file, at, skip)

        out = tmp_path / f"killed-{last}"
        monkeypatch.setattr(_ShardWriter, "_write", killed)
        with pytest.raises(KeyboardInterrupt):
            pack(folder, out, shard_bytes=1000)
        with refused(out.name if last else "data"):
            pack(folder, out, shard_bytes=999) if last else tokens(out, 8)
        monkeypatch.setattr(_ShardWriter, "_write", write)
        pack(folder, out, shard_bytes=1000)
        assert (content(out) == content(tmp_path / "whole")).all()
        assert (out / "index.json").read_text() == (tmp_path / "whole" / "index.json").read_text()


def test_a_tokenizer_of_the_library(folder, tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"[UNK]": 0, "document": 1, "</s>": 300}, unk_token="[UNK]")
    )
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    words.save(str(tmp_path / "tokenizer.json"))
    packed = pack(folder / "0.jsonl", tmp_path / "out", tokenizer=tmp_path / "tokenizer.json")
    assert content(tmp_path / "out")[:4].tolist() == [1, 0, 0, 300] or packed.dtype == "uint8"
    with refused("tokenizer"):
        pack(folder, tmp_path / "other", tokenizer="none.json")


def test_what_is_wrong_with_text_is_named(folder, tmp_path):
    (folder / "1.jsonl").write_text('{"text": "fine"}\n{"body": 1}\n')
    with refused("shard", DataError):
        pack(folder, tmp_path / "out")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("mine")
    with refused("full"):
        pack(folder, tmp_path / "full")


def test_shards_that_are_not_as_they_were_packed(folder, tmp_path):
    out = tmp_path / "out"
    pack(folder, out, shard_bytes=1000)
    path = out / "shard-00002.npy"
    whole = path.read_bytes()
    path.write_bytes(whole[:500])
    with refused("shard", DataError):
        tokens(out, 8)
    path.write_bytes(whole[:-1] + b"?")
    with refused("shard", DataError):
        for batch in Loader(tokens(out, 8), rows=8, epochs=1):
            batch[0]
    path.unlink()
    with refused("shard", DataError):
        tokens(out, 8)


def test_an_index_whose_counts_are_no_numbers_is_refused(folder, tmp_path):
    """A count that was text was printed as a number, and multiplied by the bytes of a token: two tracebacks."""
    out = tmp_path / "out"
    pack(folder, out, shard_bytes=1000)
    index = json.loads((out / "index.json").read_text())
    (out / "index.json").write_text(json.dumps({**index, "tokens": "text."}))
    with refused("out"):
        pack(folder, out, shard_bytes=1000)
    index["shards"][0]["tokens"] = "text."
    (out / "index.json").write_text(json.dumps(index))
    with refused("data", DataError):
        tokens(out, 8)


def test_the_command(folder, tmp_path):
    out = tmp_path / "out"
    packed = rpc_pipe("data", "pack", folder, out, "--shard", "1KB", "--json")
    assert packed.returncode == 0, packed.stderr
    told = json.loads(packed.stdout)
    looked = rpc_pipe("data", out, "--json", "--context", 8, "--memory", "200KB")
    assert looked.returncode == 0, looked.stderr
    found = json.loads(looked.stdout)
    assert found["shards"] == told["shards"] and found["loads_per_epoch"] == 1.0 and found["peak_mb"] <= 0.2
    assert found["samples"] == sum(
        (entry["tokens"] - 1) // 8 for entry in json.loads((out / "index.json").read_text())["shards"]
    )
    assert found["mean_distance"] > found["samples"] / 5 and found["mb_per_s"] > 0


def test_how_well_samples_are_mixed_is_told(tmp_path):
    """What was told, how far samples come from where they are stored, was a third of all for any window."""
    np.save(tmp_path / "a.npy", np.arange(20_001, dtype=np.uint16))
    source = tokens(tmp_path, 1, chunk_bytes=200)
    mixed = survey(Loader(source, rows=4, window=1)), survey(Loader(source, rows=4, window=20))
    stored = survey(Loader(source, rows=4, shuffle=False))
    assert stored.mean_distance == pytest.approx(1, abs=0.5)
    assert mixed[0].mean_distance < 3 * 100, "a chunk has a hundred samples, and no two are in memory together"
    assert mixed[1].mean_distance > 20_000 / 4


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["none"], "data none: there is no such file or folder"),
        (["pack", "none"], "rpc-pipe data pack: name the text, and then the folder for the shards"),
        (["pack", "none", "out", "--seed", "3"], "--seed 3: is not for rpc-pipe data pack"),
        (["none", "--shard", "1MB"], "--shard 1MB: is for rpc-pipe data pack"),
        (["README.md", "--memory", "much"], "--memory much: must be a number of bytes above 0"),
    ],
)
def test_what_the_command_refuses(arguments, message, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert main(["data", *arguments]) == 2
    assert capsys.readouterr().err.startswith(f"error: {message}")
