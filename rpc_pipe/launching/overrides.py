"""The options typed on the command line, as a new pipeline of a script asks for them."""

from __future__ import annotations

from typing import Any

from ..dependency.pipeline_options import Options


class Overrides:
    """Follows every pipeline of this process; by default a pipeline is as the script writes it."""

    def over(self, said: Options) -> Options:
        """Return the options of a new pipeline."""
        return said

    def made(self, pipe: Any) -> None:
        """Take a pipeline that has been made."""

    def closing(self, pipe: Any) -> bool:
        """Take a pipeline that is about to be closed; return whether it stays open."""
        return False


#: of the pipelines that are made from now on
current = Overrides()
