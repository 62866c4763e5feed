"""What the storage tests share: logs in a temporary directory, disks that fail or lose power."""

from __future__ import annotations

import errno
import os
import random
import shutil
from collections.abc import Sequence
from pathlib import Path

from penstock.broker.storage.data_directory import DataDirectory
from penstock.broker.storage.disk import Buffer, Disk
from penstock.broker.storage.log import PartitionLog
from penstock.broker.storage.recovery import SavedState, open_log
from penstock.broker.storage.settings import LogSettings, TopicLogConfig
from penstock.wire.ids import TopicId, TopicIdPartition, TopicPartition
from penstock.wire.markers import MarkerType, encode_marker
from penstock.wire.records import Record, RecordData, decode_batch, encode_batch, iter_batches

TOPIC_ID = TopicId(b"0123456789abcdef")
PARTITION = TopicPartition("orders", 3)
KEY = TopicIdPartition(TOPIC_ID, 3)
EVERYTHING = 2**63 - 1


def small_config(**changes: int | bool | float) -> TopicLogConfig:
    """Small segments with a dense index, so that short tests see many of both."""
    values: dict[str, int | bool | float] = {
        "max_message_bytes": 2000,
        "segment_bytes": 900,
        "segment_ms": 2**62,
        "index_interval_bytes": 150,
        "log_append_time": False,
        "deletes": True,
        "retention_ms": -1,
        "retention_bytes": -1,
        "compacts": False,
        "min_cleanable_dirty_ratio": 0.5,
        "min_compaction_lag_ms": 0,
        "max_compaction_lag_ms": 2**62,
        "delete_retention_ms": 1000,
    }
    return TopicLogConfig(**(values | changes))  # type: ignore[arg-type]


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now_ms = 1_000_000

    def __call__(self) -> int:
        return self.now_ms


def open_in(
    root: Path,
    *,
    config: TopicLogConfig | None = None,
    saved: SavedState | None = None,
    disk: Disk | None = None,
    settings: LogSettings | None = None,
    clock: Clock | None = None,
) -> PartitionLog:
    """The log of PARTITION below ``root``."""
    directory = root / str(PARTITION)
    directory.mkdir(exist_ok=True)
    home = DataDirectory(root, settings or LogSettings(), clock or Clock(), disk=disk)
    return open_log(
        home,
        directory,
        partition=PARTITION,
        key=KEY,
        config=config or small_config(),
        saved=saved or SavedState(),
    )


def open_descriptors() -> int:
    """How many descriptors this process has."""
    return len(list(Path("/proc/self/fd").iterdir()))


def batch(
    *values: str,
    timestamp_ms: int = 1000,
    producer: tuple[int, int, int] = (-1, -1, -1),
    base_offset: int = 0,
    leader_epoch: int = -1,
) -> bytes:
    """A batch with a record for each value, a millisecond apart."""
    records = [
        RecordData(timestamp_ms + index, b"k", value.encode(), (("h", b"x"),))
        for index, value in enumerate(values or ("value",))
    ]
    producer_id, producer_epoch, base_sequence = producer
    return encode_batch(
        records,
        base_offset=base_offset,
        leader_epoch=leader_epoch,
        producer_id=producer_id,
        producer_epoch=producer_epoch,
        base_sequence=base_sequence,
    )


def read_all(log: PartitionLog, offset: int | None = None, max_bytes: int = 1 << 20) -> bytes:
    """Everything in the log from ``offset`` on, by as many reads as it takes."""
    at = log.log_start_offset if offset is None else offset
    parts = []
    while at < log.log_end_offset:
        data = log.read(at, max_bytes, below=EVERYTHING)
        assert data, f"nothing at {at} of {log}"
        parts.append(data)
        *_, (last, _) = iter_batches(data)
        at = last.next_offset
    return b"".join(parts)


def records_of(data: bytes) -> list[Record]:
    return [record for _, view in iter_batches(data) for record in decode_batch(view)]


def values_of(log: PartitionLog) -> list[str]:
    return [(record.value or b"").decode() for record in records_of(read_all(log))]


class FullDisk(Disk):
    """Takes ``room`` more bytes in all; what does not fit is written in part, then refused."""

    def __init__(self, room: int = 1 << 60) -> None:
        self.room = room

    def write_at(self, fd: int, buffers: Sequence[Buffer], position: int) -> int:
        if self.room <= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        data = b"".join(bytes(buffer) for buffer in buffers)[: self.room]
        self.room -= len(data)
        return os.pwrite(fd, data, position)


