"""Copies logs anew that do not open, as penstock.broker.shut_logs does, by the same decisions."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from penstock.broker.core.log_copy import CannotCopyError, Leadership, LogCopy
from penstock.broker.core.ports import DamagedLogError
from penstock.chaos.simulator.repair import ReadBatches
from penstock.wire.errors import ErrorCode
from penstock.wire.ids import TopicIdPartition
from penstock.wire.records import iter_batches, parse_header

if TYPE_CHECKING:
    from penstock.chaos.simulator.broker import SimulatedBroker
    from penstock.chaos.simulator.serving import Answer

_AGAIN_MS: Final = (20, 400)
_LOOK_AGAIN_MS: Final = (50, 500)
_TIMEOUT_MS: Final = 500
_READ_BYTES: Final = 2000


class ShutLogs:
    """The logs of one broker's process that can't be used, and those that take their places."""

    def __init__(self, broker: SimulatedBroker) -> None:
        self._broker = broker
        self._shut: dict[TopicIdPartition, _ShutLog] = {}

    def found(self, key: TopicIdPartition, error: DamagedLogError) -> None:
        """A log can't be used. Of one that is being copied it is seen in time."""
        known = self._shut.get(key)
        if known is None or known.is_done:
            broker = self._broker
            copy = LogCopy(broker.node_id, broker.image, key, error)
            self._shut[key] = _ShutLog(copy, broker)
            self._shut[key].go_on()

    def metadata_changed(self) -> None:
        """Another may lead by now what does not open here."""
        for key, shut in sorted(self._shut.items()):
            shut.go_on()
            if shut.is_done:
                del self._shut[key]


class _ShutLog:
    """One of them."""

    def __init__(self, copy: LogCopy, broker: SimulatedBroker) -> None:
        self.is_done = False
        self._copy = copy
        self._broker = broker
        self._busy = False  # Something is under way, and ends with go_on.
        self._stuck: Leadership | None = None  # Under whom; another try may help under another.

    def _note(self, what: str) -> None:
        self._broker.note(f"{self._copy.key.partition} on {self._broker.node_id}: {what}")

    def go_on(self) -> None:
        """Do what can be done now."""
        copy = self._copy
        if self._busy or self.is_done:
            return
        why = self._broker.why_shut(copy.key)
        if why is None:
            self.is_done = True
            return
        if why is not copy.error:  # What was copied is damaged as well.
            copy.shut_again(why)
        if self._stuck == copy.leader:
            return
        self._stuck = None
        try:
            if not copy.may_read():
                return
        except CannotCopyError as error:
            self._give_up(error)
            return
        if copy.is_read:
            self._begin()
        else:
            copy.begin_reading()
            self._ask(0, self._started)

    def _give_up(self, error: CannotCopyError) -> None:
        self._stuck = self._copy.leader
        self._note(f"it can't be copied anew: {error}")

    def _later(self) -> None:
        self._busy = True
        self._broker.after(self._broker.rng.randint(*_AGAIN_MS), self._end_of_wait)

    def _end_of_wait(self) -> None:
        self._busy = False
        self.go_on()

    # Reading the leader through.

    def _ask(self, offset: int, answered: Callable[[Answer | None], None]) -> None:
        copy, leader = self._copy, self._copy.leader
        if leader.node_id < 0:
            self._later()
            return
        self._busy = True
        self._broker.place.network.call(
            self._broker,
            leader.node_id,
            "read batches",
            ReadBatches(copy.key, leader.leader_epoch, offset, _READ_BYTES),
            answered,
            timeout_ms=_TIMEOUT_MS,
        )

    def _started(self, answer: Answer | None) -> None:
        if answer is None or answer.log_start_offset < 0:
            self._later()
            return
        self._copy.read_from(answer.log_start_offset)
        self._read_on()

    def _read_on(self) -> None:
        offset = self._copy.next_offset()
        if offset is None:
            self._end_of_wait()
        else:
            self._ask(offset, self._read)

    def _read(self, answer: Answer | None) -> None:
        copy = self._copy
        try:
            if answer is not None and answer.error is ErrorCode.CORRUPT_MESSAGE:
                raise copy.leader_is_damaged("a batch is not sound")
            if answer is None or answer.error is not None:
                self._later()
                return
            if answer.records:
                last = max(
                    parse_header(view).next_offset for _, view in iter_batches(answer.records)
                )
                copy.was_read(last)
            else:
                copy.leader_ends()
        except CannotCopyError as error:
            self._busy = False
            self._give_up(error)
            return
        self._read_on()

    # Copying.

    def _begin(self) -> None:
        copy = self._copy
        if not copy.may_begin():
            self._later()
            return
        self._note(f"it is copied anew, up to {copy.end_offset}")
        self._busy = True
        self._broker.begin_anew(copy)
        copy.begun()
        self._look_again()

    def _look(self) -> None:
        copy, broker = self._copy, self._broker
        partition = broker.partitions.get(copy.key)
        end = -1 if partition is None else partition.log.log_end_offset
        if copy.is_over(end):
            self._note(f"the copy goes to {end}")
            broker.reports.set_copied(copy.key)
            broker.report()
        elif broker.why_shut(copy.key) is None:
            self._look_again()
            return
        self._end_of_wait()

    def _look_again(self) -> None:
        self._broker.after(self._broker.rng.randint(*_LOOK_AGAIN_MS), self._look)
