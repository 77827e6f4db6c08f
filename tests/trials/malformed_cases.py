"""What a user may get wrong in options and files, by kind: each function draws one case at random."""

from __future__ import annotations

import argparse
import copy
import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rpc_pipe.commands.main import _parser

from .malformed_input import HUGE, NASTY, SPECIAL, VALUES, Case, bases, typed_as


def options(draw: random.Random, made: Path) -> Case:
    """An option with a value that it cannot have, as far as its type says so."""
    base = draw.choice(list(bases(made)))
    actions = [a for a in _actions(base.split()[0]) if a.option_strings and a.nargs != 0 and a.type is not None]
    if not actions:
        return unknown(draw, made)
    action, value = draw.choice(actions), draw.choice([*NASTY, HUGE, "0"])
    wrong = _refuses(action, value)
    if not wrong and not _quick(action.dest, value):
        value, wrong = "²", True
    return Case(
        typed_as(base, made, action.option_strings[0], value), wrong, note=f"type {_name(action.type)}", codes=(1,),
        option=action.option_strings[0] if wrong else "",
    )  # fmt: skip


def _quick(name: str, value: str) -> bool:
    """Tell whether a run that this is legal in would end soon."""
    return name not in ("steps", "seconds", "repeats") or value == "0"


def _name(kind: object) -> str:
    return str(getattr(kind, "__qualname__", kind))


def _actions(command: str) -> list[argparse.Action]:
    (commands,) = (a for a in _parser(())._actions if isinstance(a, argparse._SubParsersAction))
    return list(commands.choices[command]._actions)


def _refuses(action: argparse.Action, value: str) -> bool:
    if action.choices is not None and value not in action.choices:
        return True
    try:
        assert callable(action.type)
        action.type(value)
    except (ValueError, argparse.ArgumentTypeError):
        return True
    return False


_SCHEDULES = ("1f1b", "gpipe", "interleaved", "zb-h1", "zb-v", "eager-1f1b", "chimera", "v-half")
_TEXTS: dict[str, tuple[str, str]] = {
    "--set": (
        "simulate export verify run compare",
        "chunks chunks= =2 chunks=² chunks=0 window=-1 no=1 chunks=1e9 recompute=9 recompute=-1 recompute=a+b a=1,a=2 "
        "recompute=99999999999 chunks=99999999999 window=99999999999x chunks=NaN chunks=2,chunks=3",
    ),
    "--schedule": (
        "simulate export verify run plan",
        "no 1f1 x.py:Y x.csv x.json x.py : x.py: .py:A 1f1b:2 /etc/passwd /dev/zero / \udcff.csv "
        + "a" * 5000
        + ".csv",
    ),
    "--cost": ("simulate compare", "F F= F=-1 F=NaN X=1 B=1,I=5 F=1,F=2 F=1e999 ²=1 F=² F=inf"),
    "--comm": ("simulate compare", "-1 NaN ² inf 1ms 1e999"),
    "--stage-cost": ("simulate", "1 1,1,1 1,² -1,1 NaN,1 , 1,1e999"),
    "--slow": ("simulate", "0 5=2 ²=2 0=-1 0=NaN 0=1,0=2 -1=2"),
    "--link": ("simulate", "²ms 0-9=1 0-1 0-1=² 0-1=1/0 0-1=1/²MB 0-1=-1 0-0=1 0-1-2=1 ²-1=1"),
    "--payload": ("simulate", "-1MB ²GB NaN"),
    "--memory": ("compare", "limit=1MB no=1 weights=-1 weights=²GB weights=NaN limit limit=1e999"),
    "--device": ("verify run", "cuda:99 tpu ² cpu:x meta:² cuda:-1"),
    "--split": ("verify run", "0 1,2 -1,3 ² 1,1,1,1 99999999999,1 ,"),
    "--steps": ("watch", "5-1 ² -1 1- 99999999999999999999 a-b"),
    "--web": ("watch", "² 99999999 a:b -1 0.0.0.0:99999 : 999.1.1.1:80"),
    "--metrics": ("watch", "² 99999999 a:b -1"),
    "--topology": ("plan", "/no.json / /dev/null"),
}
_ALONE = ("--web", "--metrics", "--steps")


