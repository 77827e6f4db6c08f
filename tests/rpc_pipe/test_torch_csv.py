"""Schedules exported for torch's runtime run there; what torch has written runs here."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from processes import start
from refusals import refused

from rpc_pipe.dependency import B, F, I, Spec, W, check_all, local_order
from rpc_pipe.planning.listed_schedule import export_csv
from rpc_pipe.planning.simulator import simulate, uniform
from rpc_pipe.planning.specs import make_spec

COST = uniform({F: 1, B: 2, I: 1, W: 1})
RANKS = 3
#: those that torch's CSV can say
EXPORTED = (
    "naive gpipe 1f1b eager-1f1b interleaved bfs hanayo zb-h1 zb-h2 zb-v v-half v-min dualpipev".split()
)  # fmt: skip


def order(spec, worker):
    return [action for action in local_order(spec, worker) if action.kind.per_microbatch]


@pytest.mark.skipif(torch.__version__ < "2.12", reason="torch 2.11 loses connections between its ranks, on gloo")
def test_torch_runs_what_is_exported(tmp_path):
    """Three ranks on gloo, one in the middle, in torch's own runtime: every gradient as in one process, to 1e-12."""
    plans = [(name, {}, 4) for name in EXPORTED] + [
        ("1f1b", {}, 7),
        ("interleaved", {"chunks": 3}, 4),
        ("hanayo", {"waves": 2}, 4),
        ("zb-v", {}, 7),
    ]
    names = []
    for name, parameters, M in plans:
        names.append("-".join(map(str, [name, M, *parameters.values()])))
        (tmp_path / f"{names[-1]}.csv").write_text(export_csv(make_spec(name, RANKS, M, parameters)))
    script = Path(__file__).parent / "torch_runtime.py"
    ranks = [
        start(script, rank, RANKS, tmp_path / "meet", tmp_path, merged=True, GLOO_SOCKET_IFNAME="lo")
        for rank in range(RANKS)
    ]
    try:
        printed = [rank.communicate(timeout=120)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for text, rank in zip(printed, ranks, strict=True):
        assert rank.returncode == 0, text
        assert sorted(line.split()[1] for line in text.splitlines() if line.startswith("equal")) == sorted(names)


@settings(max_examples=30)
@given(name=st.sampled_from(EXPORTED), P=st.integers(1, 5), M=st.integers(1, 9))
def test_what_is_exported_is_imported_as_it_was(tmp_path_factory, name, P, M):
    spec = make_spec(name, P, M)
    path = tmp_path_factory.mktemp("csv") / "plan.csv"
    path.write_text(export_csv(spec))
    again = make_spec(str(path), P, M)
    check_all(again)
    assert [order(again, w) for w in range(P)] == [order(spec, w) for w in range(P)]
    assert simulate(again, COST, order="fixed").makespan == simulate(spec, COST, order="fixed").makespan


def test_what_torch_has_written_runs_here(tmp_path):
    """Its interleaved zero-bubble schedule, and DualPipeV with overlapped pairs, which run one after the other."""
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    for cls, stages_per_rank in ((schedules.ScheduleInterleaved1F1B, 2), (schedules.ScheduleDualPipeV, 2)):
        rows = torch_order(schedules, cls, 2, stages_per_rank, 4)
        path = tmp_path / f"{cls.__name__}.csv"
        path.write_text("\n".join(",".join(str(a) if a else "" for a in row) for row in rows) + "\n")
        spec = make_spec(str(path), 2, 4)
        check_all(spec)
        result = simulate(spec, COST)
        assert sum(map(len, result.orders())) >= 2 * 4 * spec.num_stages
        ours = {"ScheduleInterleaved1F1B": "interleaved", "ScheduleDualPipeV": "dualpipev"}[cls.__name__]
        assert [order(spec, w) for w in range(2)] == [order(make_spec(ours, 2, 4), w) for w in range(2)]


def torch_order(schedules, cls, ranks, stages_per_rank, microbatches):
    """Return the rows that torch computes in the constructor, which itself needs a process group."""
    blank = cls.__new__(cls)
    blank.pp_group_size = blank._pp_group_size = ranks
    blank._num_stages, blank._n_microbatches = ranks * stages_per_rank, microbatches
    blank.n_local_stages, blank.rank = stages_per_rank, 0
    blank.microbatches_per_round = ranks
    blank.number_of_rounds = microbatches // ranks
    calculate = getattr(blank, "_calculate_single_rank_operations")  # noqa: B009  private, and only here
    return [[action for action in calculate(rank) if action is not None] for rank in range(ranks)]


def test_transfers_are_left_out_and_pairs_taken_apart(tmp_path):
    path = tmp_path / "comms.csv"
    waits = "0WAIT_SEND_F0,0WAIT_SEND_B,0WAIT_REDUCE_GRAD,0RESHARD"  # of torch 2.15
    first = f"0UNSHARD,0F0,0SEND_F0,{waits},,0F1,0RECV_B0,0B0,0B1,0REDUCE_GRAD"
    path.write_text(f"{first}\n1RECV_F0,1F0,(1F1;1B0)OVERLAP_F_B,1B1\n")
    spec = make_spec(str(path), 2, 2)
    check_all(spec)
    assert [str(a) for a in order(spec, 0)] == "0F0 0F1 0B0 0B1".split()
    assert [str(a) for a in order(spec, 1)] == "1F0 1F1 1B0 1B1".split()


@pytest.mark.parametrize(
    "text, workers, message",
    [
        ("0F0,0X0\n", 1, "schedule"),
        ("0F,0B0\n", 1, "schedule"),
        ("0F0,0B0,0I0,0W0\n", 1, "schedule"),
        ("0F0,0B0\n\n1F0,1B0\n", 2, "workers"),
        ("0F0,0B0\n0F1,0B1\n", 2, "schedule"),
        ("0F0,0B0\n2F0,2B0\n", 2, "schedule"),
        ("0F0,0B0\n", 2, "workers"),
        ("0F0,0B0\n1F0,1B0\n", 2, "microbatches"),
        (None, 2, "schedule"),
    ],
)
def test_a_file_that_does_not_fit_says_where(tmp_path, text, workers, message):
    path = tmp_path / "plan.csv"
    if text is not None:
        path.write_text(text)
    with refused(message):
        make_spec(str(path), workers, 4)


@pytest.mark.parametrize("name, message", [("chimera", "2 replicas"), ("varuna", "knows no recomputation")])
def test_what_the_format_cannot_say_is_refused(name, message):
    with refused("schedule"):
        export_csv(make_spec(name, 4, 8))


class LastFirst(Spec):
    """Runs its microbatches from the last to the first."""

    def program(self, worker):
        backwards = range(self.num_microbatches)[::-1]
        return [F(worker, m) for m in backwards] + [B(worker, m) for m in backwards]


class OneForAll(Spec):
    """Leaves every worker but the first without a stage."""

    @property
    def num_stages(self):
        return 1

    def program(self, worker):
        return [kind(0, m) for m in range(self.num_microbatches) for kind in (F, B)] if worker == 0 else []


@pytest.mark.parametrize(
    "cls, message", [(LastFirst, r"in the order \[1, 0\].*must ascend"), (OneForAll, "worker 1 holds no stage")]
)
def test_what_torch_would_fail_on_is_refused(cls, message):
    with refused("schedule"):
        export_csv(cls(num_workers=2, num_microbatches=2))


@pytest.mark.parametrize("format", ["compute_only", "compute_comms"])
@pytest.mark.parametrize(
    "cls, ours",
    [
        ("ScheduleLoopedBFS", "bfs"),
        ("ScheduleInterleaved1F1B", "interleaved"),
        ("ScheduleZBVZeroBubble", "zb-v"),
        ("ScheduleDualPipeV", "dualpipev"),
        ("ScheduleInterleavedZeroBubble", None),
    ],
)
def test_what_torch_dumps_is_the_same_schedule_here(tmp_path, cls, ours, format):
    """Without and with its transfers; where we have the schedule too, the orders are equal."""
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    for P in (2, 3, 4):
        M, path = 2 * P, str(tmp_path / f"{P}.csv")
        stages = [SimpleNamespace(num_stages=2 * P, group_size=P, group_rank=0, submod=None) for _ in range(2)]
        getattr(schedules, cls)(stages, M, loss_fn=len)._dump_csv(path, format=format)
        spec = make_spec(path, P, M)
        check_all(spec)
        ran = simulate(spec, COST).orders()
        assert ran == [order(spec, w) for w in range(P)]
        if ours:
            assert ran == [order(make_spec(ours, P, M), w) for w in range(P)]
