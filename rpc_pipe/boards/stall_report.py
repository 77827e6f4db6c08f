"""The report on a stall: the state of every worker, and the worker at the end of the chain of waits."""

from collections import Counter
from collections.abc import Mapping, Sequence

from .board import Live, State, named


def roll_call(
    lives: Mapping[int, Live], last_host: int, now_ns: int, members: int = 1, culprit: int | None = None
) -> list[str]:
    """Return a line for each process, and one with the chain of waits.

    Args:
        last_host: the worker of the last stage, which has the result.
        now_ns: the present time of the workers' clock.
        culprit: the process that hangs, if stacks have shown it.
    """
    lines = [
        f"{named(rank, members)} {live.told(members)} for {duration(now_ns - live.since_ns)}"
        for rank, live in lives.items()
    ]
    chain = [*waiting_chain(lives, last_host)]
    last = behind(lives, chain[-1], members) if culprit is None else culprit
    chain += [last] * (last not in chain)
    names, end = " -> ".join(named(rank, members) for rank in chain), lives[chain[-1]]
    if (unseen := waits_for_unseen(lives, chain[-1])) is not None:
        who, why = named(unseen, members), "it has made no pipeline so far, or is on another host"
        lines.append(f"{names} -> {who}: everybody waits for {who}, of which nothing can be seen here: {why}")
    elif len(chain) > 1 and end.state is State.WAITING:  # the checker has ruled out deadlocks of the schedule
        lines.append(f"{names}: each waits for the other: a message was lost, or the machine is overloaded")
    elif len(chain) > 1:
        lines.append(f"{names}: everybody waits for {named(chain[-1], members)}, which is {end.told(members)}")
    return lines


def waits_for_unseen(lives: Mapping[int, Live], worker: int) -> int | None:
    """Return the worker that `worker` waits for if its state is unknown, else None."""
    live = lives[worker]
    return live.peer if live.state is State.WAITING and live.peer not in lives else None


def waiting_chain(lives: Mapping[int, Live], last_host: int) -> Sequence[int]:
    """Return the longest chain of workers, each waiting for the next, to the worker at the end of most chains."""
    chains = [_chain(lives, worker, last_host) for worker in lives]
    ends = Counter(chain[-1] for chain in chains)
    # A worker that has left may have waited for another before.
    most = max(ends, key=lambda worker: (lives[worker].state is not State.LEFT, ends[worker], worker))
    return max((chain for chain in chains if chain[-1] == most), key=len)


def behind(lives: Mapping[int, Live], end: int, members: int) -> int:
    """Return the member of `end`'s worker that is behind.

    Members run alike: the rest are further, and wait for this member in a collective. A member that is between two
    steps, or stopped, is in none; among members that run an action, the one that began first is behind.
    """
    here = [rank for rank in lives if rank // members == end // members]
    apart = [rank for rank in here if lives[rank].state in (State.STARTING, State.BETWEEN, State.STOPPED)]
    found = [*apart, *(rank for rank in running(lives) if rank in here)]

    def place(rank: int) -> tuple[float, bool]:
        return lives[rank].step + (lives[rank].state is State.BETWEEN) / 2, rank not in apart

    return min(found, key=place, default=end)


def running(lives: Mapping[int, Live]) -> list[int]:
    """Return the processes that run an action, the one that began first before the rest."""
    found = (rank for rank, live in lives.items() if live.state is State.RUNNING)
    return sorted(found, key=lambda rank: (lives[rank].since_ns, rank))


def _chain(lives: Mapping[int, Live], worker: int, last_host: int) -> list[int]:
    chain = [worker]
    while (live := lives[chain[-1]]).state is State.WAITING:
        following = last_host if live.peer is None else live.peer
        if following == chain[-1] or following not in lives:
            break
        chain.append(following)
        if following in chain[:-1]:
            break
    return chain


def duration(ns: float) -> str:
    """Return a duration as text: 3 s, 2 min."""
    seconds = max(0.0, ns / 1e9)
    if seconds < 0.1:
        return f"{1e3 * seconds:.0f} ms"
    if seconds < 10:
        return f"{seconds:.1f} s"
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
