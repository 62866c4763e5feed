"""Mends a broker's damaged logs with what other replicas have, as penstock.broker.repair does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from penstock.broker.core.log_copy import may_mend
from penstock.wire.errors import CorruptRecordError, ErrorCode
from penstock.wire.ids import TopicIdPartition

if TYPE_CHECKING:
    from penstock.chaos.simulator.broker import SimulatedBroker
    from penstock.chaos.simulator.partition import SimulatedPartition
    from penstock.chaos.simulator.serving import Answer

_SCRUB_MS: Final = (1500, 4000)
_FLUSH_MS: Final = (1, 30)
_TIMEOUT_MS: Final = 500
_GIVEN_UP_MS: Final = 2000
_DAMAGED: Final = CorruptRecordError("a batch is not sound")
_BEYOND_REPAIR: Final = (ErrorCode.CORRUPT_MESSAGE, ErrorCode.OFFSET_OUT_OF_RANGE)


@dataclass(frozen=True, slots=True)
class ReadBatches:
    """Asks the leader in an epoch for what it has at an offset: a batch, or as much as is asked."""

    key: TopicIdPartition
    leader_epoch: int
    offset: int
    max_bytes: int = 0


class Repairs:
    """What of a broker's logs is damaged, as far as was found by readers or the scrubber.

    A replica is mended while the controllers have it out of the in-sync set, and by what another
    one has that leads. What nobody can give is let be for a while, and the replica stays out of
    sync; ``given_up`` tells people.
    """

    def __init__(self, broker: SimulatedBroker) -> None:
        self._broker = broker
        self._damaged: set[TopicIdPartition] = set()
        self._at_work: set[TopicIdPartition] = set()
        if broker.place.scrubs:
            self._scrub_later()

    def found(self, partition: SimulatedPartition) -> None:
        """A batch of the log is not sound. Called again and again."""
        key = partition.key
        if key in self._damaged:
            return
        self._broker.note(f"{key.partition} on {self._broker.node_id}: damage is found")
        self._damaged.add(key)
        self._broker.reports.set_damaged(key, _DAMAGED)
        self._broker.report()
        self._go_on(key)

    def metadata_changed(self) -> None:
        """Another may lead what is damaged here, by now."""
        for key in sorted(self._damaged):
            self._go_on(key)

    def _scrub_later(self) -> None:
        self._broker.after(self._broker.rng.randint(*_SCRUB_MS), self._scrub)

    def _scrub(self) -> None:
        for partition in list(self._broker.partitions.values()):
            if partition.log.first_damage() is not None:
                self.found(partition)
        self._scrub_later()

    # One partition.

    def _go_on(self, key: TopicIdPartition) -> None:
        if key not in self._damaged or key in self._at_work:
            return
        partition = self._broker.partitions.get(key)
        offset = None if partition is None else partition.log.first_damage()
        if partition is None or offset is None:
            self._damaged.discard(key)
            self._broker.reports.set_sound(key)
            self._broker.report()
            return
        broker = self._broker
        record = broker.image.partition_by_id(key)
        if record is None or not may_mend(broker.image, key, broker.node_id):
            return
        self._at_work.add(key)
        self._broker.place.network.call(
            self._broker,
            record.leader,
            "read batches",
            ReadBatches(key, record.leader_epoch, offset),
            lambda answer: self._answered(partition, offset, answer),
            timeout_ms=_TIMEOUT_MS,
        )

    def _answered(self, partition: SimulatedPartition, offset: int, answer: Answer | None) -> None:
        if answer is not None and answer.error in _BEYOND_REPAIR:
            self._give_up(partition)
        elif answer is None or answer.error is not None:
            self._broker.after(self._broker.rng.randint(20, 120), lambda: self._again(partition))
        elif not answer.records:  # At its end there is nothing to give, as beyond it.
            self._give_up(partition)
        else:
            delay_ms = self._broker.rng.randint(*_FLUSH_MS)
            self._broker.after(delay_ms, lambda: self._mend(partition, offset, answer.records))

    def _mend(self, partition: SimulatedPartition, offset: int, records: bytes) -> None:
        """Put it in its place. What died or failed until here left the damage where it was."""
        if partition.closed or partition.log.first_damage() != offset:
            self._again(partition)
        elif not partition.log.mend(offset, records):
            self._give_up(partition)
        else:
            self._broker.touch(partition)
            self._broker.note(
                f"{partition.key.partition} on {self._broker.node_id}: {offset} is mended"
            )
            self._again(partition)

    def _again(self, partition: SimulatedPartition) -> None:
        self._at_work.discard(partition.key)
        self._go_on(partition.key)

    def _give_up(self, partition: SimulatedPartition) -> None:
        key = partition.key
        self._broker.note(f"{key.partition} on {self._broker.node_id}: can't be mended")
        self._broker.after(_GIVEN_UP_MS, lambda: self._again(partition))
        self._broker.place.given_up(self._broker.node_id, key)
