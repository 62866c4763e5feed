"""What a voter does without room on its disk: it waits, and nothing leaves it meanwhile."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Final

import lmdb

from penstock.wire.errors import StorageError

# A file that cannot be opened for want of a descriptor waits for one as others wait for room.
_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EMFILE, errno.ENFILE})

# What a file system says when what is below it has gone or is damaged.
_FAILED: Final = frozenset(
    {errno.EIO, errno.EROFS, errno.ENXIO, errno.ENODEV, errno.ESTALE, errno.EUCLEAN}
)

AwaitRoom = Callable[[Exception], None]
"""Called with the error of a write that found no room; when it returns, the write is tried again.

It raises where there is no sense in waiting."""


def is_full(error: Exception) -> bool:
    """Whether there was no room, or no descriptor, and the disk is as it was before the write or
    transaction.
    """
    if isinstance(error, lmdb.Error):
        # Older releases give no code, but have a class for ENOSPC.
        return getattr(error, "code", None) in _FULL or isinstance(error, lmdb.DiskError)
    return isinstance(error, OSError) and error.errno in _FULL


def told_by_name(error: BaseException, directory: Path) -> BaseException:
    """The same failure of a controller, as one that says what, where and what to do if it is its
    disk's. The error is the cause of what is made of it.
    """
    of_files = isinstance(error, OSError) and error.errno in _FULL | _FAILED
    # What the system told LMDB has no class of its own; those that have one tell of damage, or of
    # calls that make no sense, whose stack is needed.
    of_files |= type(error) in (lmdb.Error, lmdb.DiskError)
    if not of_files:
        return error
    failure = StorageError(
        f"the controller's disk failed, with its metadata in {directory}: {error}; next: free or "
        "replace that disk; a node whose directory is lost joins anew, as "
        "docs/operating/failures.md says under 'Replacing a controller'"
    )
    failure.__cause__ = error
    return failure


def give_up(error: Exception) -> None:
    """An AwaitRoom that does not wait."""
    raise error
