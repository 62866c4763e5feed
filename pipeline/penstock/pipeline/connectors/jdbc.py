"""PostgreSQL both ways without a Java driver: a source for Spark, and upserts for ``foreachBatch``.

::

    spark.dataSource.register(PostgresDataSource)
    rows = (
        spark.readStream.format("penstock-postgres")
        .option("url", "postgresql://user:secret@host/shop")
        .option("table", "orders").option("mode", "incrementing")
        .option("incrementingColumn", "id").load()
    )
    query.writeStream.foreachBatch(UpsertBatches(url, "totals", keys=["path"])).start()

``url`` is whatever libpq connects by; connections are opened where they are used.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import psycopg
import pyarrow as pa
from psycopg import sql
from pyspark import TaskContext
from pyspark.sql import DataFrame
from pyspark.sql import functions as sf
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    InputPartition,
)
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import (
    BooleanType,
    IntegralType,
    StructField,
    StructType,
    TimestampType,
)

from penstock.pipeline.connectors.database import Database
from penstock.pipeline.connectors.jdbc_queries import (
    CREATE_BATCHES,
    DELETED,
    FIRST_BATCH,
    KEEP_BATCH,
    LOCK_BATCH,
    ORDER,
    Merge,
    Ordering,
    Position,
    SourceColumn,
    column_of,
    identifier,
    ordering_types,
    position_of,
    relation,
    select_end,
    select_rows,
)
from penstock.pipeline.connectors.pacing import Pacing
from penstock.pipeline.connectors.repetition import check_repetition
from penstock.pipeline.connectors.writer_identity import execution_of, writer_of
from penstock.pipeline.errors import (
    ConnectorError,
    OptionError,
    SharedSinkIdError,
    StaleCheckpointError,
)
from penstock.pipeline.functions.columns import quoted
from penstock.pipeline.option_map import OptionMap
from penstock.pipeline.own_schema import refuse_other
from penstock.pipeline.refused_stream import said_later
from penstock.pipeline.sink.replays import Content, plan_of

_WHERE: Final = "the penstock-postgres source"
_ROWS: Final = 10_000
_POLL_INTERVAL_MS: Final = 200
_MODES: Final = {
    "bulk": (),
    "incrementing": ("incrementingColumn",),
    "timestamp": ("timestampColumn",),
    "timestamp+incrementing": ("timestampColumn", "incrementingColumn"),
}


@dataclass(frozen=True, slots=True)
class _SourceOptions:
    database: Database
    table: str | None
    query: str | None
    ordering: Ordering | None
    most_rows: int | None
    poll_interval_ms: int

    @classmethod
    def load(cls, given: Any) -> _SourceOptions:
        options = OptionMap(given, where=_WHERE)
        database = Database(
            options.required("url", "as in postgresql://host/database"),
            options.text("user"),
            options.text("password"),
        )
        which = options.just_one("table", "query")
        mode = options.choice("mode", tuple(_MODES), "bulk")
        columns = {name: options.text(name) for name in ("timestampColumn", "incrementingColumn")}
        delay = options.span_ms("timestampDelay")
        most = options.whole_number("maxRowsPerTrigger", low=1)
        interval_ms = options.span_ms("pollInterval")
        options.finish()
        for name, column in columns.items():
            if (column is not None) != (name in _MODES[mode]):
                what = "is needed in" if column is None else "contradicts"
                raise options.contradiction(f"{name} {what} mode={mode}")
        if delay is not None and columns["timestampColumn"] is None:
            raise options.contradiction(f"timestampDelay contradicts mode={mode}")
        if most is not None and mode == "bulk":
            raise options.contradiction(f"maxRowsPerTrigger contradicts mode={mode}")
        if interval_ms is not None and mode == "bulk":
            raise options.contradiction(f"pollInterval contradicts mode={mode}")
        ordering = Ordering(
            columns["timestampColumn"], columns["incrementingColumn"], delay_ms=delay or 0
        )
        return cls(
            database,
            options.text("table") if which == "table" else None,
            options.text("query") if which == "query" else None,
            ordering if mode != "bulk" else None,
            most,
            _POLL_INTERVAL_MS if interval_ms is None else interval_ms,
        )

    @property
    def what(self) -> str:
        """For messages."""
        return f"{_WHERE}: {'the query' if self.table is None else f'table {self.table}'}"

    @property
    def relation(self) -> sql.Composable:
        return relation(self.table, self.query)


class PostgresDataSource(DataSource):
    """``format("penstock-postgres")``: Connect's JDBC source, for PostgreSQL.

    Options: ``url``, with ``user`` and ``password`` in it or beside it; ``table`` or
    ``query``; ``mode`` bulk (batch queries alone), incrementing,
    timestamp or timestamp+incrementing, with ``incrementingColumn`` and ``timestampColumn``;
    ``timestampDelay`` (a span as 500ms: younger rows wait); ``maxRowsPerTrigger``
    and ``pollInterval`` (200ms: so long an idle stream waits until it asks again), not with bulk.
    """

    @classmethod
    def name(cls) -> str:
        """What ``format`` is given."""
        return "penstock-postgres"

    def schema(self) -> StructType:
        """The columns of the table or query, asked of the database. Raises OptionError, also where
        the mode's columns are not there or have no order.
        """
        options = _SourceOptions.load(self.options)
        columns = _columns(options)
        if options.ordering is not None:
            ordering_types(options.ordering, columns, _WHERE)
        return _schema_of(columns)

    def reader(self, schema: StructType) -> DataSourceReader:
        """For ``spark.read``: all rows, whatever the mode. Raises OptionError."""
        options = _SourceOptions.load(self.options)
        return _BulkReader(_RowReader.checked(options, _columns(options), schema))

    @said_later
    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 - Spark's.
        """For ``spark.readStream``: rows that are new. In the mode bulk its query fails with
        OptionError.
        """
        options = _SourceOptions.load(self.options)
        if options.ordering is None:
            raise OptionError(
                f"{_WHERE}: mode=bulk tells no row from another, so that a stream would never "
                "know which are new; next: name another mode, or use spark.read"
            )
        columns = _columns(options)
        types = ordering_types(options.ordering, columns, _WHERE)
        rows = _RowReader.checked(options, columns, schema)
        return _NewRowsReader(rows, options.ordering, types)


def _columns(options: _SourceOptions) -> list[SourceColumn]:
    with options.database.connect(options.what) as connection:
        cursor = connection.execute(sql.SQL("SELECT * FROM {} LIMIT 0").format(options.relation))
        types = connection.adapters.types
        found = []
        for each in cursor.description or ():
            info = types.get(each.type_code)
            # An array has its element's name: only its own oid tells them apart.
            name = info.name if info is not None and info.oid == each.type_code else ""
            found.append(column_of(each.name, name, each.precision, each.scale))
        return found


def _schema_of(columns: Sequence[SourceColumn]) -> StructType:
    return StructType([StructField(each.name, each.kind) for each in columns])


@dataclass(frozen=True, slots=True)
class _Range(InputPartition):
    start: Position
    end: Position


@dataclass(frozen=True, slots=True)
class _RowReader:
    options: _SourceOptions
    columns: list[SourceColumn]
    schema: StructType

    @classmethod
    def checked(
        cls, options: _SourceOptions, columns: list[SourceColumn], schema: StructType
    ) -> _RowReader:
        """Values come by their position: raises OptionError for a schema that has others."""
        refuse_other(schema, _schema_of(columns), _WHERE)
        return cls(options, columns, schema)

    def read(self, part: _Range, *, everything: bool) -> Iterator[pa.RecordBatch]:
        ordering = None if everything else self.options.ordering
        query = select_rows(self.options.relation, self.columns, ordering, part.start, part.end)
        arrow = to_arrow_schema(self.schema, timezone="UTC")
        with (
            self.options.database.connect(self.options.what) as connection,
            # On the server: the rows need not fit into memory here.
            connection.cursor("penstock_rows") as cursor,
        ):
            cursor.itersize = _ROWS
            cursor.execute(query)
            while rows := cursor.fetchmany(_ROWS):
                arrays = [
                    pa.array(column, each.type)
                    for column, each in zip(zip(*rows, strict=True), arrow, strict=True)
                ]
                yield pa.RecordBatch.from_arrays(arrays, schema=arrow)


class _BulkReader(DataSourceReader):
    def __init__(self, rows: _RowReader) -> None:
        self._rows = rows

    def partitions(self) -> Sequence[InputPartition]:
        return [_Range({}, {})]

    def read(self, partition: Any) -> Iterator[pa.RecordBatch]:
        return self._rows.read(partition, everything=True)


class _NewRowsReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """A position is the last row's: rows after it are new. A batch that is read again, after a
    failure, has the same rows as long as nobody changed them.
    """

    def __init__(self, rows: _RowReader, ordering: Ordering, types: Sequence[str]) -> None:
        self._rows = rows
        self._ordering = ordering
        self._types = types
        self._last: Position | None = None
        self._pacing = Pacing(rows.options.poll_interval_ms)

    def initialOffset(self) -> Position:  # noqa: N802 - Spark's name.
        return {}

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 - Spark's name.
        most = self._rows.options.most_rows
        return ReadAllAvailable() if most is None else ReadMaxRows(most)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - Spark's name.
        self._last = self._end({}, None)

    def latestOffset(self, start: Position, limit: ReadLimit) -> Position:  # noqa: N802 - Spark's.
        self._pacing.wait()
        end = self._end(start, limit.max_rows if isinstance(limit, ReadMaxRows) else None)
        self._pacing.answered(is_new=end != start)
        if self._last is not None and self._is_past(end, self._last):
            # Rows came after the query had begun: they are not this query's.
            return start if self._is_past(start, self._last) else self._last
        return end

    def partitions(self, start: Position, end: Position) -> Sequence[InputPartition]:
        # Of a table that is empty Spark plans a first batch too; what comes then is the next one's.
        return [_Range(start, end)] if start != end else []

    def read(self, partition: Any) -> Iterator[pa.RecordBatch]:
        return self._rows.read(partition, everything=False)

    def _end(self, start: Position, most: int | None) -> Position:
        options = self._rows.options
        with options.database.connect(options.what) as connection:
            row = connection.execute(
                select_end(options.relation, self._ordering, start, most)
            ).fetchone()
        return start if row is None else position_of(self._ordering, row)

    def _is_past(self, one: Position, other: Position) -> bool:
        """Whether ``one`` lies behind ``other``, by the database's own comparison."""
        if not one or one == other:
            return False
        if not other:
            return True

        def row_of(position: Position) -> sql.Composed:
            values = [
                sql.SQL("{}::{}").format(sql.Literal(position[name]), sql.SQL(kind))
                for name, kind in zip(self._ordering.names, self._types, strict=True)
            ]
            return sql.SQL(", ").join(values)

        options = self._rows.options
        with options.database.connect(options.what) as connection:
            found = connection.execute(
                sql.SQL("SELECT ROW({}) > ROW({})").format(row_of(one), row_of(other))
            ).fetchone()
        return bool(found and found[0])


