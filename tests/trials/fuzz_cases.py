"""What `fuzz.py` draws: a model, how it is trained, by which schedule."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from random_specs import RandomLags, RandomProgram, RandomSlots, RandomSpec, RandomStepLags
from torch import Tensor, nn

from rpc_pipe.dependency import Order, Spec
from rpc_pipe.pipeline import Pipeline, Training
from rpc_pipe.planning.specs import make_spec, parameter_types
from rpc_pipe.schedules import SCHEDULES
from trials.fuzz_layers import WIDTH
from trials.fuzz_models import LOSSES, MANNERS, MEANS, Made, Unsplit
from trials.fuzz_operations import OPERATIONS
from trials.fuzz_whole import Drawn, Wild

_SYNCHRONOUS = [name for name, cls in SCHEDULES.items() if cls.synchronous]
_OVERLAPPING = [name for name, cls in SCHEDULES.items() if not cls.synchronous]
_OPTIONS: dict[str, list[Any]] = {
    "b_order": ["descending", "ascending"], "keep": [0, 1, 2], "window": [1, 2, 3, 5], "chunks": [1, 2, 3],
    "waves": [1, 2], "pairs": [1, 2], "scale": ["direct-concat", "forward-doubling", "backward-halving"],
    "pipelines": [1, 2, 3], "vertical_sync": [True],
}  # fmt: skip
_SPARSE = {"sparse bag", "sparse"}
#: so much that they take more than their share of the time, or end most gradients
_RARE = {"detached", "orthogonal", "svd", "recurrent", "attention", "lazy linear"}
#: what no model with a forward of its own may have
_REFUSED = {"lazy linear"}
_OPTIMIZERS: list[tuple[Callable[..., torch.optim.Optimizer], dict[str, Any]]] = [
    (torch.optim.SGD, {"lr": 0.05}),
    (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True}),
    (torch.optim.AdamW, {"lr": 1e-2}),
    (torch.optim.AdamW, {"lr": 1e-2, "foreach": False, "amsgrad": True}),
    (torch.optim.RMSprop, {"lr": 1e-3, "centered": True}),
    (torch.optim.Adagrad, {"lr": 1e-2}),
    (torch.optim.NAdam, {"lr": 1e-3}),
    (torch.optim.Adafactor, {"lr": 1e-3, "eps": (1e-7, 1e-3)}),  # by itself it takes it from the first parameter
]


def drawn_changes(number: int, steps: int) -> list[str]:
    """Return for each step of a case what is changed behind it; most cases change nothing."""
    draw = random.Random(f"changes of {number}")
    changes = ["", "freeze", "thaw", "load", "rate", "mode"] if draw.random() < 0.3 else [""]
    return [draw.choice(changes) for _ in range(steps)]


class ByHand:
    """What a script changes by hand between two steps: some of its layers, by number, or an optimizer's rates."""

    def __init__(self) -> None:
        self._frozen: list[nn.Parameter] = []

    def change(self, what: str, draw: str, layers: Iterable[tuple[int, nn.Module]], optimizer: Any) -> None:
        """Do `what` is drawn; `draw`: of which the choice of layers is a function."""
        for group in optimizer.param_groups if what == "rate" and optimizer is not None else ():
            group["lr"] *= 1.5
        for layer in [layer for index, layer in layers if random.Random(f"{draw} {index}").random() < 0.5]:
            if what == "freeze":
                self._frozen += [p for p in layer.parameters() if p.requires_grad]
            if what == "mode":
                layer.train(not layer.training)
            if what == "load":
                state = layer.state_dict()
                layer.load_state_dict({n: t / 2 if t.is_floating_point() else t.clone() for n, t in state.items()})
        for parameter in self._frozen:
            parameter.requires_grad_(what == "thaw")
        self._frozen = [] if what == "thaw" else self._frozen


