"""What may be wrong beside single options and documents: bytes of files, the environment, options together, calls."""

from __future__ import annotations

import random
from pathlib import Path

from .malformed_input import Case, typed_as


def mangled(draw: random.Random, content: bytes) -> bytes:
    """Return bytes in which something was changed."""
    if not content:
        return b"x"
    at, more = draw.randrange(len(content)), draw.randrange(1, 64)
    act = draw.randrange(8)
    if act == 0:
        return content[:at] + bytes([content[at] ^ 1 << draw.randrange(8)]) + content[at + 1 :]
    if act == 1:
        return content[:at]
    if act == 2:
        return content[:at] + draw.randbytes(more) + content[at:]
    if act == 3:
        return content[:at] + bytes(more) + content[at + more :]
    if act == 4:
        return content[:at] + content[at + more :]
    if act == 5:
        return content + content[: len(content) - at]
    if act == 6:
        return draw.randbytes(8) + content[8:]
    return b"\xff" * 8 + content[8:]


def mangle(draw: random.Random, made: Path) -> Case:
    """A file of any kind, some bytes of which are others."""
    kind = draw.choice(["checkpoint", "checkpoint", "text", "text", "key", "weights"])
    if kind in ("checkpoint", "weights"):
        newest = sorted((made / "checkpoints").iterdir())[-1]
        files: dict[str, str | bytes] = {f"c/{path.name}": path.read_bytes() for path in newest.iterdir()}
        name = draw.choice(sorted(files))
        before = files[name]
        assert isinstance(before, bytes)
        files[name] = mangled(draw, before)
        if kind == "checkpoint":
            return Case(typed_as("run a model", made, "--resume", "c"), False, files, note=name)
        text = "from good import make\nfrom rpc_pipe import Pipeline\nmodel, batch, loss = make()\n"
        text += (
            "pipe = Pipeline(model, loss, num_microbatches=2)\npipe.weights.load_pretrained('c')\npipe.step(batch)\n"
        )
        files |= {"s.py": text, "good.py": (made / "good.py").read_bytes()}
        return Case(["run", "s.py", "--transport", "local"], False, files, note=name)
    if kind == "key":
        key = draw.choice([b"", b"\n", b"x", b"k" * 39, b"k" * 10**6, b"\xff" * 40, b"0" * 40 + b"\n\n", bytes(40)])
        variables = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29555"}
        variables |= {"LOCAL_WORLD_SIZE": "1", "RPC_PIPE_TRANSPORT": "zmq", "RPC_PIPE_KEY_FILE": "k"}
        variables |= {"RPC_PIPE_JOIN_TIMEOUT": "1", "RPC_PIPE_INTERFACE": "lo"}
        return Case(typed_as("run a model", made)[:-2], True, {"k": key}, {}, variables, f"key {key[:9]!r}", (1,))
    name = draw.choice(["plan.json", "searched.json", "profile.json", "topology.json", "good.csv"])
    run = typed_as("run a model", made)
    run = run[: run.index("--microbatches")] + run[run.index("--microbatches") + 2 :]
    typed = {
        "plan.json": [*run, "--plan", name], "searched.json": [*run, "--plan", name],
        "profile.json": typed_as("plan", made, "--profile", name),
        "topology.json": typed_as("plan", made, "--topology", name),
        "good.csv": ["simulate", "--schedule", name, "--microbatches", "2"],
    }[name]  # fmt: skip
    return Case(typed, False, {name: mangled(draw, (made / name).read_bytes())}, note=name, codes=(1,))


_EDGES = ("0", "1", "2", "3", "5", "7", "16", "99", "1000", "100000", "-1", "1.5", "²", "1e3", "")
_TOGETHER = {
    "simulate": ("--workers", "--microbatches", "--window", "--schedule", "--set", "--cost", "--comm"),
    "compare": ("--workers", "--microbatches", "--cost", "--comm", "--memory"),
    "run": ("--microbatches", "--batch", "--context", "--width", "--depth", "--heads", "--dropout", "--lr", "--split",
            "--schedule", "--set", "--checkpoint-every", "--checkpoint-keep", "--threads", "--max-restarts", "--seed"),
    "verify": ("--microbatches", "--schedule", "--set", "--split", "--seed", "--rows", "--window"),
    "plan": ("--batch", "--memory", "--workers", "--microbatches", "--max-microbatches"),
}  # fmt: skip
_WORDS = {
    "--schedule": ("naive", "gpipe", "gpipe-recompute", "1f1b", "eager-1f1b", "interleaved", "bfs", "hanayo", "chimera",
                   "mixpipe", "zb-h1", "zb-h2", "zb-v", "v-half", "v-min", "dualpipe", "dualpipev", "varuna",
                   "pipedream", "pipedream-2bw", "avgpipe", "ZB-V", "1f1b "),
    "--set": ("chunks=2", "chunks=0", "waves=3", "waves=-1", "pairs=2", "pairs=99", "window=1", "window=0", "scale=0",
              "keep=2", "keep=-1", "b_order=x", "b_order=lifo", "vertical_sync=2", "pipelines=0", "pipelines=3",
              "recompute=all", "recompute=0+1", "recompute=7", "recompute=", "chunks=True", "window=None", "chunks=1_0",
              "chunks=٣", "chunks= 2", "chunks=2 ", "chunks=+2", "chunks=9999999", "window=99999999", "waves=65537"),
    "--dtype": ("uint8", "uint16", "uint32", "int64", "float32"),
    "--memory": ("1GB", "0", "1B", "1kB", "1e9GB", "-1GB", "limit=1MB"),
    "--shard": ("1MB", "0MB", "1B", "99999GB"), "--field": ("text", "", "²"),
    "--split": ("1,1", "2,2", "1,2,3", "4", "0,4", "4,0", "1,-1"),
    "--cost": ("F=1,B=2", "F=0", "F=1e-300", "F=1e300", "B=2"),
}  # fmt: skip


