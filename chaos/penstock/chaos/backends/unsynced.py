"""Takes from a node's files what a loss of power would have taken: whatever was not synced.

``preload.c`` has noted, while the node lived, what each change changed and when it was synced. From
the journal's end to its beginning, each change that was not is taken back.
"""

from __future__ import annotations

import itertools
import os
import shutil
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Final

_RECORD: Final = struct.Struct("=IIQQQQQQQ")  # ``struct record`` of preload.c.

Range = tuple[int, int]


class Kind(IntEnum):
    """What a record is about; ``preload.c`` has the same numbers."""

    WRITE = 1
    CUT = 2
    MADE = 3
    GONE = 4
    RENAMED = 5
    DONE = 6
    SYNC = 7
    SYNCED = 8
    DURABLE = 9


_OF_NAMES: Final = (Kind.MADE, Kind.GONE, Kind.RENAMED)


@dataclass(slots=True)
class Change:
    """One change of a file's content, or of a directory's names."""

    kind: Kind
    inode: int
    into: int
    """The inode of the directory that is renamed into."""
    offset: int
    length: int
    old_size: int
    old: bytes
    """What was there: of a cut, all that was behind ``offset``."""
    names: tuple[str, ...]
    done_at: int | None = None
    has_failed: bool = False
    is_durable: bool = False
    is_given_up: bool = False
    """A sync of it has failed, and no later one will write it."""

    @property
    def synced_with(self) -> int:
        """The inode whose sync makes it durable."""
        return self.into if self.kind is Kind.RENAMED else self.inode


@dataclass(slots=True)
class Lost:
    """What was taken back, of so many changes."""

    changes: int = 0
    writes: int = 0
    write_bytes: int = 0
    names: list[str] = field(default_factory=list)


def lose_power(root: Path, notes: Path, journals: Iterable[Path]) -> Lost:
    """Take back what was not synced under ``root``; ``notes`` is where deleted files were kept.

    The node must be gone. Each of its lives has written a journal, if it has changed anything.
    """
    changes = read_changes(*(path.read_bytes() for path in journals))
    lost = Lost(len(changes))
    _restore_contents([c for c in changes if c.kind not in _OF_NAMES], root, notes, lost)
    _restore_names([c for c in changes if c.kind in _OF_NAMES], root, notes, lost)
    return lost


def read_changes(*journals: bytes) -> list[Change]:
    """The changes in their order, each with what became of it. A record that was torn is left out.

    A change is durable if it was done before a sync began that succeeded.
    """
    # Numbers go up from life to life. What goes on when a journal begins has its beginning nowhere.
    lives = sorted((list(_records(data)) for data in journals), key=lambda one: one[:1])
    records = itertools.chain.from_iterable(lives)
    changes: dict[int, Change] = {}
    pending: dict[int, list[Change]] = {}
    syncs: dict[int, int] = {}
    for at, (number, kind, inode, other, rest) in enumerate(records):
        known = changes.get(number)
        if kind is Kind.SYNC:
            syncs[number] = at
        elif kind is Kind.SYNCED:
            began = syncs.pop(number, -1)
            for synced in [inode] if inode else list(pending):
                pending[synced] = _settle(pending.get(synced, []), began, succeeded=bool(other))
        elif kind in (Kind.DONE, Kind.DURABLE):
            if known is not None and kind is Kind.DONE:
                known.done_at = at
                known.has_failed = not other
            elif known is not None:
                known.is_durable = True
        else:
            change = Change(kind, inode, other, *rest)
            changes[number] = change
            pending.setdefault(change.synced_with, []).append(change)
    return [change for change in changes.values() if not change.has_failed]


def _records(
    data: bytes,
) -> Iterator[tuple[int, Kind, int, int, tuple[int, int, int, bytes, tuple[str, ...]]]]:
    """Number, kind, inode, the other number, and the rest of a change."""
    at = 0
    while at + _RECORD.size <= len(data):
        kind, names_bytes, number, inode, other, *numbers, size = _RECORD.unpack_from(data, at)
        names_at = at + _RECORD.size
        content_at = names_at + names_bytes
        at = content_at + size
        if at > len(data):
            return
        names = tuple(os.fsdecode(n) for n in data[names_at:content_at].split(b"\0")[:-1])
        offset, length, old_size = numbers
        rest = (offset, length, old_size, data[content_at:at], names)
        yield number, Kind(kind), inode, other, rest


