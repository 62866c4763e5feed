"""Puts a cleaned segment in the place of old ones, so that a crash leaves either, never half.

The new segment covers the offsets of the old ones exactly, from BASE to END. Step by step:

===========================================  ======================  ===========================
step                                         where                   what a crash after it leaves
===========================================  ======================  ===========================
1 write ``BASE-END.*.cleaned``, sync them    a cleaner's thread      the old: ``.cleaned`` goes
2 rename ``.log.cleaned`` to ``.log.swap``,  a cleaner's thread      the new, by ``finish_swaps``,
  sync the directory                                                 as from here on
3 link the swap file as ``BASE.log``, its    the event loop          the new
  indexes as ``BASE.index`` and so on;
  rename the other old files to ``.deleted``
4 sync the directory, then remove the swap   a cleaner's thread      the new
  file, those, and the producer snapshots
  between BASE and END
===========================================  ======================  ===========================

Only while ``BASE.log`` is there does a swap file count: without it, the segments were deleted or
the log was dropped after the swap.

No swap file is left behind by a process that goes on. A cut before step 3 discards it; one between
steps 3 and 4 does step 4 first, and when step 4 fails, for whatever reason, so does the directory.
"""

from __future__ import annotations

import contextlib
import errno
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Final, NamedTuple

from penstock.broker.storage.checkpoints import TEMPORARY_SUFFIX
from penstock.broker.storage.disk import Disk
from penstock.broker.storage.placing import file_name

CLEANED_SUFFIX: Final = ".cleaned"
_SWAP_NAME: Final = re.compile(r"(\d{20})-(\d{20})\.log\.swap")
_LOG_NAME: Final = re.compile(r"(\d{20})\.log")
_INDEX_SUFFIXES: Final = ("index", "timeindex", "txnindex")
_NO_LINKS: Final = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK})


class SwapFiles(NamedTuple):
    """The names that a cleaned segment has until it is in its place."""

    directory: Path
    base_offset: int
    end_offset: int

    def _name(self, rest: str) -> Path:
        return self.directory / f"{self.base_offset:020d}-{self.end_offset:020d}.{rest}"

    @property
    def cleaned_log(self) -> Path:
        """The batches, as long as they count for nothing."""
        return self._name(f"log{CLEANED_SUFFIX}")

    @property
    def cleaned_index(self) -> Path:
        """Its offset index."""
        return self._name(f"index{CLEANED_SUFFIX}")

    @property
    def cleaned_time_index(self) -> Path:
        """Its time index."""
        return self._name(f"timeindex{CLEANED_SUFFIX}")

    @property
    def cleaned_transaction_index(self) -> Path:
        """The index of its aborted transactions; not there when it is to be made anew."""
        return self._name(f"txnindex{CLEANED_SUFFIX}")

    @property
    def swap(self) -> Path:
        """The batches, once they count in place of the old ones."""
        return self._name("log.swap")

    def final(self, suffix: str) -> Path:
        """What a file of the segment is called in the end."""
        return self.directory / file_name(self.base_offset, suffix)

    def discard(self, disk: Disk) -> None:
        """Let it have been for nothing. Raises OSError.

        The first name goes first: then a thread that is about to do step 2 can't do it any more.
        """
        for path in (
            self.cleaned_log,
            self.swap,
            self.cleaned_index,
            self.cleaned_time_index,
            self.cleaned_transaction_index,
        ):
            with contextlib.suppress(FileNotFoundError):
                disk.remove(path)


def commit(disk: Disk, files: SwapFiles) -> None:
    """Step 2. Raises OSError; FileNotFoundError once it was discarded."""
    disk.rename(files.cleaned_log, files.swap)
    disk.sync_directory(files.directory)


def put_in_place(disk: Disk, files: SwapFiles) -> None:
    """Step 3, of the batches. Raises OSError, and the old ones are in place.

    The swap file stays: as long as the directory is not synced, nobody knows which of the names a
    power cut leaves.
    """
    _link_over(disk, files.swap, files.final("log"))


def put_index_in_place(disk: Disk, files: SwapFiles) -> None:
    """Step 3, of their indexes. Raises OSError."""
    disk.rename(files.cleaned_index, files.final("index"))
    disk.rename(files.cleaned_time_index, files.final("timeindex"))
    try:
        disk.rename(files.cleaned_transaction_index, files.final("txnindex"))
    except FileNotFoundError:
        with contextlib.suppress(FileNotFoundError):
            disk.remove(files.final("txnindex"))


def _link_over(disk: Disk, source: Path, target: Path) -> None:
    temporary = target.with_name(target.name + TEMPORARY_SUFFIX)
    with contextlib.suppress(FileNotFoundError):
        disk.remove(temporary)
    try:
        disk.link(source, temporary)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        disk.rename(source, target)  # At once, on any file system that is worth its name.
        return
    disk.rename(temporary, target)


def finish(disk: Disk, files: SwapFiles, doomed: Iterable[Path]) -> None:
    """Step 4. Raises OSError."""
    disk.sync_directory(files.directory)
    with contextlib.suppress(FileNotFoundError):  # A cut has done so.
        disk.remove(files.swap)
    for path in doomed:
        with contextlib.suppress(OSError):  # The next start, or the next clean, removes them.
            disk.remove(path)


def finish_swaps(disk: Disk, directory: Path) -> None:
    """At a start: bring to an end what a crash left between two steps. Raises OSError."""
    names = {path.name for path in directory.iterdir()}
    for name in sorted(names):
        match = _SWAP_NAME.fullmatch(name)
        if match is None:
            continue
        files = SwapFiles(directory, int(match[1]), int(match[2]))
        if files.final("log").name in names:
            _finish(disk, files, names)
        disk.remove(files.swap)
    for name in names:
        if name.endswith(CLEANED_SUFFIX):
            disk.remove(directory / name)


def _finish(disk: Disk, files: SwapFiles, names: set[str]) -> None:
    """Put the new segment in place, without indexes, which are made anew when they are needed."""
    for suffix in _INDEX_SUFFIXES:
        with contextlib.suppress(FileNotFoundError):
            disk.remove(files.final(suffix))
    gone = set()
    for name in names:
        match = _LOG_NAME.fullmatch(name)
        if match is not None and files.base_offset < int(match[1]) < files.end_offset:
            for suffix in (*_INDEX_SUFFIXES, "log"):
                with contextlib.suppress(FileNotFoundError):
                    disk.remove(files.directory / file_name(int(match[1]), suffix))
            gone.add(name)
    names -= gone  # A swap file of theirs, if there is one as well, is older.
    _link_over(disk, files.swap, files.final("log"))
    disk.sync_directory(files.directory)