# --- the sink -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class UpsertBatches:
    """Connect's JDBC sink, for PostgreSQL: what ``foreachBatch`` calls to write a batch to a table.

    Each batch is one transaction of the database, which keeps the batch's id in the table
    ``penstock_batches`` too: a batch that comes again, after a crash, changes nothing. Tasks write
    beside each other into a table of the batch's own, from which that transaction takes the rows.

    ``table`` is there, with the frame's columns. Without ``keys`` rows are inserted; with them
    they replace those of the same keys, which need a unique index. ``latest_by`` names a column of
    whole numbers or timestamps, by which the last of a batch's rows for a key counts; it is not
    written. Without it a key may come once a batch. ``deleted`` names a BOOLEAN column that is not
    written either: where it is true the keys' row is deleted. ``sink_id`` tells the writes to one
    table apart: by default it is the query's id, which its checkpoint keeps. Who writes to a table
    twice in one batch gives the writes ids of their own.
    """

    url: str = field(repr=False)
    table: str
    keys: Sequence[str] = ()
    latest_by: str | None = None
    deleted: str | None = None
    sink_id: str | None = None
    checkpoint: str | None = None
    """The query's, by which a batch that comes again is known exactly; else by its rows' number."""
    checks_replays: bool = True
    """Whether what comes under a committed number has to be what was written under it."""
    user: str | None = None
    password: str | None = field(default=None, repr=False)
    """Both in place of those in ``url``."""

    def __post_init__(self) -> None:
        """Raises OptionError for what does not go together."""
        identifier(self.table)
        if isinstance(self.keys, str):
            raise OptionError("keys is a list of columns' names, and not one text")
        if not self.keys and (self.latest_by or self.deleted):
            raise OptionError(
                "latest_by and deleted are about rows with keys; next: name the keys as well"
            )

    def __call__(self, frame: DataFrame, batch_id: int) -> None:
        """Write a batch, once. Raises OptionError for a frame that does not fit,
        StaleCheckpointError for a batch before the last one and for another one of its number,
        SharedSinkIdError where this execution of a ``foreachBatch`` has written to the table under
        this id already, and ConnectorError for what the database refuses, and for a table
        ``penstock_batches`` that is not the sink's.
        """
        database = Database(self.url, self.user, self.password)
        what = f"the sink for table {self.table}"
        writer = _Writer(writer_of(frame, self.sink_id), self.table, execution_of(frame))
        plan = plan_of(self.checkpoint, batch_id)
        with database.connect(what) as connection:
            writer.begin(connection)
            before = writer.written(connection, batch_id)
            if before is None:
                merge, staged = self._plan(frame)
                staging = _new_staging(connection, writer, merge)
        if before is not None:
            # Without the lock, for it may take long to count.
            self._check_same(before, plan, frame.count, batch_id)
            return
        done = _stage(staged, database, staging, merge).collect()
        content = Content(sum(row.rows for row in done), plan)
        with database.connect(what) as connection:
            # Another driver with the same checkpoint may have come before: the row's lock decides.
            before = writer.written(connection, batch_id)
            if before is None:
                for statement in merge.apply(staging):
                    connection.execute(statement, [[row.task for row in done]])
                kept = content.encode().decode()
                connection.execute(KEEP_BATCH, [batch_id, writer.execution, kept, *writer.key])
            connection.execute(sql.SQL("DROP TABLE {}").format(sql.Identifier(staging)))
        if before is not None:
            self._check_same(before, plan, lambda: content.rows, batch_id)

    def _check_same(self, before: bytes, plan: str, rows: Callable[[], int], batch_id: int) -> None:
        """Raises StaleCheckpointError where what is committed under the number is another batch."""
        if self.checks_replays:
            what = f"batch {batch_id} of table {self.table}"
            check_repetition(Content.decode(before), plan, rows, what)

    def _plan(self, frame: DataFrame) -> tuple[Merge, DataFrame]:
        """How to merge, and the frame with the columns that staging has."""
        apart = [name for name in (self.latest_by, self.deleted) if name is not None]
        for name in (*self.keys, *apart):
            if name not in frame.columns:
                raise OptionError(
                    f"the batch has no column '{name}'; next: name one of "
                    f"{', '.join(frame.columns)}"
                )
        columns = tuple(name for name in frame.columns if name not in apart or name in self.keys)
        order, deleted = sf.lit(0).cast("bigint"), sf.lit(False)
        if self.latest_by is not None:
            kind = frame.schema[self.latest_by].dataType
            order = sf.col(quoted(self.latest_by))
            if isinstance(kind, TimestampType):
                order = sf.unix_micros(order)
            elif not isinstance(kind, IntegralType):
                raise OptionError(
                    f"latest_by={self.latest_by} is {kind.simpleString()}, which has no plain "
                    "order; next: name a whole number or a timestamp, such as the offset"
                )
        if self.deleted is not None:
            if not isinstance(frame.schema[self.deleted].dataType, BooleanType):
                raise OptionError(f"deleted={self.deleted} is no BOOLEAN column; next: cast it")
            deleted = sf.coalesce(sf.col(quoted(self.deleted)), sf.lit(False))
        merge = Merge(
            self.table, columns, tuple(self.keys), self.latest_by is not None, bool(self.deleted)
        )
        return merge, frame.select(
            *[sf.col(quoted(name)) for name in columns],
            order.cast("bigint").alias(ORDER),
            deleted.alias(DELETED),
        )


