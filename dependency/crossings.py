"""Pairs of options and kinds of schedules that cannot be combined, and why: a row for each pair.

A feature is the name of an option, or of a kind of schedule that `kinds_of` finds. `Pipeline`, the command line and the
transformations of schedules read this table. `tests/crossings.py` trains pairs that are not in it against one process.
"""

from collections.abc import Mapping
from typing import NamedTuple

from .errors import ConfigError
from .spec import Spec, overrides


class Refusal(NamedTuple):
    """A pair of features that is refused; `why` says cause and fix."""

    first: str
    second: str
    why: str


_SLICED = "; 1f1b, zb-h1 and zb-v can be sliced"
_BY_STAGE = "updates come stage by stage, at different times; take a synchronous schedule, such as 1f1b"
NOT_TOGETHER = (
    # members of a worker meet
    Refusal("members", "asynchronous", "members meet in one update a step; take a synchronous schedule, such as 1f1b"),
    Refusal("order=ready", "members", "members make collectives in one order; leave order out"),
    Refusal("members", "deferred_batch_norm", "the sums of a batch are of one member; leave deferred_batch_norm out"),
    Refusal("members", "post_validation", "members meet in the update, which cannot come early; leave it out"),
    # updates that overtake each other
    Refusal("accumulate", "asynchronous", _BY_STAGE),
    Refusal("grad_scaler", "asynchronous", _BY_STAGE),
    Refusal("deferred_batch_norm", "asynchronous", _BY_STAGE),
    Refusal("post_validation", "asynchronous", _BY_STAGE),
    Refusal("log_grad_norm", "updates in parts", "no gradients of a whole step have a norm; leave it out"),
    Refusal("skip_update", "updates in parts", "no gradients of a whole step have a norm; leave it out"),
    Refusal("zero", "clipped by stage", "an owner has not all gradients of its stage; leave one of both out"),
    Refusal("zero", "pulled to a reference", "a replica pulls whole weights, which owners give later; leave zero out"),
    Refusal("ema_decay", "pulled to a reference", "the reference, an average, is what is evaluated; leave it out"),
    Refusal("asynchronous", "shared weights", "each stage updates them at another time; take 1f1b, or do not tie them"),
    # updates that are undone where gradients were clipped
    Refusal("post_validation", "no norm", "an early update is checked by a norm; add max_grad_norm, or leave it out"),
    Refusal("post_validation", "grad_scaler", "the scale of a step decides about its update; leave one of both out"),
    Refusal("post_validation", "zero", "updated weights have left before the norm is known; leave one of both out"),
    # jobs that go on without a worker
    Refusal("elastic", "carrier", "RPC begins once in the life of a process; take --transport zmq"),
    Refusal("elastic", "no launcher", "it ends all workers when one dies; start the job by rpc-pipe run"),
    Refusal("members", "elastic", "a worker of several processes cannot be replaced; leave members out"),
    Refusal("one replica", "elastic", "the weights of a dead worker must be on another one; take replicas=2 or more"),
    Refusal("asynchronous", "elastic", "its steps overlap, so none can be undone; take another schedule, as 1f1b"),
    Refusal("zero", "elastic", "each optimizer state is on one worker alone, and lost with it; leave zero out"),
    Refusal("post_validation", "elastic", "updates come before all workers have committed; leave post_validation out"),
    # transformations of schedules; the name of the schedule stands before these
    Refusal("slices", "routes", f"has several replicas of every stage{_SLICED}"),
    Refusal("slices", "own recomputation", f"recomputes by itself{_SLICED}"),
    Refusal("slices", "own actions", f"says by `actions` what is done with a microbatch{_SLICED}"),
    Refusal("slices", "own splits", f"splits some backwards and others not{_SLICED}"),
    Refusal("recompute", "own recomputation", "recomputes by itself; leave it out"),
    Refusal("recompute", "asynchronous", "lets steps overlap; only synchronous ones recompute"),
    Refusal("recompute", "own actions", "says by `actions` what is done with a microbatch; leave it out"),
)  # fmt: skip


def refuse_kinds(option: str, schedule: type[Spec]) -> None:
    """Refuse an option of a transformation for a schedule.

    Raises:
        ConfigError: they cannot be combined, and why, in words that follow the schedule's name.
    """
    kinds = kinds_of(schedule)
    for first, second, why in NOT_TOGETHER:
        if first == option and second in kinds:
            raise ConfigError(why)


def refuse_together(given: Mapping[str, object]) -> None:
    """Refuse a pair of features.

    Args:
        given: the features of a job, each with its text as typed; without a text the feature is off.

    Raises:
        ConfigError: two features cannot be combined.
    """
    for first, second, why in NOT_TOGETHER:
        if given.get(first) and given.get(second):
            raise ConfigError(f"{given[first]} {given[second]}: {why}")


def kinds_of(schedule: type[Spec]) -> set[str]:
    """Return the kinds of a schedule."""
    kinds = {
        "asynchronous": not schedule.synchronous,
        "routes": overrides(schedule, "num_routes"),
        "own recomputation": schedule.recompute,
        "own actions": overrides(schedule, "actions"),
        "own splits": overrides(schedule, "splits"),
    }
    return {name for name, is_so in kinds.items() if is_so}
