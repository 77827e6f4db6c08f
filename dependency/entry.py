"""What a worker knows about one of its actions."""

from __future__ import annotations

from typing import NamedTuple

from .action import Action


class Pulled(NamedTuple):
    """Something another worker finishes first."""

    action: Action
    worker: int
    #: True if its payload flows to this worker; False if only its being finished matters (an order edge)
    carries: bool


class Entry(NamedTuple):
    """One action of a worker with everything the worker needs to know about it."""

    action: Action
    #: own actions that must be finished first
    own: tuple[Action, ...]
    #: other workers' actions that must be finished first
    pulled: tuple[Pulled, ...]
    #: other workers that pull the payload of this action
    consumers: tuple[int, ...]
    #: the actions whose payloads this one computes from, on this worker or others
    sources: tuple[Action, ...]
    #: whether an action of this worker computes from the payload of this one
    here: bool
