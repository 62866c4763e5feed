"""A node's disk in memory: LMDB environments and files that lose what was not synced.

The production journal and snapshot store run on it unchanged. Every operation that could reach the
disk passes ``Disk.operation``, so that a process can be made to die before, within or after any of
them. A process that is killed leaves what it wrote in the page cache; a power loss takes from the
cache whatever was not synced, and may leave a part of it.
"""

from __future__ import annotations

import errno
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random
from typing import Any

import lmdb

Tables = dict[str, dict[bytes, bytes]]


class Crash(BaseException):
    """The process dies here. Nothing may catch it."""


class Inode:
    """A file's content in the page cache, and as far as it was synced."""

    def __init__(self) -> None:
        self.content = b""
        self.durable: bytes | None = None


class Disk:
    """What one node's processes leave to each other."""

    def __init__(self, rng: Random) -> None:
        self.rng = rng
        self.fuse: int | None = None  # So many operations, and the process dies.
        self.operations = 0
        self._environments: dict[str, Tables] = {}
        self._synced: dict[str, Tables] = {}  # Only of environments that differ from the cache.
        self._files: dict[str, Inode] = {}
        self._synced_files: dict[str, Inode] = {}

    def operation(self) -> None:
        """Something that could reach the disk is about to happen. Raises Crash if it is time."""
        self.operations += 1
        if self.fuse is not None:
            self.fuse -= 1
            if self.fuse < 0:
                self.fuse = None
                raise Crash

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
        self.__init__(self.rng)  # type: ignore[misc]  # Begin anew, as the same object.

    # LMDB.

    def open_environment(self, path: str, *, sync: bool = True, **_named: object) -> Environment:
        """Stands in for ``lmdb.open``."""
        return Environment(self, path, sync=sync)

    def tables(self, path: str) -> Tables:
        return self._environments.setdefault(path, {})

    def commit(self, path: str, writes: list[tuple[str, bytes, bytes | None]], sync: bool) -> None:
        """A transaction reaches the cache, and if ``sync`` the disk: as a whole or not at all."""
        self.operation()
        tables = self.tables(path)
        if sync:
            self._synced.pop(path, None)
        elif path not in self._synced:
            self._synced[path] = {name: dict(rows) for name, rows in tables.items()}
        for name, key, value in writes:
            rows = tables.setdefault(name, {})
            if value is None:
                rows.pop(key, None)
            else:
                rows[key] = value
        self.operation()

    # Files.

    def inode(self, name: str) -> Inode | None:
        return self._files.get(name)

    def create(self, name: str) -> Inode:
        self.operation()
        self._files[name] = inode = Inode()
        return inode

    def rename(self, source: str, target: str) -> None:
        self.operation()
        self._files[target] = self._files.pop(source)

    def unlink(self, name: str) -> None:
        self._files.pop(name, None)

    def sync_file(self, inode: Inode) -> None:
        self.operation()
        inode.durable = inode.content
        self.operation()

    def sync_directory(self) -> None:
        self.operation()
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
            self._disk.commit(self._path, transaction.writes, self._sync)


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
        return self.disk.inode(self.name) is not None

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
        self._disk.operation()
        self._inode.content += bytes(data)
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
