"""Words that a new user met where nothing was wrong."""

from saved_training import BATCHES, pipeline

from rpc_pipe.commands.watch import _open_source
from rpc_pipe.dependency import ConfigError
from rpc_pipe.dispatch.recording import Replay


def test_an_evaluation_of_one_row_is_no_larger_bubble(caplog):
    pipe = pipeline(2)
    row = tuple(tensor[:1] for tensor in BATCHES[0])
    pipe.evaluate(row), pipe.predict(row[0])
    assert not [record for record in caplog.records if record.name.endswith("batch_reader")]


def test_a_script_in_the_own_folder_is_no_recording(tmp_path, monkeypatch):
    """`rpc-pipe watch mine.py` read the script as a recording of steps."""
    (tmp_path / "mine.py").write_text("print()")
    monkeypatch.chdir(tmp_path)
    try:
        assert not isinstance(_open_source("mine.py"), Replay)
    except ConfigError as error:
        assert "mine.py" in str(error) and "JSON" not in str(error)
