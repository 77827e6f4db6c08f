"""What the README and the documentation show is executed."""

import json
import re
from functools import partial

import pytest
import torch
from processes import ROOT, python, unmerged
from torch import nn

from rpc_pipe import Pipeline, Training

EXAMPLES = ROOT / "docs" / "examples"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "CONTRIBUTING.md"]


def blocks(language):
    return [text for page in PAGES for text in re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.DOTALL)]


def run(arguments, folder, *, refused=False):
    done = python(*arguments, cwd=folder, COLUMNS="100", OMP_NUM_THREADS="1")
    assert done.returncode == (2 if refused else 0), done.stdout + done.stderr
    return done.stderr if refused else done.stdout


def python_block(name):
    """Return the block that says which file it is, or the one without a name."""
    return next(text for text in blocks("python") if text.startswith(f"# {name}") or not (name or text[0] == "#"))


def rpc_pipe(arguments):
    return ["-m", "rpc_pipe", *arguments.split()]


def test_the_training_script_runs_alone_and_launched(tmp_path):
    (tmp_path / "train.py").write_text(python_block(""))
    alone = run(["train.py"], tmp_path)
    assert float(re.match(r"loss (\d\.\d+), held out", alone)[1]) < 0.9
    assert (tmp_path / "model.safetensors").is_file()
    launched = run(rpc_pipe("run train.py --workers 2"), tmp_path)
    assert unmerged(launched).count(f"| {alone.strip()}") == 2, "every worker prints what one process does"


def test_the_model_that_is_planned_is_verified(tmp_path):
    (tmp_path / "my_model.py").write_text(python_block("my_model.py"))
    assert "identical" in run(rpc_pipe("verify my_model.py:make --workers 2 --transport local --steps 3"), tmp_path)


def test_the_loop_of_a_lightning_module_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {"partial": partial, "torch": torch, "nn": nn, "Pipeline": Pipeline, "Training": Training}
    exec(python_block("after\ndef accuracy"), names)
    torch.manual_seed(0)
    batches = [(x, (x.sum(1) > 0).long()) for x in torch.randn(4, 16, 8)]
    with names["fit"](nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 2)), batches, batches[:2], patience=1) as pipe:
        assert pipe.evaluate(batches, metric=names["accuracy"])["accuracy"] > 0.5


def test_the_loss_of_a_whole_batch_trains_as_in_one_process(capsys):
    """A contrastive loss of microbatches is another one."""
    names = {"__name__": "contrastive"}
    exec(python_block("contrastive.py"), names)
    torch.manual_seed(0)
    batches, model = torch.randn(3, 2, 12, 8), names["Towers"]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for image, text in batches:
        loss = names["contrastive"](*model(image, text))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"loss {loss:.4f}")
    shown = capsys.readouterr().out.splitlines()
    assert shown[:3] == shown[3:]
    state = names["pipe"].weights.state_dict()
    for name, parameter in model.state_dict().items():
        torch.testing.assert_close(state[name], parameter)


def test_the_users_schedule_is_legal_and_short(tmp_path):
    source = python_block("mine.py")
    assert len(source.splitlines()) <= 20
    (tmp_path / "mine.py").write_text(source)
    assert "peak activations" in run(
        rpc_pipe("simulate --schedule mine.py:Patient --set extra=2 --workers 4"), tmp_path
    )
    options = "--workers 3 --microbatches 5 --transport local --steps 3"
    assert "identical" in run(rpc_pipe(f"verify --schedule mine.py:Patient {options}"), tmp_path)


@pytest.mark.parametrize("schedule", ["looped.py:Looped", "mixed.py:Mixed", f"{EXAMPLES}/bpipe.py:BPipe"])
def test_the_schedules_of_the_page_train_the_same_bits(schedule, tmp_path):
    if not schedule.startswith("/"):
        name = schedule.partition(":")[0]
        (tmp_path / name).write_text(python_block(name))
    options = f"--workers {4 if 'bpipe' in schedule else 2} --microbatches 5 --transport local --steps 3"
    assert "identical" in run(rpc_pipe(f"verify mlp --schedule {schedule} {options}"), tmp_path)


def test_early_workers_hold_less_by_late_ones(tmp_path):
    options = "--workers 8 --microbatches 12 --memory activations=64MB,copy=128MB --json"
    rows = json.loads(run(rpc_pipe(f"compare --schedule {EXAMPLES}/bpipe.py:BPipe {options}"), tmp_path))
    held = {row["schedule"].rpartition(":")[2]: row["memory_by_worker"] for row in rows}
    assert held["BPipe"][0] <= 0.65 * held["1f1b"][0] and max(held["BPipe"]) <= 0.75 * max(held["1f1b"])


def test_the_console_shows_what_is_printed(tmp_path):
    for name in ("steps.py", "mistakes.py", "looped.py", "mixed.py"):
        (tmp_path / name).write_text(python_block(name))
    for block in blocks("console"):
        command, _, shown = block.partition("\n")
        refused = shown.startswith("error:")
        printed = run(rpc_pipe(command.removeprefix("$ rpc-pipe ")), tmp_path, refused=refused)
        assert [line.rstrip() for line in printed.splitlines()] == shown.splitlines()


def test_the_picture_is_what_is_drawn(tmp_path):
    options = "--schedule zb-v --workers 4 --microbatches 8 --svg zb_v.svg"
    run(rpc_pipe(f"simulate {options}"), tmp_path)
    assert (tmp_path / "zb_v.svg").read_text() == (ROOT / "schedules" / "zb_v.svg").read_text()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\((?!https:)([^)#]+)[^)]*\)", page.read_text()):
        assert (page.parent / target).exists(), target


def test_the_readme_is_short():
    assert len(PAGES[0].read_text().splitlines()) <= 120


#: that `tests/rpc_pipe/test_inside.py` runs
INSIDE = {"coded", "experts", "experts_tensor", "linear_nd"}


@pytest.mark.parametrize(
    "example", sorted(each for each in EXAMPLES.glob("*.py") if each.stem not in INSIDE), ids=lambda path: path.stem
)
def test_examples_run(example, tmp_path):
    for needed in re.findall(r"^from (peft|transformers) import", example.read_text(), re.MULTILINE):
        pytest.importorskip(needed, reason=f"{example.name} needs pip install '.[hf]'")
    run([example, "--steps", 3], tmp_path)


def test_every_environment_variable_is_in_the_table():
    code = "".join(path.read_text() for room in ("rpc_pipe", "workers") for path in (ROOT / room).rglob("*.py"))
    said = set(re.findall(r"RPC_PIPE_[A-Z_]+", (ROOT / "docs" / "cluster.md").read_text()))
    assert set(re.findall(r"RPC_PIPE_[A-Z_]+", code)) <= said
