"""Who reads committed records only: what is undecided is not there yet, what is aborted never."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from penstock.chaos.simulator.history import check
from penstock.chaos.simulator.serving import Answer, FetchRequest
from penstock.chaos.simulator.transactions.history import Seen
from penstock.chaos.simulator.transactions.observer import Observer
from penstock.chaos.simulator.transactions.scripts import (
    Rest,
    Script,
    ScriptedProcess,
    ScriptPlace,
)
from penstock.wire.ids import TopicIdPartition
from penstock.wire.markers import MarkerType, marker_type
from penstock.wire.records import Record, decode_batch, iter_batches

AUDIENCE: Final = 0
"""All who read the partitions of a run are one reader, as the members of a consumer group are."""

WHOLE_LOG_BYTES: Final = 200_000


def committed_records(records: bytes, aborted: Sequence[tuple[int, int]]) -> Iterator[Record]:
    """The records of an answer but for marks and those of aborted transactions, which are given
    by producer id and first offset.
    """
    coming = sorted(aborted, key=lambda txn: txn[1])
    within: set[int] = set()
    for header, view in iter_batches(records):
        while coming and coming[0][1] <= header.base_offset:
            within.add(coming.pop(0)[0])
        if header.is_control:
            if marker_type(view) is MarkerType.ABORT:
                within.discard(header.producer_id)
        elif not (header.is_transactional and header.producer_id in within):
            yield from decode_batch(view)


class Cursor:
    """Where somebody reads a partition. ``fetch`` gives the next records, or none yet."""

    def __init__(self, process: ScriptedProcess, key: TopicIdPartition, offset: int = 0) -> None:
        self.key = key
        self.offset = offset
        self.log_end_offset = -1  # Of the leader that was asked last.
        self._process = process

    def fetch(self, max_bytes: int = 800) -> Script:
        """Ask once: the records, and the answer, which is None where it was refused."""
        epoch = self._process.leader_epoch(self.key)
        request = FetchRequest(self.key, self.offset, epoch, True, max_bytes)
        answer = yield from self._process.ask(self.key, "fetch", request)
        if not isinstance(answer, Answer) or answer.error is not None:
            return [], None
        self.log_end_offset = answer.log_end_offset
        found = [
            record
            for record in committed_records(answer.records, answer.aborted)
            if record.offset >= self.offset
        ]
        for header, _ in iter_batches(answer.records):
            self.offset = max(self.offset, header.next_offset)
        return found, answer


class CommittedReader(ScriptedProcess):
    """Reads one partition from its beginning on, as long as the run goes on."""

    def __init__(
        self, address: int, key: TopicIdPartition, place: ScriptPlace, observer: Observer
    ) -> None:
        super().__init__(address, place)
        self.key = key
        self._observer = observer
        self._cursor = Cursor(self, key)
        self._stable: dict[int, int] = {}  # The last stable offset by leader epoch.
        self.run(self._read())

    @property
    def offset(self) -> int:
        """What it reads next."""
        return self._cursor.offset

    def _read(self) -> Script:
        while True:
            epoch = self.leader_epoch(self.key)
            recorded = self.place.told.recording.poll(
                f"reader-{self.address}", self.key, self.offset, committed=True
            )
            records, answer = yield from self._cursor.fetch()
            if answer is None:
                recorded.refused("UNKNOWN: refused, or no answer in time")
            else:
                given = [(record.offset, bytes(record.value or b"")) for record in records]
                recorded.given(given, self.offset, answer.last_stable_offset)
                self._check_stable(epoch, answer)
                if records:
                    self.place.checkers.read += 1
                    values = tuple(bytes(record.value or b"") for record in records)
                    self.note(Seen(AUDIENCE, self.key, values))
            yield Rest(10, 60)

    def _check_stable(self, leader_epoch: int, answer: Answer) -> None:
        """In a leader epoch it does not go back, and it is where the oldest transaction begins that
        is open as of the high watermark, or before.
        """
        before = self._stable.get(leader_epoch, 0)
        stable = answer.last_stable_offset
        check(
            stable >= before,
            f"{self.key.partition}: a reader was told of last stable offset {before} in leader "
            f"epoch {leader_epoch}, and then of {stable}",
        )
        self._stable[leader_epoch] = stable
        self._observer.check_stable(self.key, answer.high_watermark, stable, "a reader was told")
        for header, _ in iter_batches(answer.records):
            check(
                header.next_offset <= stable,
                f"{self.key.partition}: a reader was given the batch at {header.base_offset}, and "
                f"that the last stable offset is {stable}",
            )
