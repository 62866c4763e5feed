"""What a broker may say at a start of the run before: whether all that it acknowledged is here.

The controllers ask for no more than that (KIP-966): who says it stays an eligible leader, and the
last member of an in-sync set. A clean stop proves it. So does, after a crash or a power loss, that
the run acknowledged nothing that was not on the disk (``flush.policy=commit``), that all it found
at its beginning was flushed before, and that no data directory of it is missing or has failed.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple


class RunMark(NamedTuple):
    """A run of a broker: its broker epoch, and the ids of all its data directories."""

    broker_epoch: int
    directories: frozenset[bytes]


class FoundDirectory(NamedTuple):
    """A data directory as a start finds it.

    ``clean``: the mark that a clean stop left. ``durable``: the mark of a run that acknowledged
    only what was on the disk. ``is_whole``: everything that the run left in it can be used.
    """

    directory_id: bytes
    clean: RunMark | None
    durable: RunMark | None
    is_whole: bool


def epoch_to_report(found: Collection[FoundDirectory]) -> int:
    """The broker epoch of the last run if all that it acknowledged is here, else -1.

    ``found`` has every directory but the new ones. All that the run had must be here, whole: a
    partition that is gone would be made anew, empty, and must not pass for one that lost nothing.
    """
    runs = {directory.clean or directory.durable for directory in found}
    run = runs.pop() if len(runs) == 1 else None
    if run is None or run.directories != {directory.directory_id for directory in found}:
        return -1
    return run.broker_epoch if all(directory.is_whole for directory in found) else -1