def _settle(changes: list[Change], began: int, *, succeeded: bool) -> list[Change]:
    """Those of the changes that a later sync may still make durable."""
    left = []
    for change in changes:
        if change.done_at is None or change.done_at > began:
            left.append(change)
        elif succeeded:
            change.is_durable = True
        else:
            # As the kernel does: it reports the failure once, and takes the pages for clean.
            change.is_given_up = True
    return left


def _restore_contents(changes: list[Change], root: Path, notes: Path, lost: Lost) -> None:
    paths = {os.lstat(path).st_ino: path for path in [*_files(root), *_files(notes)]}
    by_inode: dict[int, list[Change]] = {}
    for change in changes:
        by_inode.setdefault(change.inode, []).append(change)
    for inode, found in by_inode.items():
        if inode in paths and not all(change.is_durable for change in found):
            with paths[inode].open("r+b") as file:
                _restore_file(file.fileno(), found, lost)


def _restore_file(fd: int, changes: list[Change], lost: Lost) -> None:
    fixed: list[Range] = []  # What a later change, which stays, has put there.
    for change in reversed(changes):
        end = change.offset + change.length
        if change.is_durable:
            if change.kind is Kind.WRITE:
                fixed.append((change.offset, end))
            continue
        lost.writes += 1
        lost.write_bytes += change.length
        size = os.fstat(fd).st_size
        least = max((stop for _, stop in fixed), default=0)
        if change.kind is Kind.CUT or end > change.old_size:
            wanted = max(change.old_size, least)
            # What is between is zeros: that a later write has moved the end does stay.
            if change.kind is Kind.CUT or wanted < size:
                os.ftruncate(fd, wanted)
        old = change.old
        if change.kind is Kind.WRITE:
            old = old.ljust(min(end, os.fstat(fd).st_size) - change.offset, b"\0")
        for start, stop in without((change.offset, change.offset + len(old)), fixed):
            os.pwrite(fd, old[start - change.offset : stop - change.offset], start)


def without(whole: Range, taken: list[Range]) -> list[Range]:
    """The parts of a range that none of the others has."""
    left = [whole]
    for start, stop in taken:
        left = [
            part
            for begin, end in left
            for part in ((begin, min(end, start)), (max(begin, stop), end))
            if part[0] < part[1]
        ]
    return left


def _restore_names(changes: list[Change], root: Path, notes: Path, lost: Lost) -> None:
    directories = _directories(root)
    for change in reversed(changes):
        if change.is_durable or change.inode not in directories:
            continue
        path = directories[change.inode] / change.names[0]
        if change.kind is Kind.MADE:
            undone = _remove(path)
        elif change.kind is Kind.GONE:
            undone = _bring_back(path, notes, change.names[1])
        else:
            name, _, kept = change.names[1].partition("/")
            target = directories.get(change.into, root) / name
            undone = target.exists() and not path.exists()
            if undone:
                target.rename(path)
            if kept:
                _bring_back(target, notes, kept)
        if undone:
            lost.names.append(f"{change.kind.name.lower()} {path.relative_to(root)}")
            directories = _directories(root)


def _remove(path: Path) -> bool:
    if not path.exists():
        return False
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()
    return True


def _bring_back(path: Path, notes: Path, kept: str) -> bool:
    if path.exists():
        return False
    if kept:
        os.link(notes / kept, path)
    else:
        path.mkdir()
    return True


def _files(directory: Path) -> Iterator[Path]:
    for parent, _, names in os.walk(directory):
        yield from (Path(parent, name) for name in names)


def _directories(root: Path) -> dict[int, Path]:
    found = (Path(parent) for parent, _, _ in os.walk(root))
    return {path.stat().st_ino: path for path in found}
