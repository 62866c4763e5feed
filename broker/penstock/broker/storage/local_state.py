"""Small state of a data directory that changes often and must be atomic, in one LMDB environment.

Per partition: high watermark, log start offset, recovery point, up to where it was cleaned. Per
directory: an id, the mark of a clean stop, and the mark of a run that acknowledges only what is on
the disk (penstock.broker.core.last_run). Lives in ``.state`` beside the partitions. LMDB has no
checksums, so its pages are looked at before it is let at them (penstock.raft_meta.lmdb_pages), and
what is kept of a partition has a checksum of ours. A clean stop marks those that stayed
shut; an earlier version takes that for damage, and keeps them shut.
"""

from __future__ import annotations

import contextlib
import struct
import threading
import uuid
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

import lmdb
from crc32c import crc32c

from penstock.broker.core.last_run import RunMark
from penstock.broker.storage.disk import Disk
from penstock.raft_meta.lmdb_pages import DamagedPagesError, check_pages
from penstock.wire.errors import StorageError
from penstock.wire.ids import TopicId, TopicIdPartition

DIRECTORY_NAME: Final = ".state"
_KEY: Final = struct.Struct(">16sI")
_VALUE: Final = struct.Struct(">qqqq")
_VALUE_BEFORE: Final = struct.Struct(">qqq")  # Without the last; as long as nothing was cleaned.
_CHECKSUM: Final = struct.Struct(">I")  # Of key and value, after the value.
_SHUT: Final = b"shut"  # After the checksum: a clean stop says nothing of this one.
_EPOCH: Final = struct.Struct(">q")
_SHUT_BYTES: Final = _VALUE.size + _CHECKSUM.size + len(_SHUT)
_CLEAN_KEY: Final = b"clean-shutdown"  # Shorter than any partition's key, as the next.
_DURABLE_KEY: Final = b"durable-run"
_ID_KEY: Final = b"directory-id"
_ID_BYTES: Final = 16
_DAMAGE: Final = (
    DamagedPagesError,
    lmdb.InvalidError,
    lmdb.CorruptedError,
    lmdb.PageNotFoundError,
    lmdb.VersionMismatchError,
    lmdb.PanicError,
)


class LocalStateDamagedError(Exception):
    """The environment is not what was written. Nothing in it is to be believed, nor changed."""


class PartitionState(NamedTuple):
    """What is saved of one partition."""

    high_watermark: int = 0
    log_start_offset: int = 0
    recovery_point: int = 0
    cleaned_offset: int = 0

    def encode(self, key: bytes) -> bytes:
        """What is saved under ``key``."""
        value = _VALUE.pack(*self)
        return value + _CHECKSUM.pack(crc32c(key + value))

    @classmethod
    def decode(cls, key: bytes, data: bytes) -> PartitionState | None:
        """What was saved; by earlier versions without a checksum. None when it is damaged."""
        if len(data) == _VALUE_BEFORE.size:
            return cls(*_VALUE_BEFORE.unpack(data))
        value = data[: _VALUE.size]
        if len(value) < _VALUE.size:
            return None
        if len(data) > _VALUE.size and data[_VALUE.size :] != _CHECKSUM.pack(crc32c(key + value)):
            return None
        state = cls(*_VALUE.unpack(value))
        return state if min(state) >= 0 else None


def _encode_run(run: RunMark) -> bytes:
    return _EPOCH.pack(run.broker_epoch) + b"".join(sorted(run.directories))


def _decode_run(mark: bytes | None) -> RunMark | None:
    if mark is None or len(mark) < _EPOCH.size:
        return None
    [broker_epoch] = _EPOCH.unpack_from(mark)
    starts = range(_EPOCH.size, len(mark), _ID_BYTES)
    return RunMark(broker_epoch, frozenset(mark[at : at + _ID_BYTES] for at in starts))


