"""Many indexes as one: the formulas of a schedule, asked once about a whole range of microbatches.

The methods of a spec are formulas of whole numbers. Asked about `first + step * t` for all t of a range, most answer
with another such number. A comparison that is true for a part of the range alone divides the range, and so does a
quotient that changes within it. Then both parts are asked again. A formula without such an answer (a table's row) is
asked one by one. So every microbatch has the answer of the formula itself, in as few steps as the formulas have cases.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

Answer = TypeVar("Answer")


class _Divides(Exception):
    """The answer is another one from each of these places of the range on."""

    def __init__(self, *at: int) -> None:
        self.at = at


class Along:
    """The whole numbers first + step * t for t of range(count); it behaves as one of them."""

    __slots__ = "count", "first", "step"

    def __init__(self, first: int, step: int, count: int) -> None:
        self.first, self.step, self.count = first, step, count

    def _of(self, first: int, step: int) -> Any:
        return Along(first, step, self.count) if step else first

    def _less(self, other: Any) -> tuple[int, int]:
        """Return the first and the step of the difference to a number."""
        first, step = ends(other)
        return self.first - first, self.step - step

    def __add__(self, other: Any) -> Any:
        if isinstance(other, Along):
            return self._of(self.first + other.first, self.step + other.step)
        return Along(self.first + other, self.step, self.count)

    def __neg__(self) -> Any:
        return self._of(-self.first, -self.step)

    def __sub__(self, other: Any) -> Any:
        return self._of(*self._less(other))

    def __rsub__(self, other: Any) -> Any:
        return -self + other

    def __mul__(self, other: Any) -> Any:
        return self._of(self.first * int(other), self.step * int(other))

    __radd__, __rmul__ = __add__, __mul__

    def __floordiv__(self, other: Any) -> Any:
        other = int(other)
        if self.step % other == 0:
            return self._of(self.first // other, self.step // other)
        quotient = self.first // other
        if (self.first + self.step * (self.count - 1)) // other == quotient:
            return quotient
        farthest = other - (1 if other > 0 else -1) if (self.step > 0) == (other > 0) else 0
        room = farthest + quotient * other - self.first
        raise _Divides(abs(room) // abs(self.step) + 1)

    def __mod__(self, other: Any) -> Any:
        if self.step % int(other) == 0:
            return self.first % int(other)
        return self - self // other * int(other)

    def __divmod__(self, other: Any) -> tuple[Any, Any]:
        quotient = self // other
        return quotient, self - quotient * int(other)

    def __int__(self) -> int:
        raise _Divides(self.count // 2)

    __index__ = __hash__ = __float__ = __int__

    def __bool__(self) -> bool:
        return bool(self != 0)

    def __lt__(self, other: Any) -> bool:
        first, step = self._less(other)
        if (first < 0) == (first + step * (self.count - 1) < 0):
            return first < 0
        raise _Divides(-(first // step) if first < 0 else first // -step + 1)

    def __ge__(self, other: Any) -> bool:
        return not self < other

    def __gt__(self, other: Any) -> bool:
        return bool(-self < -other)

    def __le__(self, other: Any) -> bool:
        return not self > other

    def __eq__(self, other: object) -> bool:
        first, step = self._less(other)
        at = 0 if not step else -first // step
        if first + step * at or not 0 <= at < self.count:
            return False
        if not step:
            return True
        raise _Divides(at or 1)

    def __ne__(self, other: object) -> bool:
        return not self == other


def ends(number: Any) -> tuple[int, int]:
    """Return the first of a range of numbers and the step; the step of one number is 0."""
    return (number.first, number.step) if isinstance(number, Along) else (number, 0)


def divide(number: Any, others: Sequence[Any], key: Callable[[Any], int]) -> int:
    """Return how many of some others, which are in order, have no larger number; a range is divided at the rest."""
    if not isinstance(number, Along):
        return bisect_right(others, number, key=key)
    first, step = number.first, number.step
    least, most = sorted((first, first + step * (number.count - 1)))
    found = bisect_right(others, least, key=key)
    if inside := others[found : bisect_right(others, most, found, key=key)]:
        apart = {key(other) - first for other in inside}
        raise _Divides(*sorted({-(-each // step) if step > 0 else each // step + 1 for each in apart}))
    return found


def ask(question: Callable[[Any], Answer], first: int, step: int, count: int) -> Iterator[tuple[int, int, Answer]]:
    """Yield (place, number, answer) for the parts of the range first + step * t with one answer each."""
    todo = [(0, count)]
    while todo:
        begin, number = todo.pop()
        index = first + step * begin
        try:
            yield begin, number, question(Along(index, step, number) if number > 1 else index)
        except _Divides as divided:
            places = 0, *divided.at, number
            todo += [(begin + a, b - a) for a, b in zip(places[-2::-1], places[:0:-1], strict=True)]
