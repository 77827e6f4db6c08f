"""Streams as arrays, and the counts that workers see of each other. Loads without torch."""

from collections.abc import Callable, Mapping
from itertools import zip_longest
from typing import Any

import numpy as np

from ..dependency.streams import Piece, Streams

#: a moment or a slot that is never reached
NEVER = np.int64(2**62)
Array = Any


class Tables:
    """Streams as arrays. The k-th streams of all lanes (resources of a worker) stand together, with empty ones."""

    def __init__(self, streams: Streams, costs: Mapping[float, float], latency: Callable[[int, int], Any]) -> None:
        self.streams = streams
        lanes: dict[tuple[int, str], list[int]] = {}
        for number, stream in enumerate(streams.streams):
            lanes.setdefault((stream.worker, stream.last.kind.resource), []).append(number)
        self.width = max(map(len, lanes.values()))
        #: a power of two: slots are multiples of it, so the rest may say which stream of a lane has a slot
        self.digits = 1 << (self.width - 1).bit_length()
        #: one more than there are
        self.lanes = len(lanes) + 1
        self.lane_worker = [worker for worker, _ in lanes]
        #: place of each stream in the arrays
        self.at = {n: lane + k * self.lanes for lane, own in enumerate(lanes.values()) for k, n in enumerate(own)}
        size = self.lanes * self.width
        self.stream: list[Any] = [None] * size
        for number, place in self.at.items():
            self.stream[place] = streams.streams[number]
        self.costs, self._latency = costs, latency
        #: after the streams' counts: one that is always enough, and counts of arrivals on other workers
        self.always, self.num_counts = size, size + 1
        self._counted: dict[tuple[int, int], int] = {}
        #: time on the way -> count there, by stream
        self.ways: dict[Any, list[list[int]]] = {}
        #: by stream: the counts that its actions need, a column for each
        sources: list[dict[tuple[int, int], int]] = [{} for _ in range(size)]
        self.pieces: list[list[tuple[Piece, list[tuple[int, int, int]]]]] = [[] for _ in range(size)]
        for place, stream in enumerate(self.stream):
            own, done = sources[place], 0
            for piece in stream.pieces if stream else ():
                needs: list[tuple[int, int, int]] = []
                times: dict[int, int] = {}
                for number, wanted, grows in piece.needs:
                    if self.at[number] == place and wanted <= done:
                        continue  # its lane runs one action at a time
                    count = self._count(number, stream.worker)
                    times[count] = times.get(count, 0) + 1
                    needs.append((own.setdefault((count, times[count]), len(own)), wanted, grows))
                self.pieces[place].append((piece, needs))
                done += piece.number
        self.columns = max(map(len, sources)) or 1
        #: by count: the needs of it, as places in the state of a run
        needed: list[list[int]] = [[] for _ in range(self.num_counts)]
        self.source = np.full((self.columns, size), self.always)
        for place, own in enumerate(sources):
            for (count, _), column in own.items():
                needed[count].append(place * (self.columns + 2) + column)
                self.source[column, place] = count
        self.needed = _padded(needed, (self.lanes - 1) * (self.columns + 2))  # a need of no stream
        self._list_rows()
        self.channels = [(time, _padded(counts, self.num_counts)) for time, counts in self.ways.items()]

    def _list_rows(self) -> None:
        """Make a row of each piece: the needed counts, the slot, the number of actions; their growth; the step."""
        blocks, costs, begin, width = list[Array](), list[Any](), list[int](), self.columns + 2
        for place, own in enumerate(self.pieces):
            begin.append(len(costs))
            block = []
            for piece, needs in own:
                row = [0] * (2 * width + 1)
                row[width - 2 : width] = piece.slot * self.digits + place // self.lanes, piece.number
                row[-3:] = piece.growth * self.digits, -1, piece.step
                for column, wanted, growth in needs:
                    row[column], row[width + column] = wanted, growth
                block.append(row)
                costs.append(self.costs[piece.cost])
            # Behind the last piece: counts that are never reached.
            block.append([int(NEVER) + 1] * (width - 1) + [0] * (width + 2))
            costs.append(0)
            blocks.append(np.array(block, np.int64))
        rows, self.cost = np.concatenate(blocks), np.array(costs)
        self.rows, self.growing, self.step = rows[:, :width], rows[:, width:-1], rows[:, -1]
        #: of each stream the number of its first piece
        self.begin = np.array(begin)

    def _count(self, number: int, worker: int) -> int:
        """Return which count `worker` sees of a stream."""
        place, source = self.at[number], self.streams.streams[number].worker
        time = 0 if source == worker else self._latency(source, worker)
        if not time:
            return place
        if (place, worker) not in self._counted:
            self._counted[place, worker] = self.num_counts
            self.ways.setdefault(time, [[] for _ in self.stream])[place].append(self.num_counts)
            self.num_counts += 1
        return self._counted[place, worker]


def _padded(rows: list[list[int]], filler: int) -> Array:
    """Return rows of numbers as columns."""
    return np.array([*zip_longest(*rows, fillvalue=filler)], dtype=np.int64).reshape(-1, len(rows))
