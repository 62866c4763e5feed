"""A node's disk in memory: LMDB environments and files that lose what was not synced.

The production journal and snapshot store run on it unchanged. Every operation that could reach the
disk passes ``Disk.operation``, so that a process can be made to die before, within or after any of
them. A process that is killed leaves what it wrote in the page cache; a power loss takes from the
cache whatever was not synced, and may leave a part of it.

A disk may be full for a while, and a flush may fail. After a flush that failed the kernel takes the
pages for clean: whoever tries it again is told that all is well, and what it was for is on no disk.
"""

from __future__ import annotations

import errno
import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random
from typing import Any

import lmdb

from tests.simulation.quorum.beside import pause

Tables = dict[str, dict[bytes, bytes]]
Writes = list[tuple[str, bytes, bytes | None]]


def _copied(tables: Tables) -> Tables:
    return {name: dict(rows) for name, rows in tables.items()}


def _burnt(fuse: int | None) -> tuple[int | None, bool]:
    """What is left of a fuse, and whether it went off."""
    if fuse is None:
        return None, False
    return (fuse - 1, False) if fuse else (None, True)


def _apply(writes: Writes, tables: Tables) -> None:
    for name, key, value in writes:
        rows = tables.setdefault(name, {})
        if value is None:
            rows.pop(key, None)
        else:
            rows[key] = value


class Crash(BaseException):
    """The process dies here. Nothing may catch it."""


class Injected:
    """An error that the simulation wants, and production has to live with."""


class NoRoomError(Injected, lmdb.DiskError):
    """A transaction found no room."""


class FlushError(Injected, lmdb.Error):
    """A transaction could not be made durable."""


class FileError(Injected, OSError):
    """A file could not be written or made durable."""


def is_injected(error: BaseException) -> bool:
    """Whether the simulation caused it, or what it says was the cause."""
    return isinstance(error, Injected) or isinstance(error.__cause__, Injected)


class Inode:
    """A file's content in the page cache, and as far as it was synced."""

    def __init__(self) -> None:
        self.content = b""
        self.durable: bytes | None = None
        self.never_durable = False  # A flush failed: its pages count as clean since.


