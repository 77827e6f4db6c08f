"""The connection of a pipeline with the launcher of its process: options typed there, and readers of its boards."""

import logging
import os
from typing import Any

from ..boards.own_boards import Watchable, keep_boards, roll_call_here
from ..dependency import ConfigError
from ..dependency.pipeline_options import Options
from . import launcher_link as link


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


logger = logging.getLogger(__name__)


def attach(pipeline: Watchable, summarise: link.Summarise) -> None:
    """Pass the launcher's orders to `pipeline`, and write boards of its workers; once more when its model is cut.

    Args:
        summarise: makes the summary at the end of a job without a launcher.

    Raises:
        ConfigError: the environment's rule for losses that are not finite is unknown.
    """
    link.add(pipeline)
    nan = os.environ.get(link.NAN, "stop")
    if nan not in link.NANS:
        raise ConfigError(f"{link.NAN} {nan!r}: must be {', '.join(link.NANS[:-1])} or {link.NANS[-1]}")
    for actor in pipeline.actors:
        actor.nan = nan
    try:
        of_a_job = link.present() or any(not actor.carrier.post.within_process for actor in pipeline.actors)
        kept = keep_boards(pipeline)
        if kept and not link.present():
            for actor in pipeline.actors:
                actor.roll_call = roll_call_here
        if of_a_job:
            from . import ending

            ending.prepare(pipeline.actors[0].worker, summarise if kept else None)
    except Exception as error:  # training does not depend on being watched
        logger.warning("this run cannot be watched: %s: %s", type(error).__name__, error)