class BrokenDisk(Disk):
    """Fails with EIO, or another error, in the calls named: "name" is for all that change names."""

    def __init__(self, number: int = errno.EIO) -> None:
        self.number = number
        self.failing: set[str] = set()

    def _check(self, call: str) -> None:
        if call in self.failing:
            raise OSError(self.number, os.strerror(self.number))

    def rename(self, source: Path, target: Path) -> None:
        self._check("name")
        super().rename(source, target)

    def link(self, source: Path, target: Path) -> None:
        self._check("name")
        super().link(source, target)

    def remove(self, path: Path) -> None:
        self._check("name")
        super().remove(path)

    def make_directory(self, path: Path) -> None:
        self._check("name")
        super().make_directory(path)

    def sync_directory(self, path: Path) -> None:
        self._check("name")
        super().sync_directory(path)

    def commit(self, environment: Path) -> None:
        self._check("commit")

    def write_at(self, fd: int, buffers: Sequence[Buffer], position: int) -> int:
        self._check("write")
        return super().write_at(fd, buffers, position)

    def read_at(self, fd: int, size: int, position: int) -> bytes:
        self._check("read")
        return super().read_at(fd, size, position)

    def sync_data(self, fd: int) -> None:
        self._check("sync")
        super().sync_data(fd)

    def truncate(self, fd: int, size: int) -> None:
        self._check("truncate")
        super().truncate(fd, size)


def path_of(fd: int) -> Path:
    return Path(f"/proc/self/fd/{fd}").readlink()


class NoRoom(Disk):
    """Has no room for the calls named, and says that so many bytes are free."""

    def __init__(self, number: int = errno.ENOSPC) -> None:
        self.number = number
        self.full: set[str] = set()
        self.only = ""  # The calls on files whose names end so; all by default.
        self.free = 1 << 40
        self.asked = 0

    def _check(self, call: str, name: str = "") -> None:
        if call in self.full and name.endswith(self.only):
            raise OSError(self.number, os.strerror(self.number))

    def _check_fd(self, call: str, fd: int) -> None:
        self._check(call, path_of(fd).name)

    def open(self, path: Path, flags: int) -> int:
        if flags & os.O_CREAT:
            self._check("create", path.name)
        return super().open(path, flags)

    def write_at(self, fd: int, buffers: Sequence[Buffer], position: int) -> int:
        self._check_fd("write", fd)
        return super().write_at(fd, buffers, position)

    def sync_data(self, fd: int) -> None:
        self._check_fd("sync", fd)
        super().sync_data(fd)

    def allocate(self, fd: int, size: int) -> None:
        self._check_fd("allocate", fd)
        super().allocate(fd, size)

    def free_bytes(self, path: Path) -> int:
        self.asked += 1
        return self.free


class ForgetfulDisk(NoRoom):
    """As kernels are: a flush that failed drops what it could not write, and the next one, which
    has nothing to do, goes well. ``on_disk`` is what a power cut would leave of each log file; a
    new process finds what is in memory, and not which of it was dropped.
    """

    def __init__(self, number: int = errno.ENOSPC) -> None:
        super().__init__(number)
        self._dirty: dict[str, list[tuple[int, bytes]]] = {}
        self.on_disk: dict[str, bytearray] = {}

    def write_at(self, fd: int, buffers: Sequence[Buffer], position: int) -> int:
        written = super().write_at(fd, buffers, position)
        path = path_of(fd)
        if path.suffix == ".log":
            dirty = self._dirty.setdefault(path.name, [])
            dirty.append((position, os.pread(fd, written, position)))
        return written

    def truncate(self, fd: int, size: int) -> None:
        super().truncate(fd, size)
        name = path_of(fd).name
        dirty = self._dirty.get(name, [])
        self._dirty[name] = [(at, data[: max(0, size - at)]) for at, data in dirty]
        del self.on_disk.setdefault(name, bytearray())[size:]

    def sync_data(self, fd: int) -> None:
        path = path_of(fd)
        if path.suffix != ".log":
            super().sync_data(fd)
            return
        name = path.name
        dirty = self._dirty.pop(name, [])
        super().sync_data(fd)
        on_disk = self.on_disk.setdefault(name, bytearray())
        for position, data in dirty:
            on_disk[position : position + len(data)] = data


class _File:
    """What a power cut leaves of a file's content."""

    def __init__(self) -> None:
        self.durable = b""


class PowerCutError(BaseException):  # Nobody may handle it, as nobody can.
    """The power went in the middle of an operation."""


class _Names:
    """What a directory calls its files, and its directories, by the inodes of these."""

    def __init__(self) -> None:
        self.files: dict[str, _File] = {}
        self.directories: dict[int, str] = {}


