"""What the main job can be told, with the rules that its values must keep. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from ..dependency import ConfigError
from ..planning.options import PipeOptions, at_least


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
            at_least(name, getattr(self, name), 1)
        if self.width % self.heads:
            raise ConfigError(f"--heads {self.heads}: must divide --width {self.width}")
        if not 0 <= self.dropout < 1:
            raise ConfigError(f"--dropout {self.dropout}: must be at least 0 and less than 1")
        return GPTConfig(self.width, self.depth, self.heads, self.context, self.dropout)
