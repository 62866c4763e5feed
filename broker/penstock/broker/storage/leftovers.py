"""Directories that are called as partitions are, and do not say whose log they hold.

Whoever else keeps files in a data directory may call a directory ``backup-2024``. Nothing is
removed that this broker did not make.
"""

from __future__ import annotations

import enum
import itertools
import os
import re
from pathlib import Path
from typing import Final, NamedTuple

from penstock.broker.storage.checkpoints import EPOCHS_FILE, METADATA_FILE, TEMPORARY_SUFFIX
from penstock.broker.storage.damage_notes import NOTE_FILE
from penstock.broker.storage.disk import Disk
from penstock.wire.ids import TopicId, TopicIdPartition, TopicPartition

_NAMES: Final = rf"{re.escape(METADATA_FILE)}|{re.escape(EPOCHS_FILE)}"
# All that is there before a log has its first record. Its first segment is empty then.
_WHILE_MADE: Final = re.compile(
    rf"(?:{_NAMES}|0{{20}}\.(?:index|timeindex))(?:{re.escape(TEMPORARY_SUFFIX)})?|0{{20}}\.log"
)
_OURS: Final = re.compile(rf"(?:{_NAMES}|{re.escape(NOTE_FILE)}|\d{{20}}\.[a-z]+).*")
_NAME_MAX: Final = 180  # Of the topic in a name with a suffix, which has 255 at most.


def copy_anew(directory: Path) -> str:
    """What a person can do about a log that does not open."""
    return (
        f"move {directory} away and restart the broker, and the partition is copied anew from its "
        "leader"
    )


class Unclear(NamedTuple):
    """Records of nobody knows which topic: their ``partition.metadata`` is damaged or gone."""

    partition: TopicPartition  # By the directory's name, as is the next, where it is in there.
    topic_id: TopicId | None
    reason: str

    def may_be(self, partition: TopicPartition, key: TopicIdPartition) -> bool:
        """Whether they may be this partition's."""
        return self.partition == partition and self.topic_id in (None, key.topic_id)


class Content(enum.Enum):
    """What is in such a directory."""

    LEFTOVER = enum.auto()  # Nothing, but for what a crash leaves while a partition is made.
    LOG = enum.auto()  # Files of a log.
    FOREIGN = enum.auto()  # Somebody else's.


def content_of(directory: Path) -> Content:
    """Look at what is there. Raises OSError."""
    entries = list(os.scandir(directory))
    if directory.is_symlink():
        is_leftover = False  # A broker makes none.
    else:
        is_leftover = all(_is_of_making(entry) for entry in entries)
    if is_leftover:
        return Content.LEFTOVER
    ours = any(_OURS.fullmatch(entry.name) for entry in entries)
    return Content.LOG if ours else Content.FOREIGN


def _is_of_making(entry: os.DirEntry[str]) -> bool:
    if not _WHILE_MADE.fullmatch(entry.name) or not entry.is_file(follow_symlinks=False):
        return False
    return not entry.name.endswith(".log") or entry.stat().st_size == 0


def remove(disk: Disk, directory: Path) -> None:
    """Remove a LEFTOVER, and no more than that: it fails with OSError if more has come."""
    for path in directory.iterdir():
        if _WHILE_MADE.fullmatch(path.name):
            disk.remove(path)
    disk.remove_directory(directory)


def free_name(root: Path, directory: Path, key: TopicIdPartition, suffix: str) -> Path:
    """A free name for a directory that was taken away; the last one may still be there."""
    topic = directory.name.rpartition("-")[0][:_NAME_MAX]
    name = f"{topic}-{key.partition}.{key.topic_id.hex()}"
    names = (name if again == 0 else f"{name}.{again}" for again in itertools.count())
    paths = (root / f"{free}{suffix}" for free in names)
    return next(path for path in paths if not path.exists())
