"""One process at a time uses a metadata directory."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from penstock.wire.errors import DataDirectoryError


def lock(directory: Path) -> int:
    """Hold the directory, which is made if need be, until the descriptor returned is closed.

    Raises DataDirectoryError when another process holds it, or it can't be used.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(directory / "raft.lock", os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise DataDirectoryError(f"cannot use metadata.dir {directory}: {error}") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise DataDirectoryError(
            f"another process uses metadata.dir {directory}; stop it first"
        ) from None
    return descriptor


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Hold the directory meanwhile; raises as lock does."""
    descriptor = lock(directory)
    try:
        yield
    finally:
        os.close(descriptor)
