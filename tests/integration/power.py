"""``python -m tests.integration.power``: a node whose logs a test can take the power from.

The node writes down, beside its logs and where SIGKILL leaves it, what it has synced of them. From
that a test, once the node was killed, makes one of the states that a power cut may leave: what was
synced is there, the rest is not, or only in part. What LMDB keeps, the broker's local state and the
controller's journal, stays as the kill left it: each commit of it is synced before it counts.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import threading
from pathlib import Path
from typing import Final

from penstock.broker.__main__ import main
from penstock.broker.storage import data_directory, disk

_PAGE: Final = 64
"""Smaller than a page is, so that small logs are torn too."""

_NAMES: Final = "names.json"


class _Synced:
    """What is known to be on the disk of one partition's directory; files go by their inode.

    A second link to each file keeps its inode from being another file's, however soon it is gone.
    """

    def __init__(self, partition: Path) -> None:
        self.partition = partition
        self.directory = partition.parents[1] / "synced" / partition.name

    def begin(self, inode: int, path: Path) -> None:
        """The file is new, or is empty again."""
        self.directory.mkdir(parents=True, exist_ok=True)
        self._content(inode).unlink(missing_ok=True)
        with contextlib.suppress(FileExistsError):
            os.link(path, self.directory / f"{inode}.link")

    def knows(self, inode: int) -> bool:
        return (self.directory / f"{inode}.link").exists()

    def write(self, inode: int, content: bytes) -> None:
        """That content is on the disk."""
        self._put(self._content(inode), content)

    def write_names(self) -> None:
        """The names that are there now are on the disk."""
        self.directory.mkdir(parents=True, exist_ok=True)
        self._put(self.directory / _NAMES, json.dumps(self.names_now()).encode())

    def content(self, inode: int) -> bytes:
        path = self._content(inode)
        return path.read_bytes() if path.exists() else b""

    def current(self, inode: int, name: str) -> bytes:
        path = self.directory / f"{inode}.link"
        # The process may have been killed before it made the link.
        return (path if path.exists() else self.partition / name).read_bytes()

    def names(self) -> dict[str, int]:
        path = self.directory / _NAMES
        found: dict[str, int] = json.loads(path.read_bytes()) if path.exists() else {}
        return found

    def names_now(self) -> dict[str, int]:
        found = {}
        for path in self.partition.iterdir():
            with contextlib.suppress(FileNotFoundError):  # It has another name by now.
                found[path.name] = path.stat().st_ino
        return found

    def _content(self, inode: int) -> Path:
        return self.directory / f"{inode}.content"

    def _put(self, path: Path, content: bytes) -> None:
        temporary = path.with_suffix(".tmp")
        temporary.write_bytes(content)
        temporary.replace(path)  # As one: the process may be killed in between.


class RememberingDisk(disk.Disk):
    """Writes down what is synced, before it is said to be; nothing is really synced for that."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def open(self, path: Path, flags: int) -> int:
        synced = _Synced(path.parent)
        with self._lock:
            fd = super().open(path, flags)
            inode = os.fstat(fd).st_ino
            if flags & (os.O_EXCL | os.O_TRUNC) or not synced.knows(inode):
                synced.begin(inode, path)
        return fd

    def sync_data(self, fd: int) -> None:
        path = Path(f"/proc/self/fd/{fd}")
        with self._lock:
            content = path.read_bytes()  # By another descriptor: this one may not be for reading.
            _Synced(path.readlink().parent).write(os.fstat(fd).st_ino, content)

    def sync_directory(self, path: Path) -> None:
        if path.parent.name != "logs" or path.name.startswith("."):
            return  # Of all partitions, or of what LMDB keeps: their directories stay.
        with self._lock:
            _Synced(path).write_names()


def lose_power(logs: Path, chance: random.Random | None) -> None:
    """Leave of a killed node's partitions what was synced, and of the rest what ``chance`` says.

    Without one nothing of it. The node must have run as this module.
    """
    for partition in sorted(path for path in logs.iterdir() if (path / ".").is_dir()):
        synced = _Synced(partition)
        if not partition.name.startswith(".") and synced.directory.exists():
            _cut(synced, chance)


def _cut(synced: _Synced, chance: random.Random | None) -> None:
    left: dict[str, bytes] = {}
    before, now = synced.names(), synced.names_now()
    for name in sorted(before.keys() | now.keys()):
        inode = (before if chance is None else chance.choice([before, now])).get(name)
        if inode is not None:
            left[name] = _content(synced.content(inode), synced.current(inode, name), chance)
    shutil.rmtree(synced.partition)
    shutil.rmtree(synced.directory)
    synced.partition.mkdir()
    for name, content in left.items():  # What is there now is as it will be found again.
        path = synced.partition / name
        path.write_bytes(content)
        inode = path.stat().st_ino
        synced.begin(inode, path)
        synced.write(inode, content)
    synced.write_names()


def _content(durable: bytes, current: bytes, chance: random.Random | None) -> bytes:
    kind = 0 if chance is None else chance.randrange(3)
    if kind == 0:
        return durable
    if kind == 1:
        return current
    pages = []
    size = chance.randint(min(len(durable), len(current)), max(len(durable), len(current)))
    for at in range(0, size, _PAGE):
        page = chance.choice([durable, current])[at : at + _PAGE]
        pages.append(page.ljust(min(_PAGE, size - at), b"\0")[: size - at])
    return b"".join(pages)


if __name__ == "__main__":
    data_directory.Disk = RememberingDisk  # type: ignore[misc]
    raise SystemExit(main())
