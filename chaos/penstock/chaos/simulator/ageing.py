"""What a broker does because time has passed, as its production does it once an interval."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from penstock.wire.ids import TopicIdPartition

if TYPE_CHECKING:
    from penstock.chaos.simulator.broker import SimulatedBroker
    from penstock.chaos.simulator.partition import SimulatedPartition

_CHECKS: Final = 6  # So often within what is waited for.


@dataclass(frozen=True, slots=True)
class Ages:
    """After how long a producer that writes nothing is forgotten, and a record deleted; 0 is never.

    ``deletes`` hears up to where the records of a partition are about to be deleted.
    """

    producer_expiration_ms: int
    retention_ms: int
    deletes: Callable[[TopicIdPartition, int], None]


class Ageing:
    """Forgets silent producers of each replica, and deletes old records of those led here.

    A replica forgets by itself, as in production; of what a leader deletes its followers hear.
    """

    def __init__(self, broker: SimulatedBroker) -> None:
        self._broker = broker
        self._ages = broker.place.ages
        if self._ages.producer_expiration_ms:
            self._look_later(self._ages.producer_expiration_ms, self._forget)
        if self._ages.retention_ms:
            self._look_later(self._ages.retention_ms, self._delete)

    def _look_later(self, age_ms: int, look: Callable[[SimulatedPartition], None]) -> None:
        def look_at_all() -> None:
            for partition in list(self._broker.partitions.values()):
                look(partition)
            self._broker.after(age_ms // _CHECKS, look_at_all)

        self._broker.after(age_ms // _CHECKS, look_at_all)

    def _forget(self, partition: SimulatedPartition) -> None:
        gone = partition.log.expire_producers(self._ages.producer_expiration_ms)
        if gone:
            self._broker.touch(partition)
            self._broker.note(
                f"{partition.key.partition} on {self._broker.node_id}: forgets {gone} producers"
            )

    def _delete(self, partition: SimulatedPartition) -> None:
        """None that is not committed, and none of a topic of the cluster's own: that is compacted.

        Records are as old as the wall clock says, which is right here.
        """
        log = partition.log
        if not partition.is_leader or log.internal or not self._broker.may_serve():
            return
        oldest_ms = self._broker.place.scheduler.now_ms - self._ages.retention_ms
        offset = log.log_start_offset
        for header, _ in log.batches_from(offset):
            if header.max_timestamp_ms >= oldest_ms:
                break
            if header.next_offset > partition.replica.high_watermark:
                break
            offset = header.next_offset
        if offset > log.log_start_offset:
            self._broker.note(f"{partition.key.partition}: deleted below {offset}, for its age")
            self._ages.deletes(partition.key, offset)
            partition.delete_below(offset)
