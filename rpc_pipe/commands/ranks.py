"""`rpc-pipe ranks`: print which process is where, in the words of torchtitan's mesh and Megatron's groups."""

import json
from typing import Any, NamedTuple

from ..dependency import check_all
from ..launching.report import Reporter
from ..planning.pipe_options import workers_of
from ..planning.specs import make_spec
from .options import SCHEDULE, Parser, schedule_options


def add(commands: Any) -> None:
    """Add `ranks` to the command line."""
    parser: Parser = commands.add_parser("ranks", help="print which process has which stages, replica and member")
    parser.take(*SCHEDULE, "members", "shard", "json")


class _PlacedRank(NamedTuple):
    """The place of a process; `pp` is its worker's number in its replica."""

    rank: int
    pp: int
    replica: int
    member: int
    stages: list[int]


def command(typed: dict[str, Any], argv: list[str]) -> int:
    members, replicas = typed.get("members", 1), typed.get("replicas", 1)
    workers = workers_of(typed.get("workers", 2), members)
    count = typed.get("microbatches", 8 * replicas)
    spec = make_spec(typed.get("schedule", "1f1b"), workers, count, schedule_options(typed))
    check_all(spec)
    places = []
    for worker in range(workers):
        replica, pp = spec.own_place(worker)
        stages = sorted({stage for stage, _ in spec.hosted(worker)})
        places += [_PlacedRank(worker * members + member, pp, replica, member, stages) for member in range(members)]
    tensor = typed.get("shard") == "tp"
    groups: dict[str, list[list[int]]] = {}
    for name, along in (("pipeline", 1), ("data", 2), ("tensor" if tensor else "sharded data", 3)):
        alike: dict[Any, list[int]] = {}
        for at in places:  # of one group are processes that differ in one coordinate alone
            alike.setdefault((*at[1:along], *at[along + 1 : 4]), []).append(at.rank)
        groups[name] = list(alike.values())
    dims = ["pp", "dp_replicate", "tp" if tensor else "dp_shard"]
    if "json" in typed:
        mesh = [{"rank": at.rank, "mesh": [at.pp, at.replica, at.member], "stages": at.stages} for at in places]
        print(json.dumps({"dimensions": dims, "processes": mesh, "groups": groups}))
        return 0
    sizes = f"{workers // replicas} x {replicas} x {members}"
    lines = [f"{len(places)} processes: torchtitan's mesh ({', '.join(dims)}) is {sizes}"]
    for at in places:
        hosted = f"stage{'s' * (len(at.stages) > 1)} {', '.join(map(str, at.stages))}"
        lines.append(f"rank {at.rank:>4}  mesh {at[1:4]}  {hosted}; replica {at.replica}, member {at.member}")
    named = {name: " | ".join(" ".join(map(str, ranks)) for ranks in found) for name, found in groups.items()}
    for line in [*lines, "Megatron-LM's groups:", *(f"  {name:<12}  {said}" for name, said in named.items())]:
        Reporter().text(line)
    return 0
