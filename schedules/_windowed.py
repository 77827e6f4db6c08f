"""Schedules whose windows may go by the sizes of microbatches."""

from typing import TYPE_CHECKING

from ..dependency import Action, ConfigError, Spec

if TYPE_CHECKING:
    from ._by_size import Windows


class Windowed(Spec):
    """A schedule in which each worker runs forwards, and ends of microbatches, in two orders of their own.

    With `window_tokens` the microbatches in flight on a worker have at most so many tokens together, on all of its
    stages: many short ones, or few long ones.
    """

    window_tokens: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.window_tokens is None:
            return
        if self.window_tokens < 1 or len(self.parallelism.slices) > 1:
            raise ConfigError(f"window_tokens {self.window_tokens}: must be at least 1, and without slices")
        if not self.synchronous:
            raise ConfigError(f"window_tokens {self.window_tokens}: not where steps overlap; take 1f1b")

    @property
    def by_size(self) -> "Windows | None":
        """The windows by sizes; None: they count microbatches."""
        if self.window_tokens is None or not self.sizes:
            return None
        from ._by_size import windows  # which few jobs need

        return windows(self)

    def most_within(self, window: int) -> int:
        """Return the bound on activations of a worker whose window is of so many, or goes by sizes."""
        window = sized.widest if (sized := self.by_size) else window
        return min(window, self.num_stages // self.num_workers * self.num_microbatches)

    def ordinal(self, a: Action) -> int:
        """Return how many actions of its kind the worker runs before `a`."""
        return a.microbatch

    def peak_size(self, worker: int) -> int | None:
        return self.window_tokens