class Case:
    """A pipeline and what is done with it, all drawn from a number.

    Args:
        doubled: whether all is computed in double precision, with an optimizer that is linear in gradients: then what
            another order of sums changes stays next to nothing.
        whole: whether the model has a forward of its own, in which anything stands around the blocks.
        short: whether it ends with the first update.
    """

    def __init__(
        self,
        number: int,
        *,
        doubled: bool = False,
        whole: bool = False,
        short: bool = False,
    ) -> None:
        draw = self._draw = random.Random(number)
        self.number = number
        self.workers = draw.choice([1, 2, 2, 2, 3, 3, 4, 5])
        self.microbatches = draw.choice([1, 2, 3, 4, 5, 6, 8])
        self.schedule: Any = draw.choice(_SYNCHRONOUS)
        self.options: dict[str, Any] = {}
        if draw.random() < 0.12:
            self.schedule = draw.choice([RandomSpec, RandomSlots, RandomProgram])
            self.options = {"seed": draw.randrange(10**6)}
        else:
            self._draw_options(draw)
        self.order: Order | None = draw.choice(["ready", "fixed", None])
        self.whole = whole
        self.unsplit = draw.random() < 0.06 or whole
        self.as_modules = draw.random() < 0.4
        self.blocks = "blocks" if self.unsplit and not (whole and number % 2) else None
        self.accumulate = draw.choice([1, 1, 1, 2, 3])
        self.max_grad_norm = draw.choice([None, None, 0.05, 10.0])
        self.ema_decay = draw.choice([None, None, None, 0.5])
        self.autocast = draw.random() < 0.1
        self.streams = draw.random() < 0.25
        self.steps = draw.choice([1, 2, 3]) * (1 if self.accumulate == 1 else 2)
        self.between = [draw.choice(["", "", "evaluate", "predict", "state"]) for _ in range(self.steps)]
        self.loss_fn = draw.choice(LOSSES)
        #: whether a step ends before the next begins
        self.is_synchronous = True
        other = random.Random(f"more of {number}")
        if other.random() < 0.1 and not whole:
            self._let_steps_overlap(other)
        self.optimizer: Callable[..., torch.optim.Optimizer]
        self._draw_model(draw)
        self.given = draw.random() < 0.2 and self.is_synchronous  # microbatches, not a batch
        #: what is changed by hand behind each step; not inside `autocast`, which keeps casts, nor where modules have
        #: copies, which follow them
        plain = self.is_synchronous and not (self.unsplit or self.autocast or self.spec().num_routes > 1)
        self.changes = drawn_changes(number, self.steps) if plain else [""] * self.steps
        if short:  # when all has been drawn
            self.steps = min(self.steps, self.accumulate)
            self.between = self.between[: self.steps]
        self.doubled = doubled
        if doubled:
            self.autocast = False
            self.optimizer = partial(torch.optim.SGD, lr=0.05)

    def _let_steps_overlap(self, draw: random.Random) -> None:
        """Take a schedule that is not synchronous, and nothing that only others can do."""
        self.options = {}
        if draw.random() < 0.3:
            self.schedule = draw.choice([RandomLags, RandomStepLags])
            self.options["seed"] = draw.randrange(10**6)
        else:
            self.schedule = draw.choice(_OVERLAPPING)
            self._draw_options(draw)
            self.options.pop("recompute", None)
        self.is_synchronous = False
        self.unsplit = self.autocast = False
        self.accumulate, self.loss_fn = 1, draw.choice(MEANS)
        self.streams, self.steps = draw.random() < 0.7, draw.choice([1, 3, 5])
        self.between = [draw.choice(["", "", "state", "evaluate"]) for _ in range(self.steps)]

    @property
    def num_early(self) -> int:
        """How many results come before the first update: no sum of gradients is in them."""
        calls = sum(what in ("evaluate", "predict") for what in self.between[: self.accumulate - 1])
        return min(self.steps, self.accumulate) + calls if self.is_synchronous else 0

    @property
    def may_round(self) -> bool:
        """Whether gradients are summed in another order than in one process."""
        reentrant = any("checkpoint" in maker.names for maker in self.makers)
        return reentrant or self.sparse or self.whole or (self.unsplit and (self.tied or self.skips))

    def _draw_options(self, draw: random.Random) -> None:
        known = parameter_types(SCHEDULES[self.schedule])
        for name, values in _OPTIONS.items():
            if name in known and draw.random() < 0.5:
                self.options[name] = draw.choice(values)
        if "recompute" not in known and not SCHEDULES[self.schedule].recompute and draw.random() < 0.3:
            self.options["recompute"] = draw.choice(["all", "0", "0+1"] if self.workers > 1 else ["all", "0"])

    def _draw_model(self, draw: random.Random) -> None:
        usual = [name for name in OPERATIONS if name not in _RARE]
        few = draw.sample(usual, draw.choice([2, 4, 8])) + draw.sample(sorted(_RARE), draw.choice([0, 0, 1]))
        few = [name for name in few if not self.whole or name not in _REFUSED]
        manners = draw.sample(list(MANNERS), 3)
        stages = self.spec().num_stages
        self.makers = [
            Made(draw.randrange(10**9), draw.choice([1, 1, 2, 3]), few, manners)
            for _ in range(stages + draw.choice([0, 0, 1, 3]))
        ]
        self.tied, self.skips, self.draws = draw.random() < 0.3, draw.random() < 0.6, draw.random() < 0.5
        self.sparse = is_sparse = not _SPARSE.isdisjoint(name for maker in self.makers for name in maker.names)
        if self.whole and Drawn(self.number, len(self.makers)).returns != "tensor":
            self.between = [
                each.replace("predict", "state") for each in self.between
            ]  # not all that is returned has rows
        # Where sums have another order, a gradient that is nothing but rounding must not be divided by its size.
        linear = self.whole or (self.tied and self.unsplit)
        # Sparse gradients go with these two.
        kinds = [0, 5] if is_sparse else [0, 1] if linear else list(range(len(_OPTIMIZERS)))
        cls, settings = _OPTIMIZERS[0 if is_sparse and linear else draw.choice(kinds)]
        self.optimizer = partial(cls, **settings)
        halved = partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5)
        self.lr_scheduler = draw.choice([None, None, halved])
        layers = len(self.makers)
        self.split = None
        if draw.random() < 0.5 and not self.unsplit:
            cuts = sorted(draw.sample(range(1, layers), stages - 1))
            self.split = [end - begin for begin, end in zip([0, *cuts], [*cuts, layers], strict=True)]

    def spec(self) -> Spec:
        """Return the schedule, unchecked.

        Raises:
            ConfigError: its parameters do not go together.
        """
        return make_spec(self.schedule, self.workers, self.microbatches, self.options)

    def __str__(self) -> str:
        schedule = self.schedule if isinstance(self.schedule, str) else self.schedule.__name__
        names = " | ".join(" ".join(maker.names) for maker in self.makers) if hasattr(self, "makers") else ""
        said = {
            name: value
            for name, value in vars(self).items()
            if name not in (("makers", "number", "schedule", "sparse"))
            and not name.startswith("_")
            and value not in (None, False)
        }
        around = f" {Drawn(self.number, len(self.makers))}" if self.whole and names else ""
        return f"{schedule} {said} [{names}]{around}".replace("<function ", "").replace("functools.", "")

    def model(self) -> Any:
        """Make the model, the same each time."""
        torch.manual_seed(self.number)
        if self.unsplit:
            whole: Any = partial(Unsplit, self.makers, self.tied, self.skips, self.draws)
            if self.whole:
                whole = partial(Wild, self.makers, self.number)
            return whole() if self.as_modules else whole
        return [maker() for maker in self.makers] if self.as_modules else list(self.makers)

    def batches(self) -> list[tuple[Tensor, Tensor]]:
        """Make the batches, one of each step: microbatches are ragged, and sometimes fewer."""
        draw = random.Random(self.number + 1)
        rows = [2 * self.microbatches + draw.choice([0, 1, self.microbatches - 1]) for _ in range(self.steps)]
        if draw.random() < 0.1:
            rows[-1] = max(2, self.microbatches // 2)
        generator = torch.Generator().manual_seed(self.number)

        def drawn(count: int) -> Tensor:  # the same numbers in double precision
            found = torch.randn(count, WIDTH, generator=generator, dtype=torch.float32)
            return found.to(torch.get_default_dtype())

        return [(drawn(n), drawn(n)) for n in rows]

    def asked(self, batch: tuple[Tensor, Tensor]) -> dict[str, Any]:
        """Return what a step is called with: a batch, or microbatches of rows that differ more."""
        if not self.given or len(batch[0]) < 2 * self.microbatches:
            return {"batch": batch}
        rows = [2] * (self.microbatches - 1)
        rows.append(len(batch[0]) - sum(rows))
        return {"microbatches": list(zip(batch[0].split(rows), batch[1].split(rows), strict=True))}

    @contextmanager
    def precision(self) -> Iterator[None]:
        """Return the context in which everything is made."""
        torch.set_default_dtype(torch.float64 if self.doubled else torch.float32)
        try:
            yield
        finally:
            torch.set_default_dtype(torch.float32)

    def settings(self) -> Any:
        """Return the context in which everything is called."""
        return torch.autocast("cpu", torch.bfloat16) if self.autocast else nullcontext()

    def pipeline(self, stall_s: float) -> Pipeline:
        """Make the pipeline."""
        return Pipeline(
            self.model(),
            self.loss_fn,
            training=Training(
                self.optimizer,
                lr_scheduler=self.lr_scheduler,
                max_grad_norm=self.max_grad_norm,
                accumulate=self.accumulate,
                ema_decay=self.ema_decay,
            ),
            schedule=self.schedule,
            schedule_options=self.options,
            num_workers=self.workers,
            num_microbatches=self.microbatches,
            split=self.split,
            order=self.order,
            seed=self.number,
            stall_s=stall_s,
            example=self.batches()[0] if self.unsplit else None,
            blocks=self.blocks,
        )
