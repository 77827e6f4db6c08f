"""What malformed cases are made of: good input, commands that would be right, values that make no sense."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

GOOD = """
import torch
from torch import nn

def make():
    torch.manual_seed(0)
    layers = [layer for _ in range(3) for layer in (nn.Linear(4, 4), nn.Tanh())]
    return layers, (torch.randn(8, 4), torch.randn(8, 4)), nn.functional.mse_loss

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)
    def forward(self, x):
        return self.inner(x).tanh()

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x.square().mean()

def whole():
    torch.manual_seed(0)
    return Model(), {"x": torch.randn(8, 4)}
"""
#: what numbers, names and paths are not
NASTY = (
    "-3", "²", "NaN", "-inf", "1e999", "", " ", "名前", "\u202e", "x" * 10**5, "9" * 5000, "0x10", "1,,2", "=", "a=b",
    "None", "[]", "{}", "1.5.2", "\udcff\udcfe", "\x1b[31m", "a\nb", "--", "/", "..", "%s%n", "🦄" * 99,
)  # fmt: skip
HUGE = "99999999999"
#: what stands in place of a value of JSON
VALUES: tuple[Any, ...] = (
    None, True, -3, 0, 1.5, 10**30, float("nan"), float("inf"), -1e308, "", "²", "x" * 10_000, [], {}, [[]], [None],
    {"a": 1}, [{"workers": "²"}], 99999999999, "99999999999F0",
)  # fmt: skip
#: how the files of a case are made, by the end of their text
SPECIAL = (
    "folder", "fifo", "missing", "endless", "binary", "empty", "large", "utf-16", "loop", "deep", "truncated", "wide",
    "nul", "newlines", "latin",
)  # fmt: skip


@dataclass
class Case:
    """A command, and the files that it reads."""

    typed: list[str]
    #: whether it must be refused; else it may be taken too
    wrong: bool = True
    files: dict[str, str | bytes] = field(default_factory=dict)
    #: what is no regular file, by name: one of SPECIAL
    special: dict[str, str] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    note: str = ""
    #: other exit codes that are as right
    codes: tuple[int, ...] = ()
    #: the option that is wrong, which the error must name as it was typed
    option: str = ""

    def make(self, folder: Path) -> None:
        """Make the files."""
        for name, content in self.files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content if isinstance(content, bytes) else content.encode(errors="surrogateescape"))
        for name, what in self.special.items():
            _make_special(folder / name, what)


def _make_special(path: Path, what: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    before = path.read_bytes() if path.is_file() else b""
    path.unlink(missing_ok=True)
    if what == "folder":
        path.mkdir()
    elif what == "fifo":
        os.mkfifo(path)
    elif what == "endless":
        path.symlink_to("/dev/zero")
    elif what == "loop":
        path.symlink_to(path.name)
    elif what == "binary":
        path.write_bytes(random.Random(0).randbytes(3000))
    elif what == "empty":
        path.write_bytes(b"")
    elif what == "large":
        with path.open("wb") as file:
            file.truncate(3 * 2**30)
    elif what == "utf-16":
        path.write_bytes(before.decode(errors="replace").encode("utf-16"))
    elif what == "wide":
        path.write_bytes(b"[" + b"[]," * 8_000_000)
    elif what == "newlines":
        path.write_bytes(b"\n" * 20_000_000)
    elif what == "nul":
        path.write_bytes(before + bytes(100))
    elif what == "latin":
        path.write_bytes(b"\xe4\xf6" + before)
    elif what == "deep":
        path.write_bytes(b"[" * 200_000)
    elif what == "truncated":
        path.write_bytes(before[: len(before) // 2])


# --- good input, of which bad is made


def given(folder: Path, run: Callable[..., Any]) -> Path:
    """Make a folder of input that is right."""
    folder.mkdir()
    (folder / "good.py").write_text(GOOD)
    (folder / "text.txt").write_text("to be or not to be, that is the question\n" * 400)
    (folder / "good.csv").write_text("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n")
    topology = {"workers": [{"memory": "8GB"}, {"speed": 0.5}], "link": {"latency_ms": 0.2, "bandwidth": "1GB"}}
    (folder / "topology.json").write_text(json.dumps({**topology, "links": {"0-1": {"latency_ms": 5}}}))
    made = [
        ["profile", "good.py:make", "--profile", "profile.json", "--estimate", "--rows", "1,2,4"],
        ["plan", "--profile", "profile.json", "--batch", "8", "--seconds", "3", "--output", "plan.json"],
        ["run", "--model", "good.py:make", "--steps", "2", "--transport", "local", "--checkpoint-every", "1",
         "--microbatches", "2"],
    ]  # fmt: skip
    for typed in made:
        outcome = run(typed, folder)
        assert outcome.code == 0, outcome.said
    profile = json.loads((folder / "profile.json").read_text())
    profile |= {"topology": {**topology, "links": {"0-1": {"latency_ms": 5}}}, "workers": 2}
    profile["ties"] = [{"first": 0, "last": 2, "weights": 8.0, "gradients": 8.0, "optimizer": 0, "together": False}]
    (folder / "profile.json").write_text(json.dumps(profile))
    (folder / "searched.json").write_text(json.dumps({"plans": [_SEARCHED]}))
    for typed in (["profile", "--profile", "profile.json"], ["simulate", "--schedule", "searched.json", *_TWO]):
        assert run(typed, folder).code == 0, run(typed, folder).said
    return folder


#: a plan that lists each worker's actions
_SEARCHED = {
    "schedule": "searched", "parameters": {}, "cut": [3, 3], "num_microbatches": 2, "num_workers": 2, "recompute": [],
    "predicted_ms": 1.5, "memory_by_worker_mb": [1, 2], "busy_by_worker_ms": [1, 1], "messages": 4,
    "placement": [[0, 1]], "routes": [0, 0], "program": ["0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"],
}  # fmt: skip
_TWO = ("--microbatches", "2")


# --- commands that would be right


def bases(made: Path) -> dict[str, list[str]]:
    good, text = f"{made}/good.py", f"{made}/text.txt"
    gpt = ["--data", text, "--steps", "1", "--batch", "4", "--context", "8", "--width", "8", "--depth", "2"]
    return {
        "simulate": [],
        "compare": [],
        "verify": ["mlp", "--steps", "1", "--microbatches", "2", "--transport", "local"],
        "run": [*gpt, "--heads", "2", "--microbatches", "2", "--transport", "local"],
        "run a model": ["--model", f"{good}:make", "--steps", "1", "--microbatches", "2", "--transport", "local"],
        "plan": ["--profile", f"{made}/profile.json", "--batch", "8", "--seconds", "0.2", "--no-searched"],
        "plan a model": [f"{good}:make", "--estimate", "--seconds", "0.2", "--no-searched"],
        "profile": [f"{good}:whole", "--estimate"],
        "export": [],
        "watch": ["--once"],
        "key": ["key"],
        "schedules": [],
    }


def typed_as(base: str, made: Path, *more: str) -> list[str]:
    """Return the base with `more`, which takes the place of what the base says of the same."""
    kept, rest = [], list(bases(made)[base])
    while rest:
        word = rest.pop(0)
        if word.startswith("--") and word in more:
            if rest and not rest[0].startswith("--"):
                rest.pop(0)
            continue
        kept.append(word)
    return [base.split()[0], *kept, *more]
