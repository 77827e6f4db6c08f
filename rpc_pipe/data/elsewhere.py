"""File systems elsewhere, by fsspec: asked again where that may help."""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from ..dependency import ConfigError, DataError
from .source import need

T = TypeVar("T")
logger = logging.getLogger(__name__)

_ATTEMPTS = 4
#: how long the second attempt waits; each further one twice as long
_FIRST_WAIT_S = 0.5
#: how long an HTTP server may be silent
_SILENT_S = 10.0
#: of HTTP, what another attempt may change though the fault is the client's: too slow, too early, too often
_PASSING = (408, 425, 429)


def file_system(place: str, what: str, options: Mapping[str, Any]) -> tuple[Any, str]:
    """Return the file system that has `place`, and the path there.

    Args:
        what: needs it, as errors say.
        options: for fsspec, such as credentials.

    Raises:
        ConfigError: there is none for such a place.
    """
    fsspec = need("fsspec", what)
    options = dict(options)
    if place.startswith("http") and "client_kwargs" not in options:
        aiohttp = need("aiohttp", what)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_SILENT_S, sock_read=_SILENT_S)
        options["client_kwargs"] = {"timeout": timeout}
    try:
        files, path = fsspec.core.url_to_fs(place, **options)
    except (ImportError, ValueError) as error:
        raise ConfigError(f"{what}: {error}") from error
    return files, path


def patiently(do: Callable[[], T], told: str) -> T:
    """Return what `do` returns; if it fails, in one of some more attempts.

    Raises:
        DataError: none succeeded; begins with `told`.
        OSError: there is no room here.
    """
    wait = _FIRST_WAIT_S
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            return do()
        except Exception as raised:  # what a file system raises is its own affair
            # HTTP's file system calls everything that keeps it from a file a missing file.
            cause = raised.__cause__ if isinstance(raised, FileNotFoundError) else None
            error = cause if isinstance(cause, Exception) else raised
            if isinstance(error, ConfigError) or getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT):
                raise
            if attempt == _ATTEMPTS or _is_final(error):
                tried = "" if attempt == 1 else f" after {attempt} attempts"
                raise DataError(f"{told}{tried}: {_said(error)}") from error
            logger.warning("%s: attempt %d failed: %s", told, attempt, _said(error))
        time.sleep(wait)
        wait *= 2
    raise AssertionError("the last attempt returns or raises")


def _is_final(error: Exception) -> bool:
    """Tell whether another attempt would have the same end."""
    status = getattr(error, "status", None)  # of HTTP
    refused = isinstance(status, int) and 400 <= status < 500 and status not in _PASSING
    return refused or isinstance(error, (FileNotFoundError, PermissionError, NotImplementedError))


def _said(error: Exception) -> str:
    if (status := getattr(error, "status", None)) is not None:
        return f"{status} {getattr(error, 'message', '')}".strip()
    if isinstance(error, FileNotFoundError):
        return "there is no such file"
    return (str(error) or type(error).__name__).split("\n")[0]
