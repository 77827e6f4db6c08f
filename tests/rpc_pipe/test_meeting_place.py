"""Places where processes meet: several, one after the other, in one process's life."""

import gc
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from processes import python
from refusals import refused

from rpc_pipe.boards.board import COPY, OWN
from rpc_pipe.launching import meeting_place
from rpc_pipe.launching.job import Job
from rpc_pipe.launching.meeting_place import place_of
from rpc_pipe.workers.actor import WorkerActor
from rpc_pipe.workers.compute.devices.device import DeviceBackend

pytest.importorskip("zmq")


def meet_and_leave(places):
    """Return what the workers of a place tell each other; each is a thread of this process."""

    def take_part(place):
        carrier = meeting_place.join(place)
        told = WorkerActor(carrier, DeviceBackend(), {}).exchange("here", place.job.worker)
        meeting_place._close(place)
        return told

    with ThreadPoolExecutor(len(places)) as pool:
        return list(pool.map(take_part, places))


def root(folder, num_workers=3):
    jobs = [
        Job(worker, num_workers, f"file://{folder}/rendezvous", "lo", 20, transport="zmq")
        for worker in range(num_workers)
    ]
    return [place_of(job) for job in jobs]


def held(folder):
    """Return the number of threads and descriptors of this process, and the files in a folder."""
    for thread in threading.enumerate():
        if isinstance(thread, threading.Timer):  # one waits for the last words of a worker that has left
            thread.join()
    while gc.collect():
        """Some objects are freed by the finalizers of others."""
    return threading.active_count(), len(os.listdir("/proc/self/fd")), sorted(folder.rglob("*"))


def test_members_meet_beside_the_boards_of_a_run(tmp_path, monkeypatch):
    """Their folder had the name of the first member's board, so that a run with members could not be watched."""
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda *_, **__: None)
    found = Mock(side_effect=lambda *_, **__: Mock(found=list(tmp_path.iterdir())))
    monkeypatch.setattr(torch.distributed.device_mesh, "init_device_mesh", found)
    monkeypatch.setattr(torch.distributed, "new_group", lambda *_, **__: None)
    monkeypatch.setattr(type(torch.distributed.group), "WORLD", None)
    monkeypatch.setattr(meeting_place, "at_exit", lambda _: None)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    job = Job(0, 2, f"file://{tmp_path}/rendezvous", "lo", 20, members=2)
    mesh = meeting_place.mesh_of_members(job, "cpu", "")
    assert not [path for path in mesh.found if path.name.startswith((OWN, COPY))]


def test_two_pipelines_of_one_script_have_as_many_members(tmp_path, monkeypatch):
    """The second one's processes did not meet, for a cause in torch's words."""
    job = Job(0, 2, f"file://{tmp_path}/rendezvous", "lo", 20, members=2)
    monkeypatch.setattr(meeting_place, "_carriers", {place_of(job): (Mock(), Mock())})
    for other in (replace(job, members=1), replace(job, members=4, transport="zmq")):
        with refused("members"):
            meeting_place.join(place_of(other))


def ten_epochs(folder):
    folder.chmod(0o700)
    places = root(folder)
    assert meet_and_leave([place.sub("epoch 0") for place in places]) == [[0, 1, 2]] * 3
    before = held(folder)
    for number in range(1, 11):
        # One worker is gone in each epoch, and another is back.
        there = {0, 1, 2} - {number % 3}
        epoch = [place.sub(f"epoch {number}", there) for place in places if place.job.worker in there]
        assert meet_and_leave(epoch) == [sorted(there)] * 2
    threads, descriptors, files = held(folder)
    assert (threads, files) == (before[0], before[2])
    assert descriptors <= before[1]  # the first epoch's may be freed late


def test_10_epochs_leave_no_thread_descriptor_or_file_behind(tmp_path):
    """In a process of its own: what other tests have open comes and goes meanwhile."""
    script = (
        "import pathlib, runpy, sys; _, here, tests, folder = sys.argv; sys.path.insert(0, tests); "
        "runpy.run_path(here)['ten_epochs'](pathlib.Path(folder))"
    )
    done = python("-c", script, __file__, Path(__file__).parents[1], tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_processes_of_different_planes_do_not_meet(tmp_path):
    tmp_path.chmod(0o700)
    places = [place.sub(f"plane {plane}") for plane in range(2) for place in root(tmp_path, 2)]
    assert meet_and_leave(places) == [[0, 1]] * 4


@pytest.mark.parametrize("tcp", [False, True])
def test_a_place_gives_the_carrier_that_has_met_there_until_it_is_left(tmp_path, tcp):
    tmp_path.chmod(0o700)
    (place,) = root(tmp_path, 1)
    if tcp:
        (tmp_path / "key").write_text("k" * 64)
        place = replace(place, job=replace(place.job, port=0, key_file=tmp_path / "key"))
    first = meeting_place.join(place)
    assert meeting_place.join(place) is first and meeting_place.join(place_of(place.job).sub("epoch 1")) is not first
    meeting_place._close(place)
    assert meeting_place.join(place) is not first
    for each in list(meeting_place._carriers):
        meeting_place._close(each)