class LocalState:
    """The environment of one data directory. Safe from any thread.

    Values are put in memory and written by ``write``; each write is one durable transaction.
    Methods that write raise OSError or lmdb.Error. Where there was no room (``is_disk_full``), the
    disk is as it was, and what was to be written is written with the next ``write``; after any
    other failure the directory is not to be trusted. Making one raises LocalStateDamagedError, too.
    """

    def __init__(self, data_directory: Path, max_bytes: int, disk: Disk | None = None) -> None:
        self._disk = disk or Disk()
        path = self._path = data_directory / DIRECTORY_NAME
        if not path.exists():
            self._disk.make_directory(path)
        self._environment = self._open(max_bytes)
        # Held while writing too: a lowered recovery point must not be overtaken by an older,
        # higher one on its way to the disk.
        self._lock = threading.Lock()
        self._values: dict[TopicIdPartition, PartitionState] = {}
        self._changed: set[TopicIdPartition] = set()
        self._damaged: set[TopicIdPartition] = set()  # Not what was written, and so nothing.
        self.left_shut: set[TopicIdPartition] = set()  # By the clean stop before.
        self.clean_stop: RunMark | None = None  # These two as they were found.
        self.durable_run: RunMark | None = None
        self.directory_id = uuid.uuid4().bytes  # Unless it has one.
        self._must_begin = True
        self.is_blank = False  # Nothing was in it when it was opened.
        try:
            self._load()
        except _DAMAGE as error:
            self._environment.close()
            raise self._refused(error) from error
        if not self._has_id:
            self._sync_names()

    def _open(self, max_bytes: int) -> lmdb.Environment:
        try:
            check_pages(self._path)
            return lmdb.open(
                str(self._path), map_size=max_bytes, max_dbs=0, max_readers=8, meminit=False
            )
        except _DAMAGE as error:
            raise self._refused(error) from error

    def _refused(self, error: Exception) -> LocalStateDamagedError:
        return LocalStateDamagedError(f"the local state in {self._path} is damaged ({error})")

    def _load(self) -> None:
        with self._environment.begin() as transaction:
            self.is_blank = transaction.stat()["entries"] == 0
            self.clean_stop = _decode_run(transaction.get(_CLEAN_KEY))
            self.durable_run = _decode_run(transaction.get(_DURABLE_KEY))
            self._has_id = transaction.get(_ID_KEY) is not None
            self._must_begin = self.clean_stop is not None or not self._has_id
            self.directory_id = transaction.get(_ID_KEY, self.directory_id)
            for key, data in transaction.cursor():
                if len(key) == _KEY.size:
                    topic_id, partition = _KEY.unpack(key)
                    partition_key = TopicIdPartition(TopicId(topic_id), partition)
                    is_shut = len(data) == _SHUT_BYTES and data.endswith(_SHUT)
                    state = PartitionState.decode(key, data[: -len(_SHUT)] if is_shut else data)
                    if state is None:
                        self._damaged.add(partition_key)
                    else:
                        self._values[partition_key] = state
                        if is_shut and self.clean_stop is not None:
                            self.left_shut.add(partition_key)
                        if state.encode(key) != data:  # It has no checksum yet, or was shut.
                            self._changed.add(partition_key)

    def _sync_names(self) -> None:
        """Before the first commit: LMDB syncs what is in its files, and not that they are there."""
        try:
            self._disk.sync_directory(self._path)
            self._disk.sync_directory(self._path.parent)
        except OSError:
            self._environment.close()
            raise

    def begin_run(self) -> None:
        """Take the mark of the clean stop away: from here on a crash is a crash.

        Where there was no room for that ``has_begun`` is False until any later write had some. What
        a clean stop left must stay as it is so long, or the next start would be deceived.
        """
        with self._lock:
            self._write()

    @property
    def has_begun(self) -> bool:
        """Whether no mark of a clean stop before is on the disk any more."""
        return not self._must_begin

    @contextlib.contextmanager
    def _writing(self) -> Iterator[lmdb.Transaction]:
        """A transaction, committed durably at the end. It begins the run where that is left."""
        with self._environment.begin(write=True) as transaction:
            if self._must_begin:
                transaction.delete(_CLEAN_KEY)
                transaction.put(_ID_KEY, self.directory_id)
            yield transaction
            self._disk.commit(self._path)
        self._must_begin = False

    def mark_durable_run(self, run: RunMark | None) -> None:
        """Note durably that this run acknowledges only what is on the disk, or that none does."""
        with self._lock, self._writing() as transaction:
            if run is None:
                transaction.delete(_DURABLE_KEY)
            else:
                transaction.put(_DURABLE_KEY, _encode_run(run))

    def known(self) -> set[TopicIdPartition]:
        """The partitions that something is known of."""
        return {*self._values, *self._damaged}

    def knows(self, key: TopicIdPartition) -> bool:
        """Whether something is known of a partition, or was until it is written next."""
        return any(key in some for some in (self._values, self._damaged, self._changed))

    def get(self, key: TopicIdPartition) -> PartitionState:
        """A partition's state; all zero when there is none. Raises StorageError for damage.

        It is not taken for none: up to where the log was on the disk, nobody would know then, and
        damage there would be cut off as what a crash tore.
        """
        if key in self._damaged:
            raise StorageError(
                f"what {self._path} has of partition {key} (where its log begins, and up to where "
                "it was on the disk) fails its checksum"
            )
        return self._values.get(key, PartitionState())

    def put(self, key: TopicIdPartition, state: PartitionState) -> None:
        """Change a partition's state, to be written with the next ``write``."""
        with self._lock:
            if self._values.get(key) != state:
                self._values[key] = state
                self._changed.add(key)

    def remove(self, keys: Iterable[TopicIdPartition]) -> None:
        """Forget partitions, to be written with the next ``write``."""
        with self._lock:
            for key in keys:
                if self._pop(key):
                    self._changed.add(key)

    def _pop(self, key: TopicIdPartition) -> bool:
        was_damaged = key in self._damaged
        self._damaged.discard(key)
        return self._values.pop(key, None) is not None or was_damaged

    def keep_only(self, keys: Collection[TopicIdPartition]) -> None:
        """Forget every partition but these, as ``remove`` does."""
        self.remove(self.known().difference(keys))

    def forget(self, key: TopicIdPartition) -> None:
        """Forget a partition durably: what is made under its name anew has nothing of it."""
        with self._lock:
            if self._pop(key) or key in self._changed:
                self._changed.add(key)
                self._write()

    def write(self) -> None:
        """Make everything that changed durable."""
        with self._lock:
            self._write()

    def note_cut(self, key: TopicIdPartition, offset: int) -> None:
        """Make it durable before returning that the log is cut at ``offset``.

        Neither recovery point nor high watermark may be kept above: what is appended there after
        the cut is other records, which a crash would then take for flushed, and for committed.
        """
        with self._lock:
            state = self._values.get(key)
            if state is None:
                self._begin_first()
                return
            cut = state._replace(
                recovery_point=min(state.recovery_point, offset),
                high_watermark=min(state.high_watermark, offset),
            )
            if cut == state and key not in self._changed:
                self._begin_first()
                return
            self._values[key] = cut
            self._changed.add(key)
            self._write()

    def _begin_first(self) -> None:
        """A log is about to change: not as long as the disk calls it as a clean stop left it."""
        if self._must_begin:
            self._write()

    def _write(
        self, *, clean_stop: RunMark | None = None, shut: Collection[TopicIdPartition] = ()
    ) -> None:
        if not (self._changed or self._must_begin) and clean_stop is None:
            return
        with self._writing() as transaction:
            for key in self._changed:
                state, packed = self._values.get(key), _KEY.pack(*key)
                if state is None:
                    transaction.delete(packed)
                else:
                    transaction.put(packed, state.encode(packed))
            if clean_stop is not None:
                for key in shut:
                    # One that nothing is known of is never opened as it is, nor a damaged one.
                    if key in self._values:
                        packed = _KEY.pack(*key)
                        transaction.put(packed, self._values[key].encode(packed) + _SHUT)
                transaction.put(_CLEAN_KEY, _encode_run(clean_stop))
        self._changed.clear()

    def close(self, clean_stop: RunMark | None, shut: Collection[TopicIdPartition] = ()) -> None:
        """Write what changed, with the mark of a clean stop if it was one, and close.

        That mark does not count for the partitions in ``shut``, which nobody has looked at to their
        end. The environment is closed whatever happens.
        """
        try:
            with self._lock:
                self._write(clean_stop=clean_stop, shut=shut)
        finally:
            self._environment.close()
