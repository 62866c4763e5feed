"""What of a log no replica in sync can give, and what whoever asks for it is told."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from penstock.broker.storage.placing import SegmentDamagedError
from penstock.wire.errors import CorruptRecordError
from penstock.wire.ids import TopicPartition

if TYPE_CHECKING:
    from penstock.broker.storage.log import PartitionLog


class LostRange(NamedTuple):
    """Offsets from ``offset`` to below ``end_offset``, which nobody can mend for ``reason``.

    ``place`` is where they lie here, and what is wrong there.
    """

    offset: int
    end_offset: int
    reason: str
    place: str

    @property
    def named(self) -> str:
        """As people are told."""
        last = self.end_offset - 1
        return f"offset {last}" if self.offset >= last else f"offsets {self.offset} to {last}"


def way_on(partition: TopicPartition, end_offset: int) -> str:
    """What an operator does about a range that is lost and ends below ``end_offset``."""
    topic, number = partition
    return (
        "start the brokers of replicas that are down, one may have it. What none has is lost: "
        f"consumers may seek to {end_offset}, and `penstock topics delete-records {topic} --before "
        f"{number}={end_offset}`, which deletes all before that offset, lets every replica get in "
        "sync again"
    )


def explained(
    error: CorruptRecordError, partition: TopicPartition, lost: Iterable[LostRange], offset: int
) -> CorruptRecordError:
    """The error for a read at ``offset`` that came upon damage: where nobody can mend it, it says
    what is lost and what to do.
    """
    for one in lost:
        if one.offset <= offset < one.end_offset:
            return CorruptRecordError(
                f"{partition}: {one.named} can't be read ({one.place}), and no replica in sync can "
                f"mend that ({one.reason}); {way_on(partition, one.end_offset)}"
            )
    return error


@contextlib.contextmanager
def telling(log: PartitionLog, offset: int = -1) -> Iterator[None]:
    """Have damage mended that is come upon in here, and who asked told what is lost.

    It is at ``offset``, or where the error says.
    """
    try:
        yield
    except CorruptRecordError as error:
        if offset < 0 and isinstance(error, SegmentDamagedError):
            offset = error.offset
        if offset >= 0:
            log.home.damage_found(log, offset)
        told = explained(error, log.partition, log.lost, offset)
        if told is error:
            raise
        raise told from error
