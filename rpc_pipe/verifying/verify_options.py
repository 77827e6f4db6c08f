"""The options of `rpc-pipe verify`. Torch-free."""

from dataclasses import dataclass

from ..planning.pipe_options import PipeOptions

#: names of the models that need no file
BUILT_IN = "gpt", "conv", "mlp"
#: tokens of a row of `gpt`
CONTEXT = 16


@dataclass(frozen=True, kw_only=True, eq=False)
class VerifyOptions(PipeOptions):
    """The comparison with one process."""

    model: str = "gpt"
    transport: str = "rpc"
    steps: int = 8
    rows: int | None = None
    #: tokens of a row of each microbatch of `gpt`; None: a batch is split into equal rows
    lengths: list[int] | None = None
    dropout: float = 0.1
    max_grad_norm: float | None = None
    deferred_batch_norm: bool = False

    @property
    def slices(self) -> str | None:
        """The slices of sequences; None: sequences are not cut."""
        said = self.schedule_options.get("slices", "1")
        return None if said == "1" else said

    @property
    def batch_rows(self) -> int:
        """Rows of a batch, or of each microbatch if `lengths` are given.

        By default a batch has no multiple of the microbatches, so that the last is ragged.
        """
        return self.rows or (2 * self.num_microbatches + 1 if self.lengths is None else 2)
