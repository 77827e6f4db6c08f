"""Shards from elsewhere: fetched once, kept within a limit, tried again, and never wrong."""

import errno
import http.server
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
from refusals import refused

from rpc_pipe.data import Loader, pack, shards, tokens
from rpc_pipe.data.shards import find_shards
from rpc_pipe.data.storage import Storage
from rpc_pipe.dependency import DataError

fsspec = pytest.importorskip("fsspec")
pytest.importorskip("aiohttp")


class Server(http.server.SimpleHTTPRequestHandler):
    """Serves files; answers the first so many requests for a shard with an error, or cuts it short."""

    failures = 0
    cut = False
    asked = ()

    def do_GET(self):
        if self.path.endswith(".npy"):
            type(self).asked.append(self.path)
            if len(self.asked) <= self.failures:
                self.send_error(503)
                return
            if self.cut:
                self.send_response(200)
                self.send_header("Content-Length", "10")
                self.end_headers()
                self.wfile.write(b"0123456789")
                return
        super().do_GET()

    def log_message(self, *arguments):
        pass


@pytest.fixture
def served(tmp_path, monkeypatch):
    """Return the URL of a packed text of eight shards, and the server's handler."""
    (tmp_path / "text.txt").write_text("".join(f"{n:07} " for n in range(1000)))
    pack(tmp_path / "text.txt", tmp_path / "served", shard_bytes=1000)
    monkeypatch.setattr(shards, "_FIRST_WAIT_S", 0.01)
    handler = type("Handler", (Server,), {"asked": []})
    made = http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(handler, directory=str(tmp_path / "served")))
    threading.Thread(target=made.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{made.server_port}", handler
    made.shutdown()
    made.server_close()


def read(source, **options):
    batches = Loader(source, **{"rows": 16, "epochs": 1, "window": 2, **options})
    return [bytes(row) for inputs, _ in batches for row in inputs.tolist()]


def test_a_shard_is_fetched_once_and_is_as_it_was(served, tmp_path):
    url, handler = served
    here = Storage(tmp_path / "cache")
    far = read(tokens(url, 8, storage=here))
    assert here.fetched == 8 == len(set(handler.asked))
    assert far == read(tokens(tmp_path / "served", 8)), "the same samples in the same order"
    assert read(tokens(url, 8, storage=Storage(tmp_path / "cache"))) == far and len(handler.asked) == 8


def test_the_cache_keeps_its_limit(served, tmp_path):
    url, _ = served
    here = Storage(tmp_path / "cache", cache_bytes=4 * 1128)
    source = tokens(url, 8, storage=here)
    for batch in Loader(source, rows=8, epochs=1, window=2, memory=16_000):
        batch[0]
        assert num_cached(tmp_path) <= 5, "a listing takes time, in which one shard may go and another come"
    assert here.fetched == 8
    with refused("shard", DataError):
        read(tokens(url, 8, storage=Storage(tmp_path / "small", cache_bytes=1000)))


def num_cached(tmp_path):
    return len([path for path in (tmp_path / "cache").iterdir() if not path.name.startswith(".")])


@pytest.mark.parametrize("limit", [2 * 1128, None])
def test_who_fetches_beside_others_keeps_the_limit(served, tmp_path, monkeypatch, limit):
    """Processes that fetched together grew the cache over its limit: each had dropped all that there was to drop."""
    url, _ = served
    shards = find_shards(url, (".npy",), None)[0]
    storages = [Storage(tmp_path / "cache", cache_bytes=limit) for _ in range(4)]
    together, fetch = threading.Barrier(4), Storage._fetch

    def fetched(self, shard, path):
        if limit is None:  # who fetches without a limit waits for nobody
            together.wait(10)
        fetch(self, shard, path)
        assert limit is None or num_cached(tmp_path) <= 2

    monkeypatch.setattr(Storage, "_fetch", fetched)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda pair: pair[0].local(pair[1]), zip(storages, shards, strict=False)))
    assert sum(each.fetched for each in storages) == 4


def test_a_server_that_fails_is_asked_again(served, tmp_path):
    url, handler = served
    handler.failures = 3
    assert len(read(tokens(url, 8, storage=Storage(tmp_path / "cache")))) == 8 * 124
    assert len(handler.asked) == 8 + 3


def test_a_server_that_goes_on_failing_is_an_error_that_names_the_shard(served, tmp_path):
    url, handler = served
    handler.failures = 10**6
    with refused("shard", DataError):
        read(tokens(url, 8, storage=Storage(tmp_path / "cache")))


def test_what_comes_cut_short_is_never_read(served, tmp_path):
    url, handler = served
    handler.cut = True
    with refused("shard", DataError):
        read(tokens(url, 8, storage=Storage(tmp_path / "cache")))
    assert [path for path in (tmp_path / "cache").iterdir() if not path.name.startswith(".")] == []


def test_what_differs_from_its_checksum_is_never_read(served, tmp_path):
    url, _ = served
    path = tmp_path / "served" / "shard-00003.npy"
    whole = bytearray(path.read_bytes())
    whole[700] ^= 1
    source = tokens(url, 8, storage=Storage(tmp_path / "cache"))
    path.write_bytes(whole)
    with refused("shard", DataError):
        read(source)


def test_no_room_in_the_cache(served, tmp_path, monkeypatch):
    url, _ = served

    def full(self, shard, path):
        raise OSError(errno.ENOSPC, "No space left on device")

    source = tokens(url, 8, storage=Storage(tmp_path / "cache"))
    monkeypatch.setattr(Storage, "_fetch", full)
    with refused("shard", DataError):
        read(source)


def test_places_that_are_not_there(tmp_path):
    with refused("data"):
        tokens("nope://x", 8)
    with refused("data"):
        tokens("memory://none", 8)


def test_a_store_of_objects(tmp_path):
    """Any file system of fsspec: this one stands for S3 and its like."""
    store = fsspec.filesystem("memory")
    np.save(tmp_path / "a.npy", np.arange(81, dtype=np.uint16))
    store.pipe_file("/bucket/data/a.npy", (tmp_path / "a.npy").read_bytes())
    inputs, _ = next(iter(Loader(tokens("memory://bucket/data", 8, storage=Storage(tmp_path / "c")), rows=10)))
    assert sorted(inputs[:, 0].tolist()) == list(range(0, 80, 8))
