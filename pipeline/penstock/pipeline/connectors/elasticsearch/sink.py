"""The sink "penstock-elasticsearch" as Spark calls it."""

from __future__ import annotations

import json
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa
from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)
from pyspark.sql.types import BinaryType, StringType, StructType

from penstock.client import Producer
from penstock.client.config import ProducerConfig
from penstock.pipeline.connectors.elasticsearch.actions import Action, Refused, actions
from penstock.pipeline.connectors.elasticsearch.bulk import BulkWriter
from penstock.pipeline.connectors.elasticsearch.options import (
    PLACE,
    WHERE,
    ElasticsearchOptions,
    OnError,
)
from penstock.pipeline.connectors.elasticsearch.transport import HttpTransport
from penstock.pipeline.errors import ConnectorError, OptionError

_log: Final = logging.getLogger(__name__)
_SHOWN: Final = 5

Refuse = Callable[[list[Refused]], None]


class ElasticsearchDataSource(DataSource):
    """``format("penstock-elasticsearch")``: a sink, for streams and for batches."""

    @classmethod
    def name(cls) -> str:
        """What ``format`` is given."""
        return "penstock-elasticsearch"

    def writer(self, schema: StructType, overwrite: bool) -> BatchWriter:
        """For ``df.write``, in ``foreachBatch`` too. Raises OptionError."""
        if overwrite:
            raise OptionError(
                f"{WHERE}: mode 'overwrite' would delete an index; next: write with "
                "mode('append'), which replaces documents of the same id"
            )
        return BatchWriter(self._load(schema))

    def streamWriter(self, schema: StructType, overwrite: bool) -> StreamWriter:  # noqa: N802 - Spark's.
        """For ``df.writeStream``. Raises OptionError.

        ``overwrite`` says that the output mode is complete: each batch writes the whole result,
        over the documents of the batch before.
        """
        return StreamWriter(self._load(schema))

    def _load(self, schema: StructType) -> ElasticsearchOptions:
        options = ElasticsearchOptions.load(self.options, schema.fieldNames())
        if not options.from_columns and not isinstance(
            schema["value"].dataType, StringType | BinaryType
        ):
            raise OptionError(
                f"{WHERE}: column value is {schema['value'].dataType.simpleString()}, and a "
                "document is string or binary; next: write the row's columns with document=columns"
            )
        return options


@dataclass(frozen=True, slots=True)
class Written(WriterCommitMessage):
    """What became of the rows of one task."""

    written: int
    superseded: int
    """Changed nothing, for their documents were there in that version or a newer one."""
    refused: int
    """Set aside: see ``onError``."""


class _Writer:
    """What both kinds of writes have in common. There is nothing to commit or to take back: what
    is written is written, and the same again when it is written again.
    """

    def __init__(self, options: ElasticsearchOptions) -> None:
        self._options = options

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Written:
        """In a task. Raises ConnectorError."""
        return write(self._options, iterator)


class BatchWriter(_Writer, DataSourceArrowWriter):
    """Of ``df.write``."""

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """In the driver, when all tasks are done."""
        _tell(messages)


class StreamWriter(_Writer, DataSourceStreamArrowWriter):
    """Of ``df.writeStream``."""

    def commit(
        self,
        messages: list[WriterCommitMessage | None],
        batchId: int,  # noqa: N803 - Spark's.
    ) -> None:
        """In the driver, when all tasks of a batch are done."""
        _tell(messages)


def _tell(messages: list[WriterCommitMessage | None]) -> None:
    tasks = [entry for entry in messages if isinstance(entry, Written)]
    if refused := sum(task.refused for task in tasks):
        _log.warning("%s: %d rows were refused by Elasticsearch and set aside", WHERE, refused)
    if superseded := sum(task.superseded for task in tasks):
        _log.warning(
            "%s: %d of %d rows changed nothing: their documents are there in that version or a "
            "higher one. So it is when a batch is written again; otherwise see that versions only "
            "grow, which a topic's offsets do not where it was made anew or got more partitions",
            WHERE, superseded, sum(task.written + task.superseded + task.refused for task in tasks),
        )  # fmt: skip


def write(options: ElasticsearchOptions, batches: Iterator[pa.RecordBatch]) -> Written:
    """All rows of one task. Raises ConnectorError."""
    with ExitStack() as stack:
        refused: Counter[str] = Counter()
        handle = _handler(options, stack)

        def refuse(rows: list[Refused]) -> None:
            refused["rows"] += len(rows)
            handle(rows)

        transport = stack.enter_context(
            closing(HttpTransport(options.access, options.ingest_pipeline))
        )
        writer = BulkWriter(
            transport, options.limits, options.method, refuse,
            clock=time.monotonic, wait=time.sleep,
        )  # fmt: skip
        for batch in batches:
            writer.write(_good(batch.to_pylist(), options, refuse))
    return Written(writer.written, writer.superseded, refused["rows"])


def _good(
    rows: list[dict[str, Any]], options: ElasticsearchOptions, refuse: Refuse
) -> Iterator[Action]:
    for entry in actions(rows, options):
        if isinstance(entry, Refused):
            refuse([entry])
        else:
            yield entry


def _handler(options: ElasticsearchOptions, stack: ExitStack) -> Refuse:
    if options.on_error is OnError.FAIL:
        return _fail
    if options.on_error is OnError.SKIP:
        return _skip
    assert options.producer is not None
    assert options.dead_letter_topic is not None
    settings = options.producer
    # Closing it waits for the letters, and raises where one was not delivered.
    producer = stack.enter_context(
        Producer(settings.bootstrap_servers, **settings.of(ProducerConfig))
    )
    topic = options.dead_letter_topic

    def send(rows: list[Refused]) -> None:
        for entry in rows:
            row = entry.row
            value = row["value"] if "value" in row else json.dumps(row, default=str)
            producer.send(topic, _bytes(value), _bytes(row.get("key")), _headers(entry))

    return send


def _bytes(value: Any) -> bytes | None:
    if value is None or isinstance(value, bytes):
        return value
    return str(value).encode()


def _headers(entry: Refused) -> dict[str, bytes]:
    headers = {"error.type": entry.kind, "error.reason": entry.reason}
    headers |= {name: str(entry.row[name]) for name in PLACE if entry.row.get(name) is not None}
    if entry.id is not None and entry.index is not None:
        headers |= {"index": entry.index, "id": entry.id}
    return {f"penstock.{name}": value.encode() for name, value in headers.items()}


def _fail(rows: list[Refused]) -> None:
    shown = "; ".join(str(entry) for entry in rows[:_SHOWN])
    more = f"; and {len(rows) - _SHOWN} more" if len(rows) > _SHOWN else ""
    raise ConnectorError(
        f"{WHERE}: rows are refused for good: {shown}{more}; next: mend the rows or the mapping of "
        "the index, or set such rows aside with onError=deadLetter"
    )


def _skip(rows: list[Refused]) -> None:
    for entry in rows[:_SHOWN]:
        _log.warning("%s: skipped %s", WHERE, entry)
