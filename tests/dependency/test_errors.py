import pickle

import pytest

from rpc_pipe.dependency import (
    ConfigError,
    DataError,
    Disagreement,
    PeerLost,
    PipeError,
    ScheduleError,
    Stalled,
    StorageError,
    WorkerFailure,
)


def test_a_failure_of_many_words_is_shortened_for_the_others():
    """A message of 24 MB went to every worker, in two copies, and the first cause took 10 s."""
    long = WorkerFailure(1, "2B3", 17, f"ValueError: {'again ' * 10**6}end", "Traceback\n" * 10**6 + "ValueError")
    assert len(str(long)) < 30_000
    assert "ValueError: again" in long.summary and long.summary.endswith("end")
    assert "[... 5998015 characters ...]" in long.summary and long.remote_traceback.endswith("ValueError")


@pytest.mark.parametrize(
    "error",
    [
        ConfigError("workers 0"),
        DataError("shard a.npy: is missing"),
        Disagreement("worker 0 calls step 3"),
        PipeError("broken"),
        PeerLost(1, 2, "end of file"),
        ScheduleError("cycle", "a drawing"),
        Stalled("nothing arrived"),
        StorageError("checkpoint c: cannot be written: No space left on device"),
        WorkerFailure(1, "2B3", 17, "ValueError: no", "Traceback ..."),
    ],
    ids=lambda error: type(error).__name__,
)
def test_every_error_survives_the_way_to_another_process(error):
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert vars(copy) == vars(error)
