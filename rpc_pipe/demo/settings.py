"""The sizes of the built-in GPT, and how it is trained. Torch-free."""

from dataclasses import dataclass

from ..dependency import ConfigError


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of the GPT."""

    width: int = 128
    depth: int = 4
    heads: int = 4
    context: int = 128
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ConfigError(f"--heads {self.heads}: must divide --width {self.width}")


@dataclass(frozen=True)
class DemoTraining:
    """How it is trained."""

    steps: int = 100
    #: rows
    batch: int = 16
    lr: float = 2e-3
    #: a file or folder; None: the sources of Python's standard library
    data: str | None = None
