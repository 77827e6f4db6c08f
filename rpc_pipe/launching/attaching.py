"""The connection of a pipeline with the launcher of its process, and with the readers of its boards."""

from __future__ import annotations

import logging
import os

from ..dependency import ConfigError
from ..tracing.own_boards import Watchable, keep_boards, roll_call_here
from . import launcher_link as link

logger = logging.getLogger(__name__)


def attach(pipeline: Watchable) -> None:
    """Pass the launcher's orders to `pipeline`, and write boards of its workers; once more when its model is cut.

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
            from . import ending  # a process alone ends as it likes

            ending.prepare(pipeline.actors[0].worker, reports=kept)
    except Exception as error:  # training does not depend on being watched
        logger.warning("this run cannot be watched: %s: %s", type(error).__name__, error)
