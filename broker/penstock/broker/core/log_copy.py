"""When a log that does not open may make way for a copy of its leader's: what is decided. Pure."""

from __future__ import annotations

from typing import Final, NamedTuple

from penstock.broker.core.metadata_image import MetadataImage
from penstock.broker.core.ports import DamagedLogError
from penstock.wire.ids import TopicIdPartition

_WAY_ON: Final = (
    "start the brokers of replicas that are down, one may have it all. Where none has, read what "
    "is left with `penstock log dump`, then move the directory away and restart this broker: that "
    "gives up what no other replica has"
)


class Leadership(NamedTuple):
    """Who leads a partition, and in which leader epoch; -1 each while it is not known."""

    node_id: int
    leader_epoch: int


_NOBODY: Final = Leadership(-1, -1)


class CannotCopyError(Exception):
    """Nobody else has what is to be copied, as far as can be told now. Says why, and what to do."""

    def __init__(self, reason: str, next_step: str) -> None:
        super().__init__(reason)
        self.next_step = next_step


def leader_of(image: MetadataImage, key: TopicIdPartition) -> Leadership:
    """Who leads, as far as the metadata have come."""
    record = image.partition_by_id(key)
    return _NOBODY if record is None else Leadership(record.leader, record.leader_epoch)


def none_is_in_sync(image: MetadataImage, key: TopicIdPartition, node_id: int) -> bool:
    """Whether nobody but ``node_id`` is in sync, so that nobody can lead in its stead."""
    record = image.partition_by_id(key)
    return record is not None and not set(record.isr).difference(
        record.offline_replicas, (node_id,)
    )


def may_mend(image: MetadataImage, key: TopicIdPartition, node_id: int) -> bool:
    """Whether the replica of ``node_id`` is out of the in-sync set, and another leads.

    It is so until that broker says otherwise: a replica that is on record as offline comes neither
    into the in-sync set nor among the eligible leaders. So it does not matter how old the metadata
    are that show it.
    """
    record = image.partition_by_id(key)
    return (
        record is not None
        and node_id in record.offline_replicas
        and node_id not in record.isr
        and record.leader not in (-1, node_id)
    )


class LogCopy:
    """One log that does not open, from when that is known until a copy has taken its place.

    The owner calls ``may_read`` whenever the metadata have moved on. Once it may, and unless the
    log ``is_read`` already, it calls ``begin_reading``, asks the leader where its log begins, calls
    ``read_from`` and reads there what lies at each ``next_offset``, until that is None. When the
    copy ``may_begin`` it puts an empty log in the place of this one and calls ``begun``; it is done
    when it ``is_over``. Any of that may be begun again from ``may_read``.
    """

    def __init__(
        self, node_id: int, image: MetadataImage, key: TopicIdPartition, error: DamagedLogError
    ) -> None:
        self.key = key
        self.error = error
        self.end_offset = 0
        """How far the copy has to go, once it was read at the leader."""
        self._node_id = node_id
        self._image = image
        self._reading: Leadership | None = None  # Whose log is being read,
        self._offset = 0  # and where that has come to.
        self._read_at: Leadership | None = None  # Who had all of it, up to end_offset.
        self._copied_from: Leadership | None = None

    def shut_again(self, error: DamagedLogError) -> None:
        """What was copied does not open either."""
        self.error, self._read_at = error, None

    @property
    def leader(self) -> Leadership:
        """Who leads now. After CannotCopyError it is worth another try when that is another."""
        return leader_of(self._image, self.key)

    def may_read(self) -> bool:
        """Whether the replica is out of the in-sync set by now, and another leads.

        Raises CannotCopyError while nobody can lead in its stead.
        """
        if may_mend(self._image, self.key, self._node_id):
            return True
        if none_is_in_sync(self._image, self.key, self._node_id):
            raise CannotCopyError("no other replica is in sync", _WAY_ON)
        return False

    @property
    def is_read(self) -> bool:
        """Whether everything that was here was read at who leads now."""
        return self._read_at is not None and self._read_at == self.leader

    def begin_reading(self) -> None:
        """The log of who leads now is going to be read."""
        self._reading, self._read_at = self.leader, None

    def read_from(self, log_start_offset: int) -> None:
        """There the leader's log begins: what lay below was deleted."""
        self._offset = log_start_offset
        self._look_whether_read()

    def next_offset(self) -> int | None:
        """Where to read on; None once everything was read."""
        return self._offset if self._read_at is None else None

    def was_read(self, next_offset: int) -> None:
        """The leader's log is sound up to there."""
        self._offset = next_offset
        self._look_whether_read()

    def leader_ends(self) -> None:
        """The leader has nothing at ``next_offset``.

        That is well for an end of this log that nobody knows to be committed: it may be nowhere
        else. Raises CannotCopyError where committed records are missing there.
        """
        offset = self._offset
        if offset < self.error.committed_offset:
            raise CannotCopyError(
                f"the leader's log ends at offset {offset}, but this one had committed records up "
                f"to offset {self.error.committed_offset}",
                _WAY_ON,
            )
        self._read_at, self.end_offset = self._reading, offset

    def leader_is_damaged(self, damage: str) -> CannotCopyError:
        """What to say where the leader's log is not sound at ``next_offset``."""
        return CannotCopyError(
            f"the leader's log is damaged as well: {damage}",
            "what the leader lacks has to be mended or deleted first: see its log",
        )

    def _look_whether_read(self) -> None:
        offset, error = self._offset, self.error
        # What is committed may lie above the end that was found, as where all the files are gone.
        if offset >= max(error.end_offset, error.committed_offset):
            self._read_at, self.end_offset = self._reading, offset

    def may_begin(self) -> bool:
        """Whether the log may be dropped: who has all of it still leads, and this one is out."""
        return self.is_read and may_mend(self._image, self.key, self._node_id)

    def begun(self) -> None:
        """An empty log is in its place."""
        self._copied_from = self.leader

    def is_copied(self, log_end_offset: int) -> bool:
        """Whether the new log has gone as far as it has to."""
        return log_end_offset >= self.end_offset

    def is_over(self, log_end_offset: int) -> bool:
        """Whether it has, or another leads: how far that one's log goes is another matter.

        It judges who is in sync then.
        """
        return self.is_copied(log_end_offset) or self.leader != self._copied_from