@dataclass(frozen=True, slots=True)
class _Writer:
    """Whose batches a row of ``penstock_batches`` counts: those of a sink id for one table."""

    sink_id: str
    table: str
    execution: str | None

    @property
    def key(self) -> tuple[str, str]:
        return self.sink_id, self.table

    def begin(self, connection: Any) -> None:
        """Have the row, in a transaction of its own."""
        try:
            with connection.transaction():
                # Of two that create a table at once PostgreSQL lets one fail.
                connection.execute("SELECT pg_advisory_xact_lock(hashtext('penstock_batches'))")
                connection.execute(CREATE_BATCHES)
                connection.execute(FIRST_BATCH, self.key)
        except psycopg.errors.UndefinedColumn as error:
            raise ConnectorError(
                "the database's table penstock_batches has other columns than the sink's: another "
                "program's, or that of a Penstock before its release; nothing was written; next: "
                "rename or drop it, after which a batch that was under way would be written twice"
            ) from error

    def written(self, connection: Any, batch_id: int) -> bytes | None:
        """What was kept of this batch where it is in the table already; None where it is not.
        Nobody else writes as this sink until the transaction ends.
        """
        last, execution, content = connection.execute(LOCK_BATCH, self.key).fetchone()
        if batch_id < last:
            raise StaleCheckpointError(
                f"sink {self.sink_id} has written batch {last} to {self.table}, and batch "
                f"{batch_id} comes now: the query's checkpoint is older than the table, or another "
                "query writes as the same sink; next: name another sink_id, or use the right "
                "checkpoint"
            )
        if batch_id == last and execution is not None and execution == self.execution:
            raise SharedSinkIdError(
                f"another write of this foreachBatch has written batch {batch_id} to {self.table} "
                f"as sink {self.sink_id} already, and after a crash the two could not be told "
                "apart; nothing was written by this one; next: leave the first write as it is, "
                "give this one its own sink_id, which must stay the same from then on, and start "
                "the query again"
            )
        return content.encode() if batch_id == last else None