class PowerCutDisk(Disk):
    """Knows what is on the disk for certain, so that ``cut_power`` can lose everything else.

    Content that was not synced may be there, in part, in any pages; names made, renamed or removed
    since the directory was synced may each be as before or as after. ``cut_after`` so many calls
    that change something raises PowerCutError instead of the next one.

    What LMDB has committed is there, and its commits are among the calls that are counted.
    """

    PAGE = 64

    def __init__(self) -> None:
        self._files: dict[int, _File] = {}  # By inode, of the names that are there now.
        self._names: dict[int, _Names] = {}  # Of each directory, by inode, when it was synced.
        self.cut_after: int | None = None

    def _count(self) -> None:
        if self.cut_after is not None:
            if self.cut_after <= 0:
                raise PowerCutError
            self.cut_after -= 1

    def open(self, path: Path, flags: int) -> int:
        fd = super().open(path, flags)
        inode = os.fstat(fd).st_ino
        if flags & (os.O_EXCL | os.O_TRUNC) or inode not in self._files:
            self._files[inode] = _File()
        return fd

    def write_at(self, fd: int, buffers: Sequence[Buffer], position: int) -> int:
        self._count()
        return super().write_at(fd, buffers, position)

    def truncate(self, fd: int, size: int) -> None:
        self._count()
        super().truncate(fd, size)

    def rename(self, source: Path, target: Path) -> None:
        self._count()
        super().rename(source, target)

    def link(self, source: Path, target: Path) -> None:
        self._count()
        super().link(source, target)

    def remove(self, path: Path) -> None:
        self._count()
        super().remove(path)

    def make_directory(self, path: Path) -> None:
        self._count()
        super().make_directory(path)
        self._names[path.stat().st_ino] = _Names()

    def remove_directory(self, path: Path) -> None:
        self._count()
        super().remove_directory(path)

    def commit(self, environment: Path) -> None:
        self._count()

    def sync_data(self, fd: int) -> None:
        self._count()
        # By another descriptor: this one may be for writing only.
        self._files[os.fstat(fd).st_ino].durable = Path(f"/proc/self/fd/{fd}").read_bytes()

    def sync_directory(self, path: Path) -> None:
        self._count()
        if not path.name.startswith("."):  # What LMDB has committed is there, and so are its files.
            self._names[path.stat().st_ino] = self._now(path)

    def _now(self, path: Path) -> _Names:
        names = _Names()
        for entry in path.iterdir():
            if entry.is_file():
                names.files[entry.name] = self._files[entry.stat().st_ino]
            elif not entry.name.startswith("."):
                names.directories[entry.stat().st_ino] = entry.name
        return names

    def settle(self, root: Path) -> None:
        """What is found when the power is back is on the disk."""
        for path in root.iterdir():
            if path.is_file():
                fd = self.open(path, 0)
                self.sync_data(fd)
                os.close(fd)
            elif not path.name.startswith("."):
                self.settle(path)
        self.sync_directory(root)

    def cut_power(self, source: Path, target: Path, chance: random.Random) -> None:
        """Make in ``target`` one of the states that the disk may have once the power is back."""
        target.mkdir()
        before, now = self._names.get(source.stat().st_ino, _Names()), self._now(source)
        for name in sorted(before.files.keys() | now.files.keys()):
            choice = chance.choice([before, now]).files.get(name)
            if choice is None:
                continue
            is_there = now.files.get(name) is choice
            current = (source / name).read_bytes() if is_there else choice.durable
            (target / name).write_bytes(self._content(choice.durable, current, chance))
        for inode, name in now.directories.items():  # What was removed meanwhile stays so.
            kept_as = chance.choice([before, now]).directories.get(inode)
            if kept_as is not None:
                self.cut_power(source / name, target / kept_as, chance)
        if (source / ".state").exists():
            shutil.copytree(source / ".state", target / ".state")

    def _content(self, durable: bytes, current: bytes, chance: random.Random) -> bytes:
        kind = chance.randrange(4)
        if kind == 0:
            return durable
        if kind == 1:
            return current
        size = chance.randint(min(len(durable), len(current)), max(len(durable), len(current)))
        if kind == 2 and current.startswith(durable):
            return current[:size]
        pages = []
        for at in range(0, size, self.PAGE):
            page = chance.choice([durable, current])[at : at + self.PAGE]
            pages.append(page.ljust(min(self.PAGE, size - at), b"\0")[: size - at])
        return b"".join(pages)


def lose_power(root: Path, disk: PowerCutDisk, chance: random.Random) -> PowerCutDisk:
    """The machine of the log in ``root`` dies; what ``disk`` had synced is there, the rest maybe.

    What is returned takes what was found as synced.
    """
    directory, crashed = root / str(PARTITION), root / "crashed"
    disk.cut_power(directory, crashed, chance)
    shutil.rmtree(directory)
    crashed.rename(directory)
    mended = PowerCutDisk()
    mended.settle(directory)
    return mended


def transactional(
    *values: str, producer: tuple[int, int, int], base_offset: int = 0, leader_epoch: int = 1
) -> bytes:
    """A batch of a transaction, as a leader has put it into its log."""
    producer_id, producer_epoch, base_sequence = producer
    return encode_batch(
        [RecordData(1000, b"k", value.encode()) for value in values or ("value",)],
        base_offset=base_offset,
        leader_epoch=leader_epoch,
        producer_id=producer_id,
        producer_epoch=producer_epoch,
        base_sequence=base_sequence,
        is_transactional=True,
    )


def mark(
    kind: MarkerType, producer_id: int, *, base_offset: int = 0, leader_epoch: int = 1
) -> bytes:
    """The end of a transaction, as a leader has put it into its log."""
    return encode_marker(
        kind,
        producer_id=producer_id,
        producer_epoch=0,
        coordinator_epoch=0,
        timestamp_ms=1000,
        base_offset=base_offset,
        leader_epoch=leader_epoch,
    )