def together(draw: random.Random, made: Path) -> Case:
    """Several options at once, each of which may be right by itself."""
    base = draw.choice(list(_TOGETHER))
    more: list[str] = []
    for option in draw.sample(_TOGETHER[base], draw.choice([2, 2, 3])):
        large = base == "compare" and option in ("--workers", "--microbatches")  # which takes minutes, but is right
        words = _EDGES[:7] if large else _WORDS.get(option, _EDGES)
        more += [option, draw.choice(words)]
    if "--checkpoint-every" in more:
        more += ["--checkpoint-folder", "c"]
    return Case(typed_as(base, made, *more), False)


_PLACES = ("TMPDIR", "XDG_CACHE_HOME", "XDG_STATE_HOME", "HOME", "RPC_PIPE_BOARDS", "RPC_PIPE_LOGS", "PYTHONPATH")
_OTHERS = {
    "RPC_PIPE_CONGESTION": ("no", "²", "", ",", "bbr," * 999), "PYTHONHASHSEED": ("x", "-1", "²", ""),
    "OMP_NUM_THREADS": ("0", "-1", "²", "", "99999", "1e3"), "LOCAL_RANK": ("-1", "x", "²"), "COLUMNS": ("0", "x"),
    "LANG": ("C", "x", ""), "TERM": ("dumb", "", "x"), "PYTHONIOENCODING": ("ascii", "utf-16"), "TZ": ("x",),
    "RPC_PIPE_RESTARTS": ("x", "-1"), "RPC_PIPE_LINK": ("x", "99", "-2"),
    "RPC_PIPE_INIT": ("x", "file:///no/x", "tcp://"), "RPC_PIPE_FOLDER": ("/no",),
    "LOCAL_WORLD_SIZE": ("0", "x", "-1"), "WORLD_SIZE": ("0", "x", "1", "65537"),
}  # fmt: skip


def surroundings(draw: random.Random, made: Path) -> Case:
    """A variable of the environment that names no usable place, or makes no sense."""
    special: dict[str, str] = {}
    if draw.random() < 0.6:
        name = draw.choice(_PLACES)
        value = draw.choice(
            ["/proc/no", "", "w", "/proc", "/dev/null", "x" * 5000, "~", "²", "\udcff", ".", "/dev/full"]
        )
        if value == "w":
            special["w"] = draw.choice(["empty", "fifo", "loop", "folder"])
    else:
        name = draw.choice(list(_OTHERS))
        value = draw.choice(_OTHERS[name])
    transport = draw.choice(["local", "rpc", "zmq"])
    typed = draw.choice(
        [
            typed_as("run a model", made, "--transport", transport), ["simulate"],
            ["verify", "mlp", "--steps", "1", "--microbatches", "2", "--transport", transport],
            ["watch", "--once"],
            [*typed_as("run a model", made, "--transport", transport), "--save", "w.safetensors"],
        ]
    )  # fmt: skip
    return Case(typed, False, special=special, environment={name: value}, note=f"{name}={value[:20]}", codes=(1,))


