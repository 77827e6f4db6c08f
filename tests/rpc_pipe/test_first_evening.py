"""Words that a new user met where nothing was wrong."""

import pytest
from saved_training import BATCHES, pipeline

from rpc_pipe.commands.main import main
from rpc_pipe.commands.watch import _open_source
from rpc_pipe.dependency import ConfigError
from rpc_pipe.dispatch.recording import Replay


def test_an_evaluation_of_one_row_is_no_larger_bubble(caplog):
    pipe = pipeline(2)
    row = tuple(tensor[:1] for tensor in BATCHES[0])
    pipe.evaluate(row), pipe.predict(row[0])
    assert not [record for record in caplog.records if record.name.endswith("batch_reader")]


@pytest.mark.parametrize(
    "typed, is_free",
    [
        ("simulate --replicas 2 --workers 4", True),
        ("simulate --replicas 2 --workers 4 --comm 1", False),
        ("simulate --replicas 2 --workers 4 --uplink 1MB --payload 1MB", False),
        ("simulate --replicas 2 --workers 4 --cost F=1,B=2,G=1", False),
        ("simulate --workers 4", False),
        ("compare --replicas 2 --workers 4 --microbatches 4", True),
        ("compare --replicas 2 --workers 4 --microbatches 4 --comm 1", False),
    ],
)
def test_a_free_exchange_of_replicas_is_said_to_be_free(capsys, typed, is_free):
    """Replicas seemed to cost nothing, as no line said that their exchange was not priced."""
    assert main(typed.split()) == 0
    assert ("replicas exchange gradients in no time" in capsys.readouterr().out) == is_free


def test_a_script_in_the_own_folder_is_no_recording(tmp_path, monkeypatch):
    """`rpc-pipe watch mine.py` read the script as a recording of steps."""
    (tmp_path / "mine.py").write_text("print()")
    monkeypatch.chdir(tmp_path)
    try:
        assert not isinstance(_open_source("mine.py"), Replay)
    except ConfigError as error:
        assert "mine.py" in str(error) and "JSON" not in str(error)
