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

from penstock.raft_meta.damage import damaged
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
    """The newest snapshot of one node. Used by one thread."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._path = directory / "snapshot"

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
        header = _HEADER.pack(
            _MAGIC, _VERSION, snapshot.index, snapshot.term, len(snapshot.data), snapshot.crc
        )
        voters = snapshot.encoded_voters
        self._directory.mkdir(parents=True, exist_ok=True)
        temporary = self._path.with_suffix(".tmp")
        try:
            with temporary.open("wb") as file:
                file.write(header + _TRAILER.pack(crc32c.crc32c(header)))
                file.write(_VOTERS_LENGTH.pack(len(voters)) + voters)
                file.write(snapshot.data)
                file.flush()
                os.fsync(file.fileno())
        except OSError:
            with contextlib.suppress(OSError):  # It would only take room.
                temporary.unlink(missing_ok=True)
            raise
        temporary.replace(self._path)
        with _open_directory(self._directory) as descriptor:
            os.fsync(descriptor)

    def _damaged(self, what: str) -> DataDirectoryError:
        return damaged(f"the metadata snapshot {self._path} is damaged: {what}")


@contextlib.contextmanager
def _open_directory(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