def texts(draw: random.Random, made: Path) -> Case:
    """An option whose text is read by a command, with a text that makes no sense."""
    option = draw.choice(list(_TEXTS))
    commands, told = _TEXTS[option]
    values = told.split()
    command, value = draw.choice(commands.split()), draw.choice([*values, *NASTY])
    more = [option, value]
    if option == "--payload" and value != "1MB":
        more = ["--link", "0-1=1/1MB", *more]
    if option == "--set" and draw.random() < 0.5 and command != "compare":
        more = ["--schedule", draw.choice(_SCHEDULES), *more]
    typed = typed_as(command, made, *more)
    if option in _ALONE:
        typed = ["watch", *more]
        if option == "--steps":
            typed += ["--trace", "t.json"]
    wrong = value in values and option != "--set"
    return Case(typed, wrong, note=option, option=option if wrong or option == "--set" else "")


def unknown(draw: random.Random, made: Path) -> Case:
    """Words that no command knows, and options that contradict each other."""
    base = draw.choice(list(bases(made)))
    word = draw.choice(["--no-such", "--wrokers", "--", "-x", "---", "--workers", "--json=1", "--set", "--help-me"])
    cases = [
        [word],
        [draw.choice(NASTY)],
        [base.split()[0], *bases(made)[base], word, *([draw.choice(NASTY)] if draw.random() < 0.3 else [])],
        [base.split()[0], "a", "b", "c", "d"],
        ["simulate", "--window", "3", "--set", "window=4"],
        ["run", f"{made}/good.py", "--steps", "3"],
        ["run", "--plan", f"{made}/plan.json", "--schedule", "gpipe"],
        ["run", "--transport", "local", "--port", "2000"],
        ["run", "--checkpoint-keep", "2", "--transport", "local"],
        ["run", "--resume", "/no/such", "--transport", "local"],
        ["verify", f"{made}/good.py:make", "--rows", "4"],
        ["watch", "--json"],
        ["watch", "--once", "--web", "1"],
        ["watch", "run-0"],
        [],
    ]
    typed = draw.choice(cases)
    legal = typed[:1] == [base.split()[0]] and typed[-1:] == ["--"]
    return Case(typed, not legal and not {"--json=1"} & set(typed), special={"x": "missing"})


def csv(draw: random.Random, made: Path) -> Case:
    """A program as a CSV that is damaged."""
    cells = [["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0", "1F1", "1B1"]]
    for _ in range(draw.randrange(1, 4)):
        row = draw.choice(cells)
        cell = draw.choice(
            ["99999999999F0", "0F99999999999", "²F0", "0F", "F0", "0X0", "-1F0", "0F-1", "0F0F0", "(0F0", "0F0;0B0",
             "(0F0;1B0)OVERLAP_F_B", "\0", "'", '"', "x" * 5000, "5F0", "0F7", "1F0", "0I0", "0W0", "0R0", "0U0",
             "0G0", " ", "0F0 0B0", "000000000F0", "0f0", "٣F0"]
        )  # fmt: skip
        act = draw.randrange(4)
        if act == 0:
            row[draw.randrange(len(row))] = cell
        elif act == 1:
            row.insert(draw.randrange(len(row) + 1), cell)
        elif act == 2 and len(row) > 1:
            del row[draw.randrange(len(row))]
        else:
            draw.shuffle(row)
    text = "\n".join(",".join(row) for row in cells)
    command = draw.choice(["simulate", "export", "verify", "run", "run a model"])
    typed = typed_as(command, made, "--schedule", "p.csv", "--microbatches", "2")
    special = {"p.csv": draw.choice(SPECIAL)} if draw.random() < 0.25 else {}
    # What a file with another order of the same actions says may be a schedule too.
    return Case(typed, bool(special.get("p.csv", "truncated") != "truncated"), {"p.csv": text}, special)


_DOCUMENTS = (
    "plan.json", "searched.json", "profile.json", "topology.json", "manifest.json",
)  # fmt: skip


