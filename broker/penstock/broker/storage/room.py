"""How much room a data directory has, and who may still use it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

import structlog

from penstock.broker.storage.disk import Disk, is_out_of_descriptors
from penstock.wire.errors import DiskFullError

_ASK_AGAIN_MS: Final = 1_000
_ASK_AGAIN_BYTES: Final = 1024 * 1024
_CALM_MS: Final = 5_000
"""After so long without a refusal appends fit again; a disk on the brink is not reported twice."""
_TELL_AGAIN_MS: Final = 600_000
_FRESH_MS: Final = 60_000
"""So long a refusal counts, whatever the file system says: it may lack other things than bytes."""
_UNKNOWN: Final = 2**63 - 1
_LOWER: Final = (
    ", or lower log.min.free.bytes (`penstock cluster alter --reset log.min.free.bytes` "
    "where the cluster shares it, else in the node's own file)"
)
_MORE_DESCRIPTORS: Final = (
    "raise the node's limit of open files (`ulimit -n`, RLIMIT_NOFILE), or see who holds so many "
    "connections open"
)
_log = structlog.get_logger()


class Room:
    """Refuses appends while they would use what must stay free. Used on one thread.

    The file system is asked once in a second or a megabyte, so that an append costs nothing more.
    One line is logged when appends begin to be refused, again every ten minutes while they are, and
    one when they fit again.
    """

    def __init__(self, path: Path, disk: Disk, clock_ms: Callable[[], int]) -> None:
        self._path = path
        self._disk = disk
        self._clock_ms = clock_ms
        self._free_bytes = 0
        self._asked_ms: int | None = None
        self._used_bytes = 0  # Since it was asked.
        self._refused_at: int | None = None  # The largest reserve that an append was refused for.
        self._refused_ms = 0
        self._told_ms = 0
        self._had_room = False  # An append that was refused before fitted since.
        self._is_ready: Callable[[], bool] | None = None  # While nothing may be appended.

    def wait_until(self, is_ready: Callable[[], bool]) -> None:
        """Nothing fits until ``is_ready`` says so: there was no room for what must come first."""
        self._is_ready = is_ready

    def _waits(self) -> bool:
        if self._is_ready is not None and self._is_ready():
            self._is_ready = None
        return self._is_ready is not None

    def fits(self, size_bytes: int, reserve_bytes: int) -> bool:
        """Whether so much can be appended and leave ``reserve_bytes`` free. 0: no limit."""
        if self._is_ready is not None and self._waits():
            return False
        return reserve_bytes <= 0 or self._left() - size_bytes >= reserve_bytes

    def ask_again(self) -> None:
        """Have the file system asked next time: much more was taken, or freed, than appends say."""
        self._asked_ms = None

    def check(self, size_bytes: int, reserve_bytes: int, doing: str) -> None:
        """Raise DiskFullError unless it fits."""
        if not self.fits(size_bytes, reserve_bytes):
            if self._is_ready is not None:
                raise self.refused("there was none to note that the broker has started", doing)
            raise self.refused(
                f"{self._left()} bytes are free and log.min.free.bytes keeps {reserve_bytes}",
                doing,
                reserve_bytes,
            )

    def _left(self) -> int:
        now_ms = self._clock_ms()
        if (
            self._asked_ms is None
            or now_ms - self._asked_ms >= _ASK_AGAIN_MS
            or self._used_bytes >= _ASK_AGAIN_BYTES
        ):
            try:
                self._free_bytes = self._disk.free_bytes(self._path)
            except OSError:
                self._free_bytes = _UNKNOWN  # The write itself will tell.
            self._asked_ms = now_ms
            self._used_bytes = 0
        return max(self._free_bytes - self._used_bytes, 0)

    def refused_by(self, error: Exception, doing: str) -> DiskFullError:
        """The system found no room, or no descriptor, and all is as it was; the error to raise."""
        refused = self.refused(str(error), doing)
        if is_out_of_descriptors(error):
            return DiskFullError(
                f"no file can be opened in data directory {self._path} while {doing}: {error}; "
                f"nothing was changed; next: {_MORE_DESCRIPTORS}; no restart is needed then"
            )
        return refused

    def refused(self, reason: str, doing: str, reserve_bytes: int = 0) -> DiskFullError:
        """There was no room; the error for the caller to raise."""
        now_ms = self._clock_ms()
        anew = self._had_room and now_ms - self._refused_ms >= _CALM_MS
        if self._refused_at is None or anew or now_ms - self._told_ms >= _TELL_AGAIN_MS:
            _log.error("data_directory_full", directory=str(self._path), reason=reason, doing=doing)
            self._told_ms = now_ms
        self._refused_at = max(self._refused_at or 0, reserve_bytes)
        self._refused_ms = now_ms
        self._had_room = False
        return self.error(reason, doing, _LOWER if reserve_bytes else "")

    def error(self, reason: str, doing: str, otherwise: str = "") -> DiskFullError:
        """What ``refused`` returns, of what is known already.

        ``otherwise`` is what may be done instead of freeing space.
        """
        return DiskFullError(
            f"no room in data directory {self._path} while {doing}: {reason}; nothing was "
            f"changed; next: free space on that disk{otherwise}; no restart is needed then"
        )

    def used(self, size_bytes: int, reserve_bytes: int) -> None:
        """An append that left ``reserve_bytes`` free went well."""
        self._used_bytes += size_bytes
        if self._refused_at is None or reserve_bytes < self._refused_at:
            return
        self._had_room = True
        if self._clock_ms() - self._refused_ms >= _CALM_MS:
            self._refused_at = None
            _log.info("data_directory_has_room", directory=str(self._path))

    def reserve_changed(self, reserve_bytes: int) -> None:
        """Nobody has to leave more than this any more."""
        if self._refused_at is not None:
            self._refused_at = min(self._refused_at, reserve_bytes)

    def free_bytes(self) -> int:
        """What the file system has free, asked now. Raises OSError. In any thread."""
        return self._disk.free_bytes(self._path)

    def total_bytes(self) -> int:
        """What the file system holds, in use or free, asked now. Raises OSError. In any thread."""
        return self._disk.total_bytes(self._path)

    def is_full(self) -> bool:
        """Whether appends were refused and would be now, as far as is known. In any thread.

        Where nobody appends any more the file system is asked. Raises OSError.
        """
        refused_at = self._refused_at
        if refused_at is None or self._clock_ms() - self._refused_ms < _FRESH_MS:
            return refused_at is not None
        return self.free_bytes() < refused_at + _ASK_AGAIN_BYTES
