"""What a stranger may name as data: one sentence that says what is wrong, and never a wait without end."""

import http.server
import json
import os
import socket
import threading
import time

import numpy as np
import pytest
from refusals import refused

from rpc_pipe.commands.main import main
from rpc_pipe.data import Loader, images, text, tokens
from rpc_pipe.data import shards as shard_files
from rpc_pipe.data.storage import Storage
from rpc_pipe.dependency import DataError


@pytest.fixture
def shards(tmp_path):
    folder = tmp_path / "shards"
    folder.mkdir()
    for i in range(3):
        np.save(folder / f"{i}.npy", np.arange(i * 40, i * 40 + 41, dtype=np.uint16))
    return folder


def read(source, **options):
    return [n // 4 for inputs, _ in Loader(source, rows=6, epochs=1, **options) for n in inputs[:, 0].tolist()]


def test_a_pipe_is_no_shard(shards, capsys):
    """Opening one waits for who writes into it."""
    os.mkfifo(shards / "pipe.u16")
    assert main(["data", str(shards), "--context", "4"]) == 2
    assert "must be a file" in capsys.readouterr().err.replace("\n", " ")


def test_a_folder_that_leads_back_to_itself_is_read_once(shards):
    (shards / "again").symlink_to(shards)
    (shards / "inner").mkdir()
    (shards / "inner" / "up").symlink_to(shards)
    assert tokens(shards, 4).shards == ["0.npy", "1.npy", "2.npy"]
    (shards / "lost.npy").symlink_to(shards / "nowhere")
    with refused("data", DataError):
        tokens(shards, 4)


def test_an_ending_says_what_a_file_holds(shards, tmp_path, capsys):
    (tmp_path / "README").write_text("text, not tokens")
    assert main(["data", str(tmp_path / "README"), "--json"]) == 2
    assert "data README: must end in one of .npy, .bin" in capsys.readouterr().err.replace("\n", " ")
    (shards / "0.npy").rename(shards / "0.NPY")
    assert len(tokens(shards, 4).shards) == 3, "cameras and other systems write capitals"


def test_text_that_cannot_be_read(tmp_path):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    here = Storage(tmp_path / "cache" / "shards")
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "fine"}\n\xff{"text": "no"}\n')
    with refused("shard", DataError):
        text(tmp_path / "a.jsonl", 4, storage=here)
    for name in ("c", "d"):
        parquet.write_table(arrow.table({"text": ["some words"] * 50}), tmp_path / f"{name}.parquet")
    path = tmp_path / "d.parquet"
    path.write_bytes(path.read_bytes()[:-20])
    with refused("shard", DataError):
        text([tmp_path / "c.parquet", path], 4, storage=here)


def test_an_image_that_cannot_be_decoded(tmp_path, capsys):
    pillow = pytest.importorskip("PIL.Image")
    (tmp_path / "cat").mkdir()
    for number in range(3):
        pillow.new("RGB", (8, 8)).save(tmp_path / "cat" / f"{number}.PNG")
    assert len(images(tmp_path, size=4).shards) == 3
    (tmp_path / "cat" / "1.PNG").write_bytes(b"no image")
    assert main(["data", str(tmp_path), "--json"]) == 2
    assert "image cat/1.PNG: cannot be decoded: cannot identify image file" in " ".join(capsys.readouterr().err.split())
    with refused("image", DataError):
        for batch in Loader(images(tmp_path, size=4), rows=1, epochs=1):
            batch[0]


class Plain(http.server.SimpleHTTPRequestHandler):
    """A server of files that misbehaves as it is told: by ending, what it does with a GET, and how often."""

    def do_GET(self):
        for ending, (what, times) in list(self.does.items()):
            if self.path.endswith(ending) and times:
                self.does[ending] = what, times - 1
                return what(self)
        return super().do_GET()

    def log_message(self, *arguments):
        pass


def drops(handler):
    handler.connection.shutdown(socket.SHUT_RDWR)


def is_silent(handler):
    time.sleep(2)


def refuses(handler):
    handler.send_error(403)


@pytest.fixture
def served(shards, monkeypatch):
    pytest.importorskip("fsspec")
    pytest.importorskip("aiohttp")
    monkeypatch.setattr(shard_files, "_FIRST_WAIT_S", 0.01)
    handler = type("Handler", (Plain,), {"does": {}})
    made = http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), lambda *arguments: handler(*arguments, directory=str(shards))
    )
    made.daemon_threads = True
    threading.Thread(target=made.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{made.server_port}/", handler.does
    made.shutdown()
    made.server_close()


def test_a_folder_of_a_server_without_an_index(served, shards, tmp_path):
    """Its list has no sizes, which were taken to be 0."""
    url, does = served
    assert read(tokens(url, 4, storage=Storage(tmp_path / "c"))) == read(tokens(shards, 4))
    does[".npy"] = drops, 2
    assert read(tokens(url, 4, storage=Storage(tmp_path / "d"))) == read(tokens(shards, 4)), "asked again"


def test_servers_that_do_not_give_what_they_list(served, shards, tmp_path, monkeypatch):
    url, does = served
    here = Storage(tmp_path / "cache")
    with refused("data", DataError):
        tokens(url + "9.npy", 4, storage=here)
    does["1.npy"] = refuses, 10**6
    with refused("shard", DataError):
        tokens(url, 4, storage=here)
    does.clear()
    source = tokens(url, 4, storage=here)
    does["1.npy"] = drops, 10**6
    with refused("shard", DataError):
        read(source)
    (shards / "1.npy").unlink()
    does.clear()
    with refused("shard", DataError):
        read(source)
    with refused("data", DataError):
        tokens("http://127.0.0.1:9/", 4, storage=here)
    with refused("data", DataError):
        tokens("http://127.0.0.1:9/1.npy", 4, storage=here)


def test_a_server_that_is_silent(served, tmp_path, monkeypatch):
    url, does = served
    monkeypatch.setattr(shard_files, "_SILENT_S", 0.3)
    source = tokens(url, 4, storage=Storage(tmp_path / "cache"))
    does["1.npy"] = is_silent, 10**6
    begin = time.monotonic()
    with refused("shard", DataError):
        read(source)
    assert time.monotonic() - begin < 10


def test_what_one_makes_alone_others_do_not(tmp_path):
    inside, most = [], []

    def works():
        for _ in range(20):
            with Storage(tmp_path / "cache").alone("it"):
                inside.append(1)
                most.append(len(inside))
                time.sleep(0.001)
                inside.pop()

    threads = [threading.Thread(target=works) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(most) == 80 and max(most) == 1


def test_a_cache_that_cannot_be_made(tmp_path, served):
    (tmp_path / "file").write_text("")
    with refused("cache", DataError):
        read(tokens(served[0], 4, storage=Storage(tmp_path / "file" / "cache")))
    (tmp_path / "a.txt").write_text("some words")
    with refused("cache", DataError):
        text(tmp_path / "a.txt", 4, storage=Storage(tmp_path / "file" / "cache"))


def test_figures_of_odd_sources_are_json_or_one_sentence(shards, tmp_path, capsys):
    assert main(["data", str(shards), "--json", "--context", "4"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["shards"] == 3 and found["samples"] == 30 and found["loads_per_epoch"] == 1
    (tmp_path / "empty").mkdir()
    for source in ("empty", "nowhere", "shards/nothing*.npy"):
        assert main(["data", str(tmp_path / source), "--json"]) == 2
        told = capsys.readouterr()
        assert not told.out and "rpc-pipe" in told.err + "rpc-pipe" and "Traceback" not in told.err
    with refused("data"):
        tokens(shards, 1024)
