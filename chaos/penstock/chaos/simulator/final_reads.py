"""Reads everything once more when a run is over: what clients find then is what is left."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from penstock.chaos.simulator.recording import refusal
from penstock.chaos.simulator.serving import Answer, FetchRequest
from penstock.chaos.simulator.transactions.group_actors import ask_stable_position
from penstock.chaos.simulator.transactions.positions import GROUP
from penstock.chaos.simulator.transactions.reading import WHOLE_LOG_BYTES, committed_records
from penstock.chaos.simulator.transactions.scripts import (
    Script,
    ScriptedProcess,
    ScriptPlace,
    Sleep,
)
from penstock.wire.errors import ErrorCode
from penstock.wire.ids import TopicIdPartition
from penstock.wire.records import decode_batch, iter_batches

ADDRESS: Final = 1_000_000
"""No other client has it."""


class FinalReads(ScriptedProcess):
    """One reader of each isolation goes through every partition, from its beginning to its end.

    ``transactional``: clients wrote transactions, in which a group moved its positions.
    """

    def __init__(
        self, place: ScriptPlace, keys: Sequence[TopicIdPartition], *, transactional: bool
    ) -> None:
        super().__init__(ADDRESS, place)
        self._recording = place.told.recording
        self._keys = keys
        self._transactional = transactional
        self.run(self._read())

    @property
    def is_done(self) -> bool:
        """All was read."""
        return not self.running

    def _read(self) -> Script:
        # First without isolation: ends that were seen then, readers of committed records must see.
        for committed in (False, True) if self._transactional else (False,):
            for key in self._keys:
                yield from self._read_partition(key, committed=committed)
        if self._transactional and self._keys:
            yield from self._read_positions()

    def _read_partition(self, key: TopicIdPartition, *, committed: bool) -> Script:
        process = "final-committed" if committed else "final"
        asked = {
            "topic": self._recording.topic_of(key),
            "partition": key.partition,
            "where": "earliest",
        }
        seek = self._recording.begin(process, "seek", asked, key, final=True)
        at, end = 0, -1
        while True:
            answer = yield from self._fetch(key, at, committed=committed)
            if answer is not None and answer.error is ErrorCode.OFFSET_OUT_OF_RANGE:
                at = answer.log_start_offset
            elif answer is not None and answer.error is None:
                break
            yield Sleep(20, 100)
        seek.ok({"offset": at})
        while end < 0 or at < end:
            poll = self._recording.poll(process, key, at, committed=committed, final=True)
            answer = yield from self._fetch(key, at, committed=committed)
            if answer is None or answer.error is not None:
                poll.refused(refusal(answer))
                yield Sleep(20, 100)
                continue
            end = answer.last_stable_offset if committed else answer.high_watermark
            began, given = at, []
            for header, _ in iter_batches(answer.records):
                at = max(at, header.next_offset)
            given = [one for one in _records(answer, committed=committed) if one[0] >= began]
            poll.given(given, at, end)

    def _fetch(self, key: TopicIdPartition, at: int, *, committed: bool) -> Script:
        request = FetchRequest(key, at, self.leader_epoch(key), committed, WHOLE_LOG_BYTES)
        answer = yield from self.ask(key, "fetch", request)
        return answer

    def _read_positions(self) -> Script:
        asked = self._recording.begin("final", "committed-offsets", {"group": GROUP}, final=True)
        offsets: dict[str, int] = {}
        for key in self._keys:
            topic = self.place.topic_of(key)
            while (offset := (yield from ask_stable_position(self, topic, key))) is None:
                yield Sleep(20, 100)
            if offset >= 0:
                offsets[self._recording.name_of(key)] = offset
        asked.ok({"offsets": offsets})


def _records(answer: Answer, *, committed: bool) -> list[tuple[int, bytes]]:
    if committed:
        found = list(committed_records(answer.records, answer.aborted))
    else:
        found = [
            record
            for header, view in iter_batches(answer.records)
            if not header.is_control
            for record in decode_batch(view)
        ]
    return [(record.offset, bytes(record.value or b"")) for record in found]
