"""Schedules that list their slots: the same orders as when all workers were listed together, from few timetables."""

import hashlib

import pytest

from rpc_pipe.dependency import check, local_order
from rpc_pipe.schedules import SCHEDULES, _controllable, _vee

#: of workers 0, 31 and 63 of 64 with 512 microbatches, listed together with all other workers
DIGESTS = {
    "zb-v": "51f35932ed1c50a0ad1c896a1cd13d87",
    "v-half": "677a659538b7b9d36ae16e4509ae90c7",
    "v-min": "a7a54ab2c4a92da9f233a3f9bb15e3b5",
    "dualpipe": "392b6d3fdbf1e25fd3c217d63b39a57b",
    "dualpipev": "a21e2abbe220770e5d0fb3e4cb6ca068",
}
#: of timetables that were made pass by pass, of few and many workers and microbatches
MADE = {
    "v-half": "a0247bf97a3aba67d3cdbca18e1994c0",
    "v-min": "1294e3d0e575c04854bc7362c60d6ffc",
}


@pytest.mark.parametrize("name", DIGESTS)
def test_large_orders_are_those_that_were_listed_together(name):
    """V-Half took 17 s and the others up to 130 MB: the timetables of all workers were made, in full length."""
    spec = SCHEDULES[name](num_workers=64, num_microbatches=512)
    digest = hashlib.md5(usedforsecurity=False)
    for worker in (0, 31, 63):
        digest.update(" ".join(map(str, local_order(spec, worker))).encode())
    assert digest.hexdigest() == DIGESTS[name]


@pytest.mark.parametrize("name", DIGESTS)
def test_a_check_lists_a_worker_and_its_neighbours(name, monkeypatch):
    cls, listed = SCHEDULES[name], set()

    class Counting(cls):
        def timetable(self, worker):
            listed.add(worker)
            return super().timetable(worker)

    _vee.timetable.cache_clear()
    check(Counting(num_workers=12, num_microbatches=24), 4)
    assert listed <= {3, 4, 5}


@pytest.mark.parametrize("name", ["v-half", "v-min"])
@pytest.mark.parametrize("num_workers", [1, 2, 3, 6, 7])
def test_repeated_periods_are_those_of_a_whole_timetable(name, num_workers):
    """The period of a timetable of few microbatches stands for those of one that is made of all of them."""
    block = SCHEDULES[name](num_workers=num_workers, num_microbatches=1).block
    for count in range(num_workers + 3, num_workers + 9):
        whole = [row.rstrip(b"\5") for row in _controllable._made(block, count)]
        shown = min(count, num_workers + _controllable._SHOWN)
        short, begin = _controllable._repeating(block, shown)
        middle = slice(begin, begin + _controllable._PERIOD)
        rows = [row[:begin] + row[middle] * (count - shown) + row[begin:] for row in short]
        assert [row.rstrip(b"\5") for row in rows] == whole


@pytest.mark.parametrize("name", MADE)
def test_timetables_are_those_of_one_pass_after_the_other(name):
    """All workers' passes of a slot are moved at once: they came to 88 s for 1,024 workers, one after the other."""
    digest = hashlib.md5(usedforsecurity=False)
    for num_workers, counts in [(1, (1, 2, 5)), (2, range(1, 7)), (5, range(1, 10)), (8, (4, 8, 11)), (40, (9, 40))]:
        block = SCHEDULES[name](num_workers=num_workers, num_microbatches=1).block
        for count in counts:
            digest.update(b" ".join(_controllable._made(block, count)))
    assert digest.hexdigest() == MADE[name]
