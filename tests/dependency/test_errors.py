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
    WorkerFailure,
)


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
        WorkerFailure(1, "2B3", 17, "ValueError: no", "Traceback ..."),
    ],
    ids=lambda error: type(error).__name__,
)
def test_every_error_survives_the_way_to_another_process(error):
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert vars(copy) == vars(error)
