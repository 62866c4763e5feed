"""What the queries have written, read without Spark, and how it differs from what was expected."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import pyarrow.parquet
from batch import Expected, Row

from penstock.client import Consumer, ConsumerRecord, RequestTimedOutError, TopicPartition

TIMES: Final = {"time", "begun", "ended", "since"}
_PATIENCE_S: Final = 60.0
_POLL_MS: Final = 100


@dataclass(frozen=True)
class Comparison:
    """One output beside what was expected of it."""

    name: str
    expected: int
    found: int
    missing: list[Any]
    """What was expected and is not there: lost."""
    surplus: list[Any]
    """What is there and was not expected, or once too often: doubled or wrong."""

    @property
    def agrees(self) -> bool:
        """Whether it is what was expected, no row more and no row less."""
        return not self.missing and not self.surplus


def compare(bootstrap: str, minutes: Path, expected: Expected) -> list[Comparison]:
    """Every output of the queries, read back and compared row by row."""

    def rows(topic: str) -> list[Row]:
        return [row_of(record) for record in read_topic(bootstrap, topic)]

    letters = [(record.value, *_place(record)) for record in read_topic(bootstrap, "dead-letters")]
    wanted = [(one.line, one.partition, one.offset) for one in expected.dead_letters]
    return [
        _compare("requests", expected.requests, rows("requests")),
        difference("dead-letters", wanted, letters, lambda letter: letter),
        _compare("minutes", expected.minutes, read_parquet(minutes)),
        _compare("sessions", expected.sessions, rows("sessions")),
        _compare_upserts("paths", expected.paths, read_topic(bootstrap, "paths"), "requests"),
        _compare_upserts("alerts", expected.alerts, read_topic(bootstrap, "alerts"), "missing"),
    ]


def difference(
    name: str,
    expected: Iterable[Any],
    found: Iterable[Any],
    frozen: Callable[[Any], Hashable],
) -> Comparison:
    """Two collections whose order does not matter, and in which rows may well be alike."""
    wanted, there = Counter(map(frozen, expected)), Counter(map(frozen, found))
    return Comparison(
        name,
        wanted.total(),
        there.total(),
        sorted((wanted - there).elements(), key=str),
        sorted((there - wanted).elements(), key=str),
    )


def _compare(name: str, expected: Iterable[Row], found: Iterable[Row]) -> Comparison:
    return difference(name, expected, found, lambda row: tuple(sorted(row.items())))


def _compare_upserts(
    name: str, expected: Mapping[str, Row], records: Iterable[ConsumerRecord], count: str
) -> Comparison:
    """The last record of each key; and those before it have to count up to it, each once."""
    last: dict[str, Row] = {}
    again: list[Row] = []
    for record in records:
        key, row = (record.key or b"").decode(), row_of(record)
        if key in last and row[count] <= last[key][count]:
            again.append(row)
        last[key] = row
    kept = _compare(name, expected.values(), last.values())
    keys = [key for key in last if key not in expected]
    surplus = [*kept.surplus, *keys, *again]
    return Comparison(name, kept.expected, kept.found, kept.missing, surplus)


def row_of(record: ConsumerRecord) -> Row:
    """What its value, a JSON object, says, with times as such."""
    row: Row = json.loads(record.value or b"null")
    return {
        name: datetime.fromisoformat(value) if name in TIMES else value
        for name, value in row.items()
    }


def _place(record: ConsumerRecord) -> tuple[int, int]:
    """Where a dead letter was a line."""
    headers = {key: value or b"" for key, value in record.headers}
    return int(headers["partition"]), int(headers["offset"])


def read_topic(bootstrap: str, topic: str) -> list[ConsumerRecord]:
    """All that is committed in a topic that nobody writes to any more, by partition and offset.

    Raises RequestTimedOutError where it cannot be read within a minute.
    """
    found: list[ConsumerRecord] = []
    until = time.monotonic() + _PATIENCE_S
    with (
        Consumer(bootstrap, isolation_level="read_committed") as consumer,
        Consumer(bootstrap, isolation_level="read_uncommitted") as anything,
    ):
        partitions = [TopicPartition(topic, number) for number in consumer.partitions_for(topic)]
        consumer.assign(partitions)
        consumer.seek_to_beginning(*partitions)
        # To the very end: there the marks of the last transactions have come as well.
        ends = anything.end_offsets(partitions)
        while any(consumer.position(one) < end for one, end in ends.items()):
            if time.monotonic() > until:
                raise RequestTimedOutError(f"{topic} was not read up to {ends} in time")
            found += consumer.poll(_POLL_MS, max_records=100_000)
    return sorted(found, key=lambda record: (record.partition, record.offset))


def read_parquet(directory: Path) -> list[Row]:
    """The rows of the files that a query of Spark has committed.

    Files alone say nothing: one that a killed task has left behind is no part of the table. What is
    lies in ``_spark_metadata``: a file a batch, and now and then one of all batches until then.
    """
    log = directory / "_spark_metadata"
    batches = {int(path.stem): path for path in sorted(log.glob("[0-9]*"), reverse=True)}
    compacted = max((n for n, path in batches.items() if path.suffix), default=-1)
    names = {
        Path(json.loads(entry)["path"]).name
        for number, path in batches.items()
        if number >= compacted
        for entry in path.read_text().splitlines()[1:]
    }
    found: list[Row] = []
    for name in sorted(names):
        found += pyarrow.parquet.read_table(directory / name).to_pylist()
    return [{**row, "minute": row["minute"].astimezone(UTC)} for row in found]
