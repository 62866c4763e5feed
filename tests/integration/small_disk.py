"""A small file system of a test's own, which is really full when it is full."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path


@contextlib.contextmanager
def small_disk(mount_point: Path, size_mb: int) -> Iterator[Path]:
    """The path of an empty file system of so many megabytes, gone at the end.

    It is mounted in a mount namespace of its own, which needs no privileges where users may make
    namespaces, and reached through the process that holds that namespace.
    """
    mount_point.mkdir(exist_ok=True)
    script = 'mount -t tmpfs -o size="$1"m none "$2" && echo mounted && exec cat'
    holder = subprocess.Popen(
        ["unshare", "-Urm", "sh", "-c", script, "sh", str(size_mb), str(mount_point)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        assert holder.stdout is not None
        if holder.stdout.readline() != b"mounted\n":
            raise OSError(f"no small file system: {holder.communicate()[1].decode()}")
        yield Path(f"/proc/{holder.pid}/root{mount_point}")
    finally:
        holder.communicate()  # It ends with its input.


@cache
def small_disks_can_be_made() -> bool:
    """Whether this machine lets a test mount one."""
    try:
        with small_disk(Path("/tmp"), 1) as path:  # Hidden in that namespace alone.
            return os.statvfs(path).f_blocks * os.statvfs(path).f_frsize == 1 << 20
    except OSError:
        return False


def fill(disk: Path, leaving_bytes: int = 0) -> Path:
    """A file that takes all room but ``leaving_bytes``; remove it to have that again."""
    filler = disk / "filler"
    status = os.statvfs(disk)
    left = max(status.f_bavail * status.f_frsize - leaving_bytes, 0)
    chunk = bytes(1 << 20)
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while left > 0:
            left -= file.write(chunk[:left])
    return filler