def documents(draw: random.Random, made: Path) -> Case:
    """A plan, a profile, a topology, or a checkpoint's manifest that is damaged."""
    name = draw.choice(_DOCUMENTS)
    if name == "manifest.json":
        return _folder(draw, made, name)
    text = (made / name).read_text()
    commands = {
        "plan.json": [
            typed_as("run a model", made, "--plan", name)[:],
            ["simulate", "--schedule", name, "--microbatches", "2"],
        ],
        "searched.json": [
            typed_as("run a model", made, "--plan", name)[:],
            ["simulate", "--schedule", name, "--microbatches", "2"], ["export", "--schedule", name],
        ],
        "profile.json": [typed_as("plan", made, "--profile", name), ["profile", "--profile", name]],
        "topology.json": [typed_as("plan", made, "--topology", name)],
    }  # fmt: skip
    typed = draw.choice(commands[name])
    if "--plan" in typed:
        at = typed.index("--microbatches")
        typed = typed[:at] + typed[at + 2 :]
    if draw.random() < 0.2:
        what = draw.choice(SPECIAL)
        return Case(typed, what != "truncated", {name: text}, {name: what}, note=what, codes=(1,))
    document = json.loads(text)
    note = damage(draw, document)
    return Case(typed, False, {name: json.dumps(document)}, note=note, codes=(1,))


def _folder(draw: random.Random, made: Path, listing: str) -> Case:
    """A checkpoint whose list of files is damaged, or a file of it."""
    newest = sorted((made / "checkpoints").iterdir())[-1]
    files: dict[str, str | bytes] = {f"c/{path.name}": path.read_bytes() for path in newest.iterdir()}
    typed = typed_as("run a model", made, "--resume", "c")
    if draw.random() < 0.3:
        name = draw.choice(list(files))
        what = draw.choice(SPECIAL)
        wrong = name == f"c/{listing}" and what != "truncated"
        return Case(typed, wrong, files, {name: what}, note=what)
    document = json.loads(files[f"c/{listing}"])
    document.pop("sum", None)  # as if it had been written so
    note = damage(draw, document)
    return Case(typed, False, {**files, f"c/{listing}": json.dumps(document)}, note=note)


def damage(draw: random.Random, document: Any) -> str:
    """Change one thing in a value of JSON; return what."""
    places = list(_places(document, ()))
    holder, key, path = draw.choice(places)
    act = draw.randrange(5)
    where = "/".join(map(str, path))
    if act == 0:
        del holder[key]
        return f"without {where}"
    if act == 1 and isinstance(holder, dict):
        holder["no such field"] = draw.choice(VALUES)
        return f"more at {where}"
    if act == 2 and isinstance(holder, list):
        holder.append(copy.deepcopy(holder[key]))
        return f"{where} twice"
    value = draw.choice(VALUES)
    holder[key] = copy.deepcopy(value)
    return f"{where}: {str(value)[:20]}"


def _places(value: Any, path: tuple[Any, ...]) -> Any:
    items = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield value, key, (*path, key)
        yield from _places(inner, (*path, key))


_OUTPUTS = (
    "simulate --svg", "simulate --html", "simulate --chrome", "export", "plan --output", "plan --svg",
    "plan a model --profile", "profile --profile", "watch --trace",
    "run --save", "run --trace", "run --html", "run --checkpoint-folder", "run a model --save", "key",
)  # fmt: skip


def outputs(draw: random.Random, made: Path) -> Case:
    """A file to write that cannot be written."""
    base, _, option = draw.choice(_OUTPUTS).partition(" --")
    deep = "\udcff/" * 200
    path = draw.choice(
        ["folder", "file/x", "/proc/x", "/sys/x", "/dev/full", "fifo", "", "n" * 300, "n/" * 3000, "/", ".", "loop",
         "/proc/self/mem/x", "file/", "socket/../..", deep]
    )  # fmt: skip
    special = {"folder": "folder", "fifo": "fifo", "loop": "loop"}
    files: dict[str, str | bytes] = {"file": "x", "socket": "x", "folder.txt": "x"}
    folders = option in ("tensorboard", "checkpoint-folder")
    if folders and path in ("/", "socket/../.."):  # they may be written
        path = "folder"
    wrong = not (folders and path in ("folder", ".", deep))
    if base == "export":
        typed = ["export", path]
    elif base == "key":
        typed = ["key", path]
    else:
        typed = typed_as(base, made, f"--{option}", path)
    if base == "watch":
        typed = ["watch", *typed[-2:]]
    if option == "checkpoint-folder":
        typed += ["--checkpoint-every", "1"]
    return Case(typed, wrong and path not in ("loop",), files, special)