_ARGUMENTS = {
    "num_microbatches": ("0", "-1", "'2'", "2.5", "None", "True", "10**12", "[2]"),
    "schedule": ("None", "3", "'no'", "object()", "int", "'1f1b:x'", "''", "lambda: 1"),
    "schedule_options": ("3", "{'no': 1}", "{'window': 'x'}", "[]", "{3: 4}", "'window=2'"),
    "num_workers": ("0", "-1", "'2'", "2.5", "99", "10**9"),
    "split": ("3", "[0, 6]", "[7]", "['a']", "[-1, 7]", "'3,3'"),
    "optimizer": ("3", "'adam'", "torch.optim.SGD([torch.zeros(1)])", "torch.optim.Adam", "lambda p: None",
                  "lambda p: 1 / 0", "nn.Linear", "partial(torch.optim.SGD, lr=-1)"),
    "lr_scheduler": ("3", "lambda o: 1 / 0", "lambda o: None", "partial(torch.optim.lr_scheduler.StepLR)"),
    "blocks": ("3", "'no'", "['no']", "''", "[3]"), "device": ("3", "'tpu'", "'cuda:77'", "None", "''"),
    "seed": ("'x'", "-1", "1.5", "10**30", "None"), "max_grad_norm": ("'x'", "-1", "float('nan')", "0", "[]"),
    "accumulate": ("0", "-1", "'2'", "1.5"), "ema_decay": ("2", "-1", "'x'", "float('nan')"),
    "grad_scaler": ("3", "'x'", "torch.amp.GradScaler('cpu')"), "transport": ("'no'", "3", "''"),
    "stall_s": ("0", "-1", "'x'", "float('nan')", "float('inf')", "None"), "order": ("'no'", "3", "''"),
    "plan": ("3", "'no.json'", "{}", "[]", "'/'"), "example": ("3", "'x'", "{}", "[]", "(None, None)"),
    "loss_fn": ("3", "'x'", "nn.Linear", "lambda o: o", "lambda o, t: None", "lambda o, t: 3.0"),
    "deferred_batch_norm": ("3", "'x'"), "post_validation": ("3", "'x'", "True"), "no_such": ("3",),
}  # fmt: skip
_CALLS = (
    "pipe.step(3)", "pipe.step(None)", "pipe.step(())", "pipe.step((x,))", "pipe.step((x, y, y))",
    "pipe.step((x[:0], y[:0]))", "pipe.step((x, y[:3]))", "pipe.step('x')", "pipe.step((x, None))",
    "pipe.step((x.int(), y))", "pipe.step(x)", "pipe.step({'x': x})", "pipe.step(microbatches=[])",
    "pipe.step(microbatches=3)", "pipe.step((x, y), microbatches=[(x, y)])", "pipe.step(microbatches=[(x, y)] * 3)",
    "pipe.step()", "pipe.step((x[:, :2], y))", "list(pipe.train(3))", "list(pipe.train([]))", "list(pipe.train([3]))",
    "list(pipe.train([(x, y), None]))", "pipe.evaluate(3)", "pipe.evaluate((x, y), metric=3)",
    "pipe.evaluate((x, y), metric=lambda o, t: 'x')", "pipe.predict(None)", "pipe.predict(x, to=99)",
    "pipe.predict(x, to='a')", "pipe.weights.save(3)", "pipe.weights.save('')", "pipe.weights.save('/dev/null/x')",
    "pipe.checkpoints.save(3)",
    "pipe.checkpoints.save('/proc/x')", "pipe.checkpoints.save('c', keep=0)", "pipe.checkpoints.save('c', keep='x')",
    "pipe.checkpoints.save('c', extra=object())", "pipe.checkpoints.load('no')", "pipe.checkpoints.load(3)",
    "pipe.weights.load_pretrained('no')", "pipe.weights.load_pretrained(3)", "pipe.checkpoints.resume('no')",
    "pipe.checkpoints.every(0, 'c')",
    "pipe.checkpoints.every('x', 'c')", "pipe.checkpoints.every(1, '/proc/x'); pipe.step((x, y))",
    "pipe.load_state_dict({})", "pipe.load_state_dict(3)", "pipe.load_state_dict({'x': x})",
    "pipe.weights.save_pretrained('/proc/x')", "pipe.weights.save_pretrained(3)", "pipe.step((x * float('nan'), y))",
    "pipe.close(); pipe.step((x, y))", "pipe.train(None)", "pipe.weights.averaged().__enter__()",
    "pipe.step((x.requires_grad_(), y))", "pipe.step((x.to_sparse(), y))",
    "pipe.step((torch.quantize_per_tensor(x, 1, 0, torch.qint8), y))", "pipe.step((x.to('meta'), y))",
    "pipe.step(([x, x], y))", "pipe.step((x.bool(), y))", "pipe.step((x[None], y))",
    "pipe.step((x.numpy(), y.numpy()))",
)  # fmt: skip


def calls(draw: random.Random, made: Path) -> Case:
    """A script that gives a pipeline an argument, or asks it for something, that makes no sense."""
    more, call = "", "pipe.step((x, y))"
    if draw.random() < 0.5:
        name = draw.choice(list(_ARGUMENTS))
        more = f", {name}={draw.choice(_ARGUMENTS[name])}"
    else:
        call = draw.choice(_CALLS)
    given = "" if "loss_fn" in more else ", loss"
    given += "" if "num_microbatches" in more else ", num_microbatches=2"
    text = "from functools import partial\nimport torch\nfrom torch import nn\nfrom good import make\n"
    text += "from rpc_pipe import Pipeline\nmodel, (x, y), loss = make()\n"
    text += f"pipe = Pipeline(model{given}{more})\n{call}\n"
    files: dict[str, str | bytes] = {"s.py": text, "good.py": (made / "good.py").read_bytes()}
    transport = draw.choice(["local", "local", "rpc", "zmq"])
    return Case(["run", "s.py", "--transport", transport], False, files, note=(more or call), codes=(1,))
