"""What clients of a simulated cluster do and are told, as the chaos harness writes histories.

So the harness's checkers, which know a cluster by its clients alone, judge simulated runs as well.
The format is in docs/internals/chaos.md.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from typing import Any, Final, NamedTuple

from penstock.chaos.history import FINAL, Event, History, Type
from penstock.chaos.simulator.scheduler import Scheduler
from penstock.chaos.simulator.serving import Answer
from penstock.wire.ids import TopicId, TopicIdPartition

_NS_A_MS: Final = 1_000_000
_NO_ANSWER: Final = "NETWORK_EXCEPTION: no answer in time"
_NOBODYS: Final = "?nobody"
"""The producer of records that no client has written: none is called so."""


def refusal(answer: Answer | None) -> str:
    """Why an answer is none, as histories have it."""
    if answer is None or answer.error is None:
        return _NO_ANSWER
    return f"{answer.error.name}: refused"


class Written(NamedTuple):
    """A record as its producer knows it: ``number`` counts in this partition."""

    producer: str
    number: int


class Underway:
    """An operation that was begun. ``ok``, ``fail`` or ``info`` end it, once; or nothing does."""

    __slots__ = ("_f", "_final", "_free", "_key", "_process", "_recording", "asked")

    def __init__(
        self,
        recording: Recording,
        process: str,
        free: list[str],
        what: tuple[str, dict[str, Any], TopicIdPartition | None, bool],
    ) -> None:
        self._recording = recording
        self._process = process
        self._free = free
        self._f, self.asked, self._key, self._final = what
        self._note(Type.INVOKE, self.asked, "")

    def ok(self, value: dict[str, Any] | None = None) -> None:
        """It is so, and this came of it."""
        self._end(Type.OK, value, "")

    def fail(self, error: str) -> None:
        """It is not so, and never will be."""
        self._end(Type.FAIL, None, error)

    def _end(self, type_: Type, value: dict[str, Any] | None, error: str) -> None:
        self._note(type_, value, error)
        self._free.append(self._process)

    def _note(self, type_: Type, value: dict[str, Any] | None, error: str) -> None:
        phase = FINAL if self._final else ""
        self._recording.note(
            self._key, Event(0, self._process, type_, self._f, value, error, phase)
        )


class Recording:
    """The events of one run. Where it is not ``kept``, nothing is written down.

    Of clients that have several operations under way each is a process of its own: ``producer-7``,
    ``producer-7.1`` and so on.
    """

    def __init__(self, scheduler: Scheduler, *, kept: bool) -> None:
        self.kept: Final = kept
        self._scheduler = scheduler
        self._events: list[tuple[TopicIdPartition | None, Event]] = []
        self._last_t = -1
        self._free: dict[str, list[str]] = {}
        self._processes: Counter[str] = Counter()
        self._names: dict[TopicId, str] = {}
        self._topics: Counter[str] = Counter()
        self._written: dict[bytes, Written] = {}
        self._numbers: dict[tuple[str, TopicIdPartition], int] = defaultdict(int)

    # Names.

    def topics_are(self, topics: Iterable[tuple[TopicId, str]]) -> None:
        """These topics are there now, and no others: whose name comes again gets another one."""
        if not self.kept:
            return
        there = dict(topics)
        for topic_id, name in there.items():
            if topic_id not in self._names:
                self._topics[name] += 1
                again = self._topics[name]
                self._names[topic_id] = name if again == 1 else f"{name}.{again}"
        for topic_id in [one for one in self._names if one not in there]:
            self.begin("somebody", "delete", {"topic": self._names.pop(topic_id)}).ok()

    def topic_of(self, key: TopicIdPartition) -> str:
        """The name of its topic, one for each that ever was."""
        return self._names.get(TopicId(key.topic_id), key.topic_id.hex())

    def name_of(self, key: TopicIdPartition) -> str:
        """As histories name it."""
        return f"{self.topic_of(key)}-{key.partition}"

    # Operations.

    def begin(
        self,
        process: str,
        f: str,
        asked: dict[str, Any],
        key: TopicIdPartition | None = None,
        *,
        final: bool = False,
    ) -> Underway:
        """An operation begins, about a partition where that is known."""
        free = self._free.setdefault(process, [])
        if free:
            name = free.pop()
        else:
            number = self._processes[process]
            self._processes[process] += 1
            name = f"{process}.{number}" if number else process
        return Underway(self, name, free, (f, asked, key, final))

    def note(self, key: TopicIdPartition | None, event: Event) -> None:
        """Write it down, after all that is here."""
        if not self.kept:
            return
        # No two at a time: what was first in the queue of one millisecond was first.
        t = max(self._scheduler.now_ms * _NS_A_MS, self._last_t + 1)
        self._last_t = t
        stamped = Event(t, event.p, event.type, event.f, event.value, event.error, event.phase)
        self._events.append((key, stamped))

    def append(
        self,
        producer: str,
        key: TopicIdPartition,
        values: Sequence[bytes],
        *,
        process: str,
        acks: str = "all",
        txn: str = "",
    ) -> Append:
        """A producer sends a batch for the first time."""
        first = self._numbers[producer, key]
        self._numbers[producer, key] = first + len(values)
        if self.kept:
            for number, value in enumerate(values, first):
                self._written[value] = Written(producer, number)
        asked = {
            "topic": self.topic_of(key),
            "partition": key.partition,
            "producer": producer,
            "acks": acks,
            "first": first,
            "count": len(values),
            **({"txn": txn} if txn else {}),
        }
        return Append(self.begin(process, "append", asked, key))

    def poll(
        self, process: str, key: TopicIdPartition, at: int, *, committed: bool, final: bool = False
    ) -> Poll:
        """A reader asks for what lies at an offset of a partition."""
        asked = {
            "topic": self.topic_of(key),
            "positions": {self.name_of(key): at},
            "isolation": "read_committed" if committed else "read_uncommitted",
        }
        return Poll(self, self.begin(process, "poll", asked, key, final=final), key)

    def moved(self, process: str, key: TopicIdPartition, offset: int) -> None:
        """A reader goes on elsewhere."""
        asked = {"topic": self.topic_of(key), "partition": key.partition, "offset": offset}
        self.begin(process, "seek", asked, key).ok({"offset": offset})

    def runs(
        self, key: TopicIdPartition, records: Iterable[tuple[int, bytes]]
    ) -> list[list[object]]:
        """What was read of a partition, by offset, as histories have it."""
        runs: list[list[Any]] = []
        partition = self.name_of(key)
        for offset, value in records:
            producer, number = self._written.get(value, Written(_NOBODYS, 0))
            last = runs[-1] if runs else None
            if (
                last is not None
                and last[2] == producer
                and (last[1] + last[4], last[3] + last[4]) == (offset, number)
            ):
                last[4] += 1
            else:
                runs.append([partition, offset, producer, number, 1])
        return runs

    # What it comes to.

    def history(self, without: Collection[TopicIdPartition] = ()) -> History:
        """All that was written down, but for what is about these partitions."""
        return History(event for key, event in self._events if key not in without)


class Append:
    """A batch on its way."""

    __slots__ = ("_underway",)

    def __init__(self, underway: Underway) -> None:
        self._underway = underway

    def acknowledged(self, offset: int) -> None:
        """It is there, from an offset on."""
        asked = self._underway.asked
        self._underway.ok({"runs": [[asked["first"], asked["count"], offset]]})

    def sent(self) -> None:
        """Nobody will say what came of it."""
        self._underway.ok({})


class Poll:
    """Records that were asked for."""

    __slots__ = ("_key", "_recording", "_underway")

    def __init__(self, recording: Recording, underway: Underway, key: TopicIdPartition) -> None:
        self._recording = recording
        self._underway = underway
        self._key = key

    def given(self, records: Iterable[tuple[int, bytes]], after: int, end: int) -> None:
        """These came, by offset; the reader goes on at ``after``, and could read up to ``end``."""
        if self._recording.kept:
            name, runs = (
                self._recording.name_of(self._key),
                self._recording.runs(self._key, records),
            )
            self._underway.ok({"runs": runs, "positions": {name: after}, "ends": {name: end}})

    def refused(self, error: str) -> None:
        """Nothing came, and the reader is where it was."""
        self._underway.fail(error)