class Disk:
    """What one node's processes leave to each other."""

    def __init__(self, rng: Random, counts: Counter[str] | None = None) -> None:
        self.rng = rng
        self.counts: Counter[str] = Counter() if counts is None else counts
        self.fuse: int | None = None  # So many operations, and the process dies.
        self.flush_fuse: int | None = None  # So many transactions, and one cannot be flushed.
        self.file_flush_fuse: int | None = None  # As much for files and directories.
        self.fullness = 0.0  # How likely a write finds no room.
        self.operations = 0
        self._environments: dict[str, Tables] = {}
        self._synced: dict[str, Tables] = {}  # Only of environments that differ from the cache.
        self._files: dict[str, Inode] = {}
        self._synced_files: dict[str, Inode] = {}

    def operation(self) -> None:
        """Something that could reach the disk is about to happen. Raises Crash if it is time."""
        pause()
        self.operations += 1
        if self.fuse is not None:
            self.fuse -= 1
            if self.fuse < 0:
                self.fuse = None
                raise Crash

    def make_room(self) -> None:
        """It is not full any more."""
        self.fullness = 0.0

    def _has_room(self) -> bool:
        if self.rng.random() >= self.fullness:
            return True
        self.counts["writes without room"] += 1
        return False

    def _write_file(self) -> None:
        self.operation()
        if self.fullness and not self._has_room():
            raise FileError(errno.ENOSPC, "no room")

    def keeps(self, name: str) -> bool:
        """Whether a file would be there after a loss of power, as it is now."""
        inode = self._files.get(name)
        return (
            inode is not None
            and inode is self._synced_files.get(name)
            and inode.durable == inode.content
        )

    def _transaction_fails(self) -> bool:
        self.flush_fuse, fails = _burnt(self.flush_fuse)
        self.counts["flushes of transactions failed"] += fails
        return fails

    def _file_fails(self) -> bool:
        self.file_flush_fuse, fails = _burnt(self.file_flush_fuse)
        self.counts["flushes of files failed"] += fails
        return fails

    def disarm(self) -> None:
        """Nothing that was to go wrong does."""
        self.fuse = self.flush_fuse = self.file_flush_fuse = None

    def is_behind(self, path: str) -> bool:
        """Whether the cache has something of an environment that a loss of power would undo."""
        return path in self._synced

    def lose_power(self) -> None:
        """What is not synced is gone, or torn, or there after all by chance."""
        self._environments.update(self._synced)
        self._synced.clear()
        files = dict(self._synced_files)
        for name in sorted({*self._files, *self._synced_files}):
            if (
                self._files.get(name) is not self._synced_files.get(name)
                and self.rng.random() < 0.5
            ):
                if name in self._files:
                    files[name] = self._files[name]
                else:
                    files.pop(name, None)
        for inode in files.values():
            if inode.durable != inode.content:
                torn = inode.content[: self.rng.randint(0, len(inode.content))]
                inode.content = inode.durable = self.rng.choice([inode.durable or b"", torn])
        self._files = files
        self._synced_files = dict(files)

    def wipe(self) -> None:
        """An empty disk takes its place."""
        self.__init__(self.rng, self.counts)  # type: ignore[misc]  # Begin anew, as the same object.

    # LMDB.

    def open_environment(self, path: str, *, sync: bool = True, **_named: object) -> Environment:
        """Stands in for ``lmdb.open``."""
        return Environment(self, path, sync=sync)

    def tables(self, path: str) -> Tables:
        return self._environments.setdefault(path, {})

    def has_environment(self, path: str) -> bool:
        return path in self._environments

    def commit(self, path: str, writes: Writes, sync: bool) -> None:
        """A transaction reaches the cache, and if ``sync`` the disk: as a whole or not at all.

        Raises NoRoomError when it reached nothing, and FlushError when that is not known.
        """
        self.operation()
        if self.fullness and not self._has_room():
            raise NoRoomError("no room")
        if sync and self._transaction_fails():
            self._commit_by_chance(path, writes)
            raise FlushError("input/output error")
        if sync:
            self._synced.pop(path, None)
        elif path not in self._synced:
            self._synced[path] = _copied(self.tables(path))
        _apply(writes, self.tables(path))
        self.operation()

    def _commit_by_chance(self, path: str, writes: Writes) -> None:
        """Where the page of LMDB that says what is committed is by now: in cache, on disk, nowhere.

        LMDB puts the old page back into the cache after a flush that failed, if it can.
        """
        reached = self.rng.choice(["nothing", "cache", "disk"])
        before = self._synced.get(path)
        if reached == "cache":
            self._synced[path] = _copied(self.tables(path)) if before is None else before
            _apply(writes, self.tables(path))
        elif reached == "disk" and before is None:
            self._synced[path] = _copied(self.tables(path))
            _apply(writes, self._synced[path])

    # Files.

    def inode(self, name: str) -> Inode | None:
        return self._files.get(name)

    def create(self, name: str) -> Inode:
        self._write_file()
        self._files[name] = inode = Inode()
        return inode

    def rename(self, source: str, target: str) -> None:
        self.operation()
        self._files[target] = self._files.pop(source)

    def unlink(self, name: str) -> None:
        self._files.pop(name, None)

    def write(self, inode: Inode, data: bytes) -> None:
        self._write_file()
        inode.content += data

    def sync_file(self, inode: Inode) -> None:
        self.operation()
        if self._file_fails():
            inode.never_durable = True
            raise FileError(errno.EIO, "input/output error")
        if not inode.never_durable:
            inode.durable = inode.content
        self.operation()

    def sync_directory(self) -> None:
        self.operation()
        if self._file_fails():
            raise FileError(errno.EIO, "input/output error")
        self._synced_files = dict(self._files)
        self.operation()


