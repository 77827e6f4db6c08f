"""The secret of a job, in a file: processes that have it may take part. Loads without torch."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from ..dependency import ConfigError

_LEAST_BYTES, _MOST_BYTES = 32, 4096


def make_key(path: Path) -> None:
    """Write a new secret to a file that only its owner can read.

    Raises:
        ConfigError: it is there already, or cannot be written.
    """
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be made: {error.strerror}") from error
    with open(descriptor, "w") as file:
        file.write(secrets.token_hex(32) + "\n")


def read_key(path: Path) -> bytes:
    """Return the secret in a file.

    Raises:
        ConfigError: others can read the file, or it is theirs, or it holds no secret.
    """
    try:
        with path.open("rb") as file:
            found = os.fstat(file.fileno())
            if found.st_mode & 0o077:
                raise ConfigError(f"key file {path}: others can read it; chmod 600 {path}")
            if found.st_uid not in (0, os.geteuid()):  # who is root reads all, and its owner knows the key
                raise ConfigError(
                    f"key file {path}: belongs to user {found.st_uid}, who can read it; copy it, or chown"
                )
            secret = file.read(_MOST_BYTES + 1).strip()
    except OSError as error:
        raise ConfigError(f"key file {path}: cannot be read: {error.strerror}") from error
    if not _LEAST_BYTES <= len(secret) <= _MOST_BYTES:
        raise ConfigError(
            f"key file {path}: holds {len(secret)} bytes; must be {_LEAST_BYTES} to {_MOST_BYTES}; "
            "`rpc-pipe key FILE` makes one"
        )
    return secret
