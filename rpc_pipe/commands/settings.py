"""What the main job and `verify` can be told, with the rules that their values must keep. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ..dependency import ConfigError, Order, Spec, check_all
from ..model.cut import cut
from ..planning.options import make_spec


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of the GPT."""

    width: int = 128
    depth: int = 4
    heads: int = 4
    context: int = 128
    dropout: float = 0.0

    @property
    def num_layers(self) -> int:
        """Layers that can be cut between: embedding, blocks, head."""
        return self.depth + 2


@dataclass(frozen=True, kw_only=True)
class PipeOptions:
    """How the pipeline is made."""

    workers: int = 2
    schedule: str = "1f1b"
    schedule_options: dict[str, str] = field(default_factory=dict)
    microbatches: int = 8
    order: Order | None = None
    split: list[int] | None = None
    device: str = "cpu"
    seed: int = 0
    threads: int = 1
    steps: int = 100

    def for_pipeline(self) -> dict[str, Any]:
        """Return the options that `Pipeline` takes as they are."""
        return {
            "num_microbatches": self.microbatches,
            "num_workers": self.workers,
            "schedule": self.schedule,
            "schedule_options": dict(self.schedule_options),
            "split": self.split,
            "order": self.order,
            "device": self.device,
            "seed": self.seed,
        }

    def spec(self, num_layers: int) -> Spec:
        """Make the spec and check everything that can be checked before a worker is started.

        Raises:
            ConfigError: an option that cannot work.
            ScheduleError: a relation that cannot run.
        """
        for name in ("threads", "steps"):
            _at_least(name, getattr(self, name), 1)
        spec = make_spec(self.schedule, self.workers, self.microbatches, self.schedule_options)
        cut(num_layers, spec.num_stages, self.split)
        check_all(spec)
        return spec


@dataclass(frozen=True, kw_only=True)
class TrainOptions(PipeOptions):
    """The main job."""

    batch: int = 16
    context: int = 128
    width: int = 128
    depth: int = 4
    heads: int = 4
    dropout: float = 0.0
    lr: float = 2e-3
    data: str | None = None
    save: str | None = None
    trace: str | None = None
    html: str | None = None
    beat_bigram: bool = False

    @property
    def gpt(self) -> GPTConfig:
        for name in ("batch", "context", "width", "depth", "heads"):
            _at_least(name, getattr(self, name), 1)
        if self.width % self.heads:
            raise ConfigError(f"--heads {self.heads}: must divide --width {self.width}")
        if not 0 <= self.dropout < 1:
            raise ConfigError(f"--dropout {self.dropout}: must be at least 0 and less than 1")
        return GPTConfig(self.width, self.depth, self.heads, self.context, self.dropout)


@dataclass(frozen=True, kw_only=True)
class VerifyOptions(PipeOptions):
    """The comparison with one process."""

    model: str = "gpt"
    transport: str = "rpc"
    steps: int = 3
    rows: int | None = None
    dropout: float = 0.1

    @property
    def batch_rows(self) -> int:
        """Rows of a batch: by default not a multiple of the microbatches, so that the last is ragged."""
        return 2 * self.microbatches + 1 if self.rows is None else self.rows


def _at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise ConfigError(f"--{name} {value}: must be at least {least}")
