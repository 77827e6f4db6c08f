import random
from collections import Counter

import numpy as np
import pytest
from refusals import refused

from rpc_pipe.data.sample_order import Order, key, permute


def test_a_bijection_of_every_size():
    for size in [*range(1, 40), 1000, 4097]:
        for seed in range(3):
            assert sorted(permute(np.arange(size), size, key(seed, size)).tolist()) == list(range(size))


def test_all_permutations_of_three_come_about_alike():
    counts = Counter(tuple(permute(np.arange(3), 3, key(seed)).tolist()) for seed in range(2000))
    assert len(counts) == 6 and min(counts.values()) > 270


def test_many_sizes_and_keys_at_once():
    sizes = np.array([1, 5, 1000, 7])
    together = permute(np.array([0, 3, 17, 6]), sizes, np.arange(4, dtype=np.uint64))
    alone = [
        int(permute(np.array([n]), int(size), k)[0])
        for k, (n, size) in enumerate(zip([0, 3, 17, 6], sizes, strict=True))
    ]
    assert together.tolist() == alone


@pytest.mark.parametrize("case", range(40))
def test_every_epoch_has_every_sample_once_wherever_it_is_entered(case):
    draw = random.Random(case)
    sizes = [draw.choice([0, 1, 3, 17]) for _ in range(draw.randrange(1, 15))] + [2]
    order = Order(sizes, case, draw.randrange(1, len(sizes) + 1))
    total = order.num_samples
    epochs = [order.samples(e * total, (e + 1) * total).tolist() for e in range(3)]
    assert all(sorted(epoch) == list(range(total)) for epoch in epochs)
    begin = draw.randrange(2 * total)
    end = draw.randrange(begin, 3 * total)
    fresh = Order(sizes, case, order.window)
    assert fresh.samples(begin, end).tolist() == [n for epoch in epochs for n in epoch][begin:end]


def test_a_block_needs_its_window_and_moves_on_by_one_chunk():
    order = Order([10] * 20, 1, 4)
    epoch = order.epoch(0)
    for segment in order.locate(np.arange(200)):
        assert set(segment.chunks.tolist()) <= set(epoch.resident(segment.block).tolist())
    assert epoch.num_blocks == 17


def test_resident_chunks_lie_in_different_parts():
    order = Order([1] * 100, 0, 10)
    for block in range(91):
        assert sorted(order.epoch(0).resident(block) // 10) == list(range(10))


def test_no_index_is_kept_for_a_terabyte():
    order = Order([2**15] * 2**14, 0, 24)
    assert len(order.samples(10**8, 10**8 + 64)) == 64
    assert 0.25 < np.abs(order.samples(0, 10**6) - np.arange(10**6)).mean() / order.num_samples < 0.55


def test_an_order_of_no_samples_or_no_window_is_refused():
    """A user's own `Source` may be empty: places of its samples would be looked for without an end."""
    with refused("data"):
        Order([0, 0], 0)
    with refused("window"):
        Order([3, 2], 0, window=0)
