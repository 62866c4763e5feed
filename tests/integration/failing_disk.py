"""``python -m tests.integration.failing_disk``: a node some of whose directories fail on demand.

While a data directory holds a file ``.failing``, the system calls that it names fail there with
EIO, as those of a dying disk do.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path

from penstock.broker.__main__ import main
from penstock.broker.storage import data_directory, disk

_MARKER = ".failing"


def fail(directory: Path, *calls: str) -> None:
    """Let these of "open", "write", "sync", "name" and "commit" fail in a data directory.

    "name" is for all that make, change and remove names, "commit" for LMDB's transactions.
    """
    (directory / _MARKER).write_text(" ".join(calls))


def mend(directory: Path) -> None:
    """Let nothing fail there any more."""
    (directory / _MARKER).unlink()


def _check(call: str, path: Path) -> None:
    for parent in path.parents:
        marker = parent / _MARKER
        if marker.exists() and call in marker.read_text().split():
            raise OSError(errno.EIO, os.strerror(errno.EIO))


def _path_of(fd: int) -> Path:
    return Path(f"/proc/self/fd/{fd}").readlink()


class FailingDisk(disk.Disk):
    """Looks for the marker before each call."""

    def open(self, path: Path, flags: int) -> int:
        _check("open", path)
        return super().open(path, flags)

    def write_at(self, fd: int, buffers: Sequence[disk.Buffer], position: int) -> int:
        _check("write", _path_of(fd))
        return super().write_at(fd, buffers, position)

    def sync_data(self, fd: int) -> None:
        _check("sync", _path_of(fd))
        super().sync_data(fd)

    def rename(self, source: Path, target: Path) -> None:
        _check("name", target)
        super().rename(source, target)

    def link(self, source: Path, target: Path) -> None:
        _check("name", target)
        super().link(source, target)

    def remove(self, path: Path) -> None:
        _check("name", path)
        super().remove(path)

    def make_directory(self, path: Path) -> None:
        _check("name", path)
        super().make_directory(path)

    def sync_directory(self, path: Path) -> None:
        _check("name", path / _MARKER)
        super().sync_directory(path)

    def commit(self, environment: Path) -> None:
        _check("commit", environment)


if __name__ == "__main__":
    data_directory.Disk = FailingDisk  # type: ignore[misc]
    raise SystemExit(main())
