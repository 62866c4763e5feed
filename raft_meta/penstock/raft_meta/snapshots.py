"""Snapshots of the state machine: one checksummed file, replaced atomically, sent in chunks."""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import crc32c
import structlog

from penstock.raft_meta.damage import damaged
from penstock.raft_meta.room import is_full
from penstock.raft_meta.voters import VoterSet
from penstock.wire.errors import DataDirectoryError

MAX_SNAPSHOT_BYTES: Final = 512 * 1024 * 1024
"""A peer that announces more is not believed."""

_HEADER: Final = struct.Struct(">4sIQQQI")  # Magic, version, index, term, length, data's CRC.
_TRAILER: Final = struct.Struct(">I")  # CRC of the header.
_MAGIC: Final = b"PSNP"
_VERSIONS: Final = range(1, 3)
_VERSION: Final = 2
"""Since version 2 the voter set stands between header and data, after its length."""
_VOTERS_LENGTH: Final = struct.Struct(">I")


_log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state machine as it was when it had applied the entry of this index and term."""

    index: int
    term: int
    data: bytes
    voters: VoterSet | None = None
    """The voter set in force at ``index``; None in a snapshot of a version that had none."""

    @property
    def crc(self) -> int:
        """CRC32C of the data, and of the voter set after it."""
        return int(crc32c.crc32c(self.encoded_voters, crc32c.crc32c(self.data)))

    @property
    def encoded_voters(self) -> bytes:
        """The voter set as it is stored; empty without one."""
        return b"" if self.voters is None else self.voters.encode()


class SnapshotStore:
    """The newest snapshot of one node. Used by one thread, but for ``write_aside``."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._path = directory / "snapshot"
        self._temporary = self._path.with_suffix(".tmp")
        self._aside = self._path.with_suffix(".aside")

    def load(self) -> Snapshot | None:
        """The newest snapshot, or None while there is none.

        Raises DataDirectoryError when the file is damaged: the journal does not go back beyond
        it, so that going on without it would lose what is committed.
        """
        try:
            raw = self._path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise DataDirectoryError(f"cannot read {self._path}: {error}") from error
        head = _HEADER.size + _TRAILER.size
        if len(raw) < head:
            raise self._damaged("it is too short")
        magic, version, index, term, length, crc = _HEADER.unpack_from(raw)
        (header_crc,) = _TRAILER.unpack_from(raw, _HEADER.size)
        if magic != _MAGIC or crc32c.crc32c(raw[: _HEADER.size]) != header_crc:
            raise self._damaged("its header fails its checksum")
        if version not in _VERSIONS:
            raise self._damaged(f"its version is {version}, and {_VERSION} is known")
        voters, data = (b"", raw[head:]) if version == 1 else self._split(raw[head:])
        if length != len(data) or crc != crc32c.crc32c(voters, crc32c.crc32c(data)):
            raise self._damaged("its content fails its checksum")
        # Whoever reads it will cut the log to it: a process that was killed between the rename and
        # the sync of the directory left a name that a loss of power could still take away.
        with _open_directory(self._directory) as descriptor:
            os.fsync(descriptor)
        try:
            return Snapshot(index, term, data, VoterSet.decode(voters) if voters else None)
        except ValueError as error:
            raise self._damaged(str(error)) from None

    def _split(self, body: bytes) -> tuple[bytes, bytes]:
        """Voter set and data of a version 2 snapshot."""
        if len(body) < _VOTERS_LENGTH.size:
            raise self._damaged("it is too short")
        (length,) = _VOTERS_LENGTH.unpack_from(body)
        end = _VOTERS_LENGTH.size + length
        return body[_VOTERS_LENGTH.size : end], body[end:]

    def save(self, snapshot: Snapshot) -> None:
        """Replace the newest snapshot. Durable when this returns; a crash leaves old or new.

        Raises OSError. Nothing of an attempt that failed is used by the next one.
        """
        self._write(snapshot, self._temporary)
        self._rename(self._temporary)

    def write_aside(self, snapshot: Snapshot) -> bool:
        """Write a snapshot that is to be put in place later; False if the disk had no room.

        On any thread, one at a time: a save meanwhile and this do not meet. Raises OSError.
        """
        try:
            self._write(snapshot, self._aside)
        except OSError as error:
            if not is_full(error):
                raise
            self._note_no_room(snapshot, error)
            return False
        return True

    def put_in_place(self, snapshot: Snapshot) -> bool:
        """Replace the newest snapshot by this one, which was written aside; False without room.

        Durable when this returns True. Raises OSError.
        """
        try:
            self._rename(self._aside)
        except OSError as error:
            if not is_full(error):
                raise
            self.drop_aside()
            self._note_no_room(snapshot, error)
            return False
        return True

    def drop_aside(self) -> None:
        """What was written aside is not wanted."""
        _remove(self._aside)

    def remove_leftovers(self) -> None:
        """Remove what was not put in place, and never will be: nobody may be writing."""
        _remove(self._aside)
        _remove(self._temporary)

    def _write(self, snapshot: Snapshot, path: Path) -> None:
        header = _HEADER.pack(
            _MAGIC, _VERSION, snapshot.index, snapshot.term, len(snapshot.data), snapshot.crc
        )
        voters = snapshot.encoded_voters
        self._directory.mkdir(parents=True, exist_ok=True)
        try:
            with path.open("wb") as file:
                file.write(header + _TRAILER.pack(crc32c.crc32c(header)))
                file.write(_VOTERS_LENGTH.pack(len(voters)) + voters)
                file.write(snapshot.data)
                file.flush()
                os.fsync(file.fileno())
        except OSError:
            _remove(path)
            raise

    def _rename(self, path: Path) -> None:
        path.replace(self._path)
        with _open_directory(self._directory) as descriptor:
            os.fsync(descriptor)

    def _note_no_room(self, snapshot: Snapshot, error: OSError) -> None:
        # The log stays as long as it is: a later snapshot makes up for it.
        _log.warning("no room for a metadata snapshot", index=snapshot.index, reason=str(error))

    def _damaged(self, what: str) -> DataDirectoryError:
        return damaged(f"the metadata snapshot {self._path} is damaged: {what}")


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):  # It would only take room.
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def _open_directory(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
