"""A job whose worker processes are threads of this one: each makes a pipeline of its own."""

import threading
from contextlib import nullcontext

import rpc_pipe.launching.attaching
import rpc_pipe.launching.meeting_place
import rpc_pipe.pipeline
from rpc_pipe.launching.job import Job
from rpc_pipe.model.observe import observe_forward
from rpc_pipe.workers.transport.local import local_carriers


def each_worker(monkeypatch, work, workers=3):
    """Return what `work(worker)` returns on every worker of a job, each with a pipeline of its own, as threads."""
    carriers, here = local_carriers(workers), threading.local()
    monkeypatch.setattr(observe_forward, "_eager", nullcontext)  # what it sets is of all threads
    monkeypatch.setattr(rpc_pipe.launching.attaching, "attach", lambda *_: None)  # a process has one board
    monkeypatch.setattr(rpc_pipe.pipeline, "own_part", lambda *said: (here.job, workers))
    monkeypatch.setattr(rpc_pipe.launching.meeting_place, "join", lambda place: carriers[place.job.worker])
    found, failed = {}, []

    def run(worker):
        here.job = Job(worker, workers, "", "")
        try:
            found[worker] = work(worker)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=(worker,)) for worker in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    if failed:
        raise failed[0]
    return [found[worker] for worker in range(workers)]
