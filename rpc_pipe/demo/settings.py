"""The options of the built-in training, with the rules that their values must keep. Torch-free."""

from __future__ import annotations

import os
from dataclasses import dataclass

from ..dependency import ConfigError
from ..planning.specs import PipeOptions


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
    """The built-in training."""

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
    checkpoint_every: int | None = None
    checkpoint_folder: str = "checkpoints"
    checkpoint_keep: int | None = None
    resume: str | None = None

    @property
    def gpt(self) -> GPTConfig:
        if self.width % self.heads:
            raise ConfigError(f"--heads {self.heads}: must divide --width {self.width}")
        self._refuse_too_large()
        return GPTConfig(self.width, self.depth, self.heads, self.context, self.dropout)

    def _refuse_too_large(self) -> None:
        """Refuse what no machine like this one can hold, before a worker tries.

        Raises:
            ConfigError: the model and a batch of tokens are larger than the memory.
        """
        parameters = self.depth * (12 * self.width**2 + 13 * self.width) + (2 * 256 + self.context) * self.width
        tokens = self.batch * self.context
        least, there = 16 * parameters + 8 * tokens, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if least > there and "RANK" not in os.environ:  # a worker's launcher has looked, or there are several machines
            raise ConfigError(
                f"--width {self.width}, --depth {self.depth}, --context {self.context}, --batch {self.batch}: "
                f"{parameters:.3g} parameters with gradients and AdamW, and {tokens:.3g} tokens, take at least "
                f"{least / 1e9:.3g} GB; this machine has {there / 1e9:.3g} GB"
            )