def _new_staging(connection: Any, writer: _Writer, merge: Merge) -> str:
    """A table for this attempt, in place of those that attempts before it left."""
    # No name in PostgreSQL has a NUL, so that no two writers share the text.
    key = f"{writer.table}\0{writer.sink_id}"
    prefix = f"penstock_staging_{hashlib.sha256(key.encode()).hexdigest()[:16]}_"
    left = connection.execute(
        "SELECT tablename FROM pg_tables WHERE schemaname = current_schema() "
        "AND starts_with(tablename, %s)",
        [prefix],
    )
    for (name,) in left.fetchall():
        connection.execute(sql.SQL("DROP TABLE {}").format(sql.Identifier(name)))
    name = prefix + uuid.uuid4().hex[:8]
    connection.execute(merge.create_staging(name))
    return name


def _stage(frame: DataFrame, database: Database, staging: str, merge: Merge) -> DataFrame:
    """Have the frame's tasks write into the staging table; who of them counts is in the result."""

    def write(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        context = TaskContext.get()
        assert context is not None
        # Unlike a partition's number it tells attempts apart, of which only one counts.
        task, rows = context.taskAttemptId(), 0
        with (
            database.connect(f"the sink for table {merge.table}") as connection,
            connection.cursor() as cursor,
            cursor.copy(merge.copy_into(staging)) as copy,
        ):
            for batch in batches:
                rows += batch.num_rows
                for *values, order, deleted in zip(
                    *(column.to_pylist() for column in batch.columns), strict=True
                ):
                    copy.write_row((*values, task, order or 0, deleted))
        yield pa.RecordBatch.from_pydict({
            "task": pa.array([task], pa.int64()), "rows": pa.array([rows], pa.int64()),
        })  # fmt: skip

    return frame.mapInArrow(write, "task bigint, rows bigint")
