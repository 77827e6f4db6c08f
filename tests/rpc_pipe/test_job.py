import pytest
from refusals import refused

from rpc_pipe.launching.interfaces import interface_towards
from rpc_pipe.launching.job import Job, current_job
from rpc_pipe.launching.meeting_place import _reached, place_of
from rpc_pipe.workers.transport.carrier import Plane

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


def test_alone_under_torchrun_and_under_our_launcher():
    assert current_job({}) is None
    job = current_job(TORCHRUN)
    assert (job.worker, job.num_workers, job.init_method, job.interface) == (1, 2, "env://", "lo")
    assert job.shared_memory
    ours = current_job({"RANK": "0", "WORLD_SIZE": "3", "RPC_PIPE_INIT": "file:///tmp/x"})
    assert (ours.num_workers, ours.init_method, ours.interface) == (3, "file:///tmp/x", "lo")


@pytest.mark.parametrize(
    "change, message",
    [
        ({"MASTER_PORT": None}, "MASTER_PORT"),
        ({"RANK": "two"}, "RANK"),
        ({"RANK": "2"}, "RANK"),
        ({"MASTER_ADDR": "no.such.host.invalid"}, "MASTER_ADDR"),
    ],
)
def test_half_set_or_senseless_variables_are_refused(change, message):
    environment = {key: value for key, value in (TORCHRUN | change).items() if value is not None}
    with refused(message):
        current_job(environment)


def test_the_way_to_oneself_is_the_loopback():
    assert interface_towards("127.0.0.1") == "lo"


def test_two_torchruns_on_one_machine_are_told_what_to_set(monkeypatch):
    """Each took 127.0.0.1 for its own host, and after two minutes said `nobody has left word of elsewhere`."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")

    class Silent:
        def take(self, name, timeout_s):
            raise TimeoutError(name)

    job = Job(0, 2, "env://", "", one_host=False)
    with pytest.raises(TimeoutError, match=r"no worker is on another host than MASTER_ADDR 127\.0\.0\.1: .*INTERFACE"):
        _reached(job, Silent())


def test_a_process_is_a_member_of_a_worker_and_meets_those_of_its_plane():
    job = Job(5, 8, "file:///run/rendezvous", "lo", members=2)
    assert (job.worker, job.member, job.num_workers) == (2, 1, 4)
    place = place_of(job)
    assert (place.names, place.workers) == (("plane 1",), {0, 1, 2, 3})
    assert [Plane(job.member, job.members).rank(worker) for worker in range(4)] == [1, 3, 5, 7]
