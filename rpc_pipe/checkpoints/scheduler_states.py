"""The states of learning-rate schedulers, where another cut puts groups of several stages together."""

from typing import Any


def as_in(own: Any, stored: Any) -> Any:
    """Return `stored` with dicts of the same types as in `own`: a MultiStepLR, in a SequentialLR too, has a Counter.

    >>> from collections import Counter
    >>> as_in([{"milestones": Counter([3])}], [{"milestones": {3: 1}}])
    [{'milestones': Counter({3: 1})}]
    """
    if isinstance(own, dict) and isinstance(stored, dict):
        return type(own)({key: as_in(own.get(key), each) for key, each in stored.items()})
    if isinstance(own, list) and isinstance(stored, list) and len(own) == len(stored):
        return [as_in(*pair) for pair in zip(own, stored, strict=True)]
    return stored


def by_group(states: list[tuple[Any, int, int]]) -> Any:
    """Return one scheduler's state for groups that had several schedulers.

    Args:
        states: for each group the state that it was part of, its index there, and how many groups there were.

    >>> by_group([({"base_lrs": [1, 2], "last_epoch": 9}, 1, 2), ({"base_lrs": [3], "last_epoch": 9}, 0, 1)])
    {'base_lrs': [2, 3], 'last_epoch': 9}
    """
    first = states[0][0]
    if isinstance(first, dict):
        return {key: by_group([(state[key], index, of) for state, index, of in states]) for key in first}
    if not isinstance(first, list):
        return first
    if any(isinstance(each, dict) for each in first):  # schedulers inside a scheduler
        return [by_group([(state[n], index, of) for state, index, of in states]) for n in range(len(first))]
    if all(len(state) == of for state, _, of in states):
        return [state[index] for state, index, _ in states]
    return first
