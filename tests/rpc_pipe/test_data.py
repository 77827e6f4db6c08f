import pytest
import torch
from refusals import refused

from rpc_pipe.data import Loader
from rpc_pipe.demo.corpus import Corpus


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text"
    path.write_bytes(bytes(range(256)) * 40)
    return str(path)


def test_samples_are_bytes_and_the_bytes_after_them(text):
    corpus = Corpus(text, 16)
    inputs, targets = next(iter(Loader(corpus.samples(), rows=8)))
    assert inputs.shape == targets.shape == (8, 16) and inputs.dtype == torch.int64
    assert torch.equal((inputs + 1) % 256, targets)
    again = next(iter(Loader(Corpus(text, 16).samples(), rows=8)))
    assert torch.equal(again[0], inputs), "every worker draws the same batch"


def test_nothing_held_out_is_trained_on(tmp_path):
    """Held-out chunks are marked with 255; no training sample may show one."""
    size, path = 1000, tmp_path / "marked"
    path.write_bytes(b"".join(bytes([255 if i % 10 == 9 else 0]) * size for i in range(10)))
    corpus = Corpus(str(path), 100)
    assert corpus.chunk == size
    samples = list(Loader(corpus.samples(), rows=16, epochs=2))
    assert sum(len(inputs) for inputs, _ in samples) == 2 * 89, "of 9000 bytes"
    for inputs, targets in samples:
        assert not inputs.any() and not targets.any()
    for inputs, targets in corpus.held_out_batches(4, 3):
        assert (inputs == 255).all() and (targets == 255).all()


def test_the_bigram_model_knows_what_follows_what(text):
    corpus = Corpus(text, 16)
    # 25.6 smoothed counts against the 36 true ones of each byte: far from ln 256 = 5.5, and not 0
    assert 0.3 < corpus.bigram_loss(corpus.held_out_batches(4, 4)) < 0.8


@pytest.mark.parametrize("content, message", [(b"", "need at least 170"), (b"x" * 100, "need at least 170")])
def test_too_little_text(tmp_path, content, message):
    path = tmp_path / "short"
    path.write_bytes(content)
    with refused("--data"):
        Corpus(str(path), 16)