class Environment:
    """An LMDB environment, as far as LmdbJournal uses one."""

    def __init__(self, disk: Disk, path: str, *, sync: bool) -> None:
        self._disk = disk
        self._path = path
        self._sync = sync
        self._map_size = 1 << 26

    def open_db(self, name: bytes) -> str:
        return name.decode()

    def info(self) -> dict[str, int]:
        return {"map_size": self._map_size}

    def set_mapsize(self, size: int) -> None:
        self._map_size = size

    def close(self) -> None:
        self._path = ""

    @contextmanager
    def begin(self, *, write: bool = False) -> Iterator[Transaction]:
        if not self._path:
            raise lmdb.Error("the environment is closed")
        transaction = Transaction(self._disk.tables(self._path))
        yield transaction
        if write and transaction.writes:
            try:
                self._disk.commit(self._path, transaction.writes, self._sync)
            except FlushError:
                self._sync = (
                    False  # Whatever this process flushes from now on goes well, and is not.
                )
                raise


class Transaction:
    """Reads see what was committed before; no caller reads what it has just written."""

    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        self.writes: list[tuple[str, bytes, bytes | None]] = []

    def get(self, key: bytes, *, db: str) -> bytes | None:
        return self._tables.get(db, {}).get(key)

    def put(self, key: bytes, value: bytes, *, db: str) -> bool:
        self.writes.append((db, bytes(key), bytes(value)))
        return True

    def delete(self, key: bytes, *, db: str) -> bool:
        self.writes.append((db, bytes(key), None))
        return True

    def cursor(self, *, db: str) -> Iterator[tuple[bytes, bytes]]:
        return iter(sorted(self._tables.get(db, {}).items()))


class SimulatedPath:
    """A ``pathlib.Path`` on a Disk, as far as the journal and the snapshot store use one."""

    def __init__(self, disk: Disk, name: str) -> None:
        self.disk = disk
        self.name = name

    def __truediv__(self, name: str) -> SimulatedPath:
        return SimulatedPath(self.disk, f"{self.name}/{name}")

    def __str__(self) -> str:
        return self.name

    def with_suffix(self, suffix: str) -> SimulatedPath:
        return SimulatedPath(self.disk, self.name + suffix)

    def mkdir(self, **_named: object) -> None:
        pass

    def exists(self) -> bool:
        return self.disk.inode(self.name) is not None or self.disk.has_environment(self.name)

    def read_bytes(self) -> bytes:
        inode = self.disk.inode(self.name)
        if inode is None:
            raise FileNotFoundError(errno.ENOENT, "no such file", self.name)
        return inode.content

    def open(self, mode: str) -> SimulatedFile:
        assert mode == "wb", mode
        return SimulatedFile(self.disk, self.disk.create(self.name))

    def replace(self, target: SimulatedPath) -> None:
        self.disk.rename(self.name, target.name)

    def unlink(self, *, missing_ok: bool = False) -> None:
        assert missing_ok
        self.disk.unlink(self.name)


class SimulatedFile:
    """A file open for writing."""

    def __init__(self, disk: Disk, inode: Inode) -> None:
        self._disk = disk
        self._inode = inode
        self._descriptor = -1

    def __enter__(self) -> SimulatedFile:
        return self

    def __exit__(self, *_what: object) -> None:
        SimulatedOs.forget(self._descriptor)

    def write(self, data: bytes) -> int:
        self._disk.write(self._inode, bytes(data))
        return len(data)

    def flush(self) -> None:
        pass

    def fileno(self) -> int:
        self._descriptor = SimulatedOs.remember(lambda: self._disk.sync_file(self._inode))
        return self._descriptor


class SimulatedOs:
    """Stands in for the module ``os`` in the snapshot store."""

    O_RDONLY = O_DIRECTORY = 0
    _syncs: dict[int, Callable[[], None]] = {}  # noqa: RUF012 - as the kernel has one table.
    _numbers = itertools.count(3)

    @classmethod
    def remember(cls, sync: Callable[[], None]) -> int:
        descriptor = next(cls._numbers)
        cls._syncs[descriptor] = sync
        return descriptor

    @classmethod
    def forget(cls, descriptor: int) -> None:
        cls._syncs.pop(descriptor, None)

    @classmethod
    def open(cls, path: Any, _flags: int) -> int:
        return cls.remember(path.disk.sync_directory)

    @classmethod
    def close(cls, descriptor: int) -> None:
        cls.forget(descriptor)

    @classmethod
    def fsync(cls, descriptor: int) -> None:
        cls._syncs[descriptor]()
