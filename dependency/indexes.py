"""The arithmetic of indexes: the number in an action stands for several, and only this file knows how.

F, B, I, W, R    index = step * microbatches of a step + microbatch within the step
                 where sequences are sliced, a microbatch is one slice: microbatch * slices + slice
                 with replicas, microbatches take turns: microbatch of the replica * replicas + replica
U, A             index = step * routes + route
G, S, P          index = bucket * routes + route
H                index = part of a replica's microbatches * routes + route
"""

from __future__ import annotations


def split_step(index: int, per_step: int) -> tuple[int, int]:
    """Return the step of a stream, and the index within that step.

    >>> split_step(17, per_step=8)
    (2, 1)
    """
    return divmod(index, per_step)


def join_step(step: int, index: int, per_step: int) -> int:
    """Return the index in a stream of an index within a step."""
    return step * per_step + index


def split_slice(index: int, slices: int) -> tuple[int, int]:
    """Return the microbatch of sequences, and the number of its slice.

    >>> split_slice(7, slices=4)
    (1, 3)
    """
    return divmod(index, slices)


def slice_in(index: int, slices: int) -> int:
    """Return the number of the slice alone."""
    return index % slices


def join_slice(microbatch: int, number: int, slices: int) -> int:
    """Return the index of a slice of a microbatch of sequences."""
    return microbatch * slices + number


def split_replica(index: int, replicas: int) -> tuple[int, int]:
    """Return the index within a replica, and the replica: of microbatches, and of stages' routes.

    >>> split_replica(5, replicas=2)
    (2, 1)
    """
    return divmod(index, replicas)


def join_replica(index: int, replica: int, replicas: int) -> int:
    """Return the index in all replicas of an index within one."""
    return index * replicas + replica


def split_route(index: int, routes: int) -> tuple[int, int]:
    """Return the step of an update, or the bucket of an exchange, and the route.

    >>> split_route(7, routes=2)
    (3, 1)
    """
    return divmod(index, routes)


def route_in(index: int, routes: int) -> int:
    """Return the route alone."""
    return index % routes


def join_route(number: int, route: int, routes: int) -> int:
    """Return the index of an update in a step, or of the exchange of a bucket, on a route."""
    return number * routes + route
