"""What a user may get wrong in code: schedules whose methods answer nonsense, models that are none."""

from __future__ import annotations

import random
from pathlib import Path

from .malformed_input import GOOD, Case, typed_as

_METHODS = {
    "num_stages": "@property\n    def num_stages(self)", "num_routes": "@property\n    def num_routes(self)",
    "place": "def place(self, stage, route)", "route": "def route(self, microbatch)",
    "splits": "def splits(self, stage, microbatch)", "recomputes": "def recomputes(self, stage)",
    "after": "def after(self, action)", "slot": "def slot(self, action)", "actions": "def actions(self, stage, index)",
    "program": "def program(self, worker)", "updates": "def updates(self, stage, route)",
    "activation_limit": "def activation_limit(self, worker)", "peak_activations": "def peak_activations(self, worker)",
    "order": "@property\n    def order(self)", "version": "def version(self, stage, microbatch)",
    "worker": "def worker(self, action)",
    "hosted": "def hosted(self, worker)", "__post_init__": "def __post_init__(self)",
    "synchronous": "@property\n    def synchronous(self)", "__init__": "def __init__(self, **more)",
}  # fmt: skip
_ANSWERS = (
    "raise ValueError('no')", "raise KeyError(0)", "raise StopIteration", "raise SystemExit(0)",
    "raise RecursionError", "return None", "return 'three'", "return -1", "return 0",
    "return 1.5", "return 10**12",
    "return float('nan')", "return []", "return [None]", "return [(0, 'F', 0)]", "return {}", "return self",
    "return object()", "return iter(int, 1)", "return [F(0, 0)] * 3", "return F(99999, 0)", "yield F(0, 0)",
    "return [F(0, -1)]", "return [B(0, 99999999)]", "return 1 / 0", "return self.no_such", "return lambda: 1",
    "return b'x'", "return True", "assert False", "return [U(0, 0)]", "return range(10**12)", "raise MemoryError",
)  # fmt: skip


def schedules(draw: random.Random, made: Path) -> Case:
    """A schedule of the user's whose methods raise, or answer something that makes no sense."""
    chosen = draw.sample(list(_METHODS), draw.choice([1, 1, 2]))
    lines = ["from rpc_pipe.dependency import *", "from rpc_pipe.dependency import Spec, F, B, U", "class S(Spec):"]
    for method in chosen:
        lines += [f"    {_METHODS[method]}:", f"        {draw.choice(_ANSWERS)}"]
    if "slot" not in chosen:
        lines += ["    def slot(self, action):", "        return 9 * action.microbatch + action.stage"]
    text = "\n".join(lines) + "\n"
    if draw.random() < 0.1:
        text = draw.choice(["import no_such", "x = (", "raise SystemExit", "1/0", "class S: pass", "S = 3", "\0"])
    base = draw.choice(["simulate", "simulate", "export", "verify", "run a model"])
    return Case(typed_as(base, made, "--schedule", "s.py:S"), False, {"s.py": text}, note=text[70:].replace("\n", ";"))


_RETURNED = (
    "raise ValueError('no')", "raise SystemExit(0)",
    "return None", "return 3", "return model",
    "return model, None", "return None, batch", "return model, batch, loss, 4", "return model, batch, 3",
    "return [], batch, loss", "return [None], batch, loss", "return [3, 4], batch, loss", "return 'model', batch",
    "return model, 'batch', loss", "return model, (x,), loss", "return model, (x, x[:2]), loss",
    "return model, (torch.tensor(1.), x), loss", "return model, (x[:0], x[:0]), loss", "return model, batch",
    "return model, batch, lambda o, t: None", "return model, batch, lambda o, t: o",
    "return model, batch, lambda o: o",
    "return model, batch, lambda o, t: 'x'", "return [nn.Linear(3, 3)] * 4, batch, loss",
    "return nn.Linear(4, 4), batch",
    "return Broken(), {'x': x}", "return Broken(), (x, x), loss", "return Wrong(), {'x': x}",
    "return Empty(), {'x': x}", "return Model(), {'x': x, 'y': x}", "return Model(), x", "return Model(), (x, x, x)",
    "return nn.Identity(), x", "return nn.Sequential(), (x, x), loss", "yield model, batch", "return lambda: model",
    "return model, batch, nn.MSELoss", "return (nn.Linear for _ in range(3)), batch, loss", "return dict(a=1), batch",
    "return [nn.Linear, nn.Tanh], batch, loss", "return model, (x.int(), x), loss", "return model, (x * 1j, x), loss",
    "return [lambda x: x] * 4, batch, loss", "return [nn.Tanh()] * 4, batch, loss", "return model, [batch], loss",
    "raise torch.OutOfMemoryError", "raise StopIteration", "raise RecursionError", "1/0", "return model, {}, loss",
)  # fmt: skip
_MORE = """
class Broken(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
    def forward(self, x):
        raise ArithmeticError("the model's own")

class Wrong(Broken):
    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return "loss"

class Empty(nn.Module):
    def forward(self, x):
        return x.mean()

"""


def models(draw: random.Random, made: Path) -> Case:
    """A make() that does not return what it should."""
    setting = "    model, (x, y), loss = _make()\n    batch = x, y\n"
    text = GOOD.replace("def make", "def _make") + _MORE + f"def make():\n{setting}    {draw.choice(_RETURNED)}\n"
    if draw.random() < 0.1:
        text = draw.choice(["import no_such", "x = (", "raise SystemExit", "1/0", "make = 3", "make = None", "\0"])
    typed = draw.choice(
        [
            ["plan", "m.py:make", "--estimate", "--seconds", "0.2", "--no-searched"],
            ["profile", "m.py:make", "--estimate"], ["profile", "m.py:make", "--repeats", "1"],
            typed_as("run a model", made, "--model", "m.py:make"),
            ["verify", "m.py:make", "--steps", "1", "--microbatches", "2", "--transport", "local"],
            ["verify", "m.py:make", "--list-blocks"], ["compare", "--model", "m.py:make"],
        ]
    )  # fmt: skip
    return Case(typed, False, {"m.py": text}, note=text.splitlines()[-1].strip(), codes=(1,))