def inputs(draw: random.Random, made: Path) -> Case:
    """A file to read that is none, or holds something else."""
    what = draw.choice([*SPECIAL, "text", "json", "csv"])
    content = {"text": "hello\n", "json": '{"a": [1, 2]}', "csv": "a,b\nx,y\n"}.get(what, "1,2\n" * 9)
    name = draw.choice(["i.csv", "i.jsonl", "i.json", "i.npy", "i.bin", "i.parquet", "i.txt", "i.py", "i.arrow", "i"])
    typed = draw.choice(
        [
            ["watch", name, "--once"], ["simulate", "--schedule", f"{name}:A"], ["simulate", "--schedule", name],
            typed_as("run", made, "--data", name), ["run", name, "--transport", "local"],
            ["plan", f"{name}:make", "--estimate", "--seconds", "0.2"], ["profile", f"{name}:make"],
            ["verify", f"{name}:make", "--transport", "local"],
            typed_as("run a model", made, "--model", f"{name}:make"),
            ["compare", "--model", f"{name}:make"], typed_as("run", made, "--resume", name),
        ]
    )  # fmt: skip
    special = {name: what} if what in SPECIAL else {}
    return Case(typed, False, {name: content}, special, note=what, codes=(1,) if typed[:2] == ["run", name] else ())


_VARIABLES = {
    "RPC_PIPE_JOIN_TIMEOUT": ("abc", "-1", "0", "nan", "inf", "²", ""),
    "RPC_PIPE_SHARED_MEMORY": ("yes", "²", "", "1"),
    "RPC_PIPE_WAYS": ("no", "", "memory,", "²"),
    "RPC_PIPE_TRANSPORT": ("no", "²", "", "RPC"),
    "RPC_PIPE_TRUST_NETWORK": ("yes", "", "²"),
    "RPC_PIPE_LOST_AFTER": ("abc", "-1", "0", "nan", ""),
    "RPC_PIPE_STOP_TIMEOUT": ("abc", "-1", "nan", ""),
    "RPC_PIPE_NAN": ("no", "²", ""),
    "RPC_PIPE_PORT": ("abc", "-1", "99999999999", "²"),
    "OMP_NUM_THREADS": ("abc",),
    "RANK": ("abc", "-1", "5", "²", ""),
    "RPC_PIPE_INTERFACE": ("no", "²", ""),
    "MASTER_ADDR": ("no.such.host.invalid", "²", ""),
    "MASTER_PORT": ("abc", "-1", "99999999999", "²", ""),
}
_TORCHRUN = {
    "RANK": "0",
    "WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29555",
    "LOCAL_WORLD_SIZE": "1",
}


def environments(draw: random.Random, made: Path) -> Case:
    """A variable that makes no sense, or a key that is none."""
    if draw.random() < 0.3:
        what = draw.choice([*SPECIAL, "short", "open"])
        variables = {**_TORCHRUN, "RPC_PIPE_TRANSPORT": "zmq", "RPC_PIPE_KEY_FILE": "k", "RPC_PIPE_JOIN_TIMEOUT": "30"}
        special = {"k": what} if what in SPECIAL else {}
        text = "x" if what == "short" else "x" * 64
        typed = ["run", "--model", f"{made}/good.py:make", "--steps", "1"]
        return Case(typed, True, {"k": text}, special, {**variables, "RPC_PIPE_INTERFACE": "lo"}, f"key {what}")
    name = draw.choice(list(_VARIABLES))
    value = draw.choice(_VARIABLES[name])
    torchrun = _TORCHRUN if name in ("RANK", "RPC_PIPE_INTERFACE", "MASTER_ADDR", "MASTER_PORT") else {}
    variables = {**torchrun, "RPC_PIPE_JOIN_TIMEOUT": "3", name: value}
    typed = ["run", "--model", f"{made}/good.py:make", "--steps", "1", "--microbatches", "2"]
    if not torchrun and name != "RPC_PIPE_TRANSPORT":
        typed += ["--transport", "local"]
    return Case(typed, bool(torchrun), environment=variables, note=f"{name}={value}")
