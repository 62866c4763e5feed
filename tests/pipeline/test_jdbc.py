"""PostgreSQL both ways, against a real server."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import psycopg
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.datasource import ReadAllAvailable

from penstock.pipeline.connectors.jdbc import PostgresDataSource, UpsertBatches
from penstock.pipeline.errors import ConnectorError, OptionError, StaleCheckpointError
from tests.pipeline.postgres import programs, running_postgres

pytestmark = pytest.mark.skipif(
    programs() is None, reason="PostgreSQL is not installed: apt-get install postgresql"
)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with running_postgres() as found:
        yield found


@pytest.fixture
def database(url: str) -> Iterator[Any]:
    with psycopg.connect(url, autocommit=True) as connection:
        yield connection
        connection.execute("DROP SCHEMA public CASCADE; CREATE SCHEMA public")


def source(spark: SparkSession, url: str, *, stream: bool, **options: Any) -> DataFrame:
    spark.dataSource.register(PostgresDataSource)
    reader = spark.readStream if stream else spark.read
    return reader.format("penstock-postgres").options(url=url, **options).load()


def run(frame: DataFrame, checkpoint: Path, write: Any) -> None:
    query = (
        frame.writeStream.foreachBatch(write)
        .option("checkpointLocation", str(checkpoint))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()


# --- the source -----------------------------------------------------------------------------


def test_every_type_is_read(spark: SparkSession, url: str, database: Any) -> None:
    database.execute("""
        CREATE TABLE everything (
            a bool, b int2, c int4, d int8, e float4, f float8, g numeric(9,2), h numeric, i text,
            j varchar(5), k bytea, l date, m timestamp, n timestamptz, o uuid, p jsonb, q int[]);
        INSERT INTO everything VALUES (true, 1, 2, 3, 1.5, 2.5, 12.50, 0.1, 'ü', 'v', '\\x00ff',
            '2026-03-29', '2026-03-29 02:30:00.123456', '2026-03-29 02:30:00.123456+00',
            '12345678-1234-5678-1234-567812345678', '{"a": 1}', '{1,2}');
        INSERT INTO everything VALUES (null)""")
    frame = source(spark, url, stream=False, table="everything")
    assert [each.dataType.simpleString() for each in frame.schema] == [
        "boolean", "smallint", "int", "bigint", "float", "double", "decimal(9,2)",
        "decimal(38,18)", "string", "string", "binary", "date", "timestamp_ntz", "timestamp",
        "string", "string", "string",
    ]  # fmt: skip
    full, empty = frame.selectExpr("*", "unix_micros(n) as micros").drop("n").collect()
    instant = datetime.datetime(2026, 3, 29, 2, 30, 0, 123_456, tzinfo=datetime.UTC)
    at = instant.replace(tzinfo=None)
    assert tuple(full) == (
        True, 1, 2, 3, 1.5, 2.5, Decimal("12.50"), Decimal("0.1"), "ü", "v", b"\x00\xff",
        at.date(), at, "12345678-1234-5678-1234-567812345678", '{"a": 1}', "{1,2}",
        int(instant.timestamp() * 1_000_000),
    )  # fmt: skip
    assert set(empty) == {None}
    counted = source(spark, url, stream=False, query="select count(*) as n from everything")
    assert counted.collect()[0].n == 2


@pytest.mark.parametrize(
    "column",
    # No double tells the second one's numbers apart.
    [("int8", Decimal(0)), ("numeric", Decimal("90071992547409921.25"))],
)
def test_new_rows_are_read_once_by_their_number(
    spark: SparkSession, url: str, database: Any, tmp_path: Path, column: tuple[str, Decimal]
) -> None:
    kind, base = column
    database.execute(f"CREATE TABLE orders (id {kind} PRIMARY KEY, name text)")
    rows = f"SELECT {base} + n, 'n' || n FROM generate_series(1, 25) AS n"
    database.execute(f"INSERT INTO orders {rows}")
    batches: list[list[int]] = []

    def keep(frame: DataFrame, batch_id: int) -> None:
        batches.append(sorted(row.id - base for row in frame.collect()))
        # It comes while the query runs, and is the next one's.
        database.execute(f"INSERT INTO orders VALUES ({base} + 100, 'late') ON CONFLICT DO NOTHING")

    frame = source(
        spark, url, stream=True, table="public.orders", mode="incrementing",
        incrementingColumn="id", maxRowsPerTrigger=10,
    )  # fmt: skip
    run(frame, tmp_path, keep)
    assert batches == [list(range(1, 11)), list(range(11, 21)), list(range(21, 26))]
    run(frame, tmp_path, keep)
    assert batches[3:] == [[100]]
    run(frame, tmp_path, keep)
    assert len(batches) == 4


def test_times_without_a_zone_are_of_the_zone_of_the_databases_sessions(
    url: str, database: Any
) -> None:
    database.execute("CREATE TABLE orders (changed timestamp)")
    database.execute("INSERT INTO orders VALUES (now() AT TIME ZONE 'UTC')")
    options = {"table": "orders", "mode": "timestamp", "timestampColumn": "changed"}
    found = []
    for zone in ("America/New_York", "UTC"):
        made = PostgresDataSource({"url": f"{url}?options=-c%20TimeZone%3D{zone}", **options})
        reader = made.streamReader(made.schema())
        found.append(reader.latestOffset(reader.initialOffset(), ReadAllAvailable()))
    # What was written in UTC is hours away for New York.
    assert [bool(offset) for offset in found] == [False, True]


def test_a_table_that_is_empty_at_first(
    spark: SparkSession, url: str, database: Any, tmp_path: Path
) -> None:
    database.execute("CREATE TABLE orders (id int8)")
    found: list[int] = []

    def keep(frame: DataFrame, batch_id: int) -> None:
        # They come while a batch is under way that was planned without them.
        database.execute("INSERT INTO orders SELECT 1 WHERE NOT EXISTS (SELECT * FROM orders)")
        found.extend(row.id for row in frame.collect())

    frame = source(
        spark, url, stream=True, table="orders", mode="incrementing", incrementingColumn="id"
    )
    for _ in range(3):
        run(frame, tmp_path, keep)
    assert found == [1]


def test_a_number_that_is_none_is_no_position(
    spark: SparkSession, url: str, database: Any, tmp_path: Path
) -> None:
    database.execute("CREATE TABLE orders (id numeric)")
    database.execute("INSERT INTO orders VALUES (1), ('NaN')")
    frame = source(
        spark, url, stream=True, table="orders", mode="incrementing", incrementingColumn="id"
    )
    # PostgreSQL sorts it behind all others: what came after it would never be read.
    with pytest.raises(Exception, match=r"ConnectorError: .*column id has NaN.*next:"):
        run(frame, tmp_path, lambda batch, batch_id: None)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"mode": "incrementing", "incrementingColumn": "a"}, "incrementingColumn=a is text"),
        ({"mode": "incrementing", "incrementingColumn": "b"}, "incrementingColumn=b is float8"),
        ({"mode": "incrementing", "incrementingColumn": "d"}, "there is no column d, .* a, b, c"),
        ({"mode": "timestamp", "timestampColumn": "c"}, r"timestampColumn=c is date.*next: cast"),
    ],
)
def test_columns_that_have_no_order_a_query_could_keep(
    spark: SparkSession, url: str, database: Any, options: dict[str, str], match: str
) -> None:
    database.execute("CREATE TABLE orders (a text, b float8, c date)")
    with pytest.raises(Exception, match=match):
        source(spark, url, stream=True, table="orders", **options)


def test_changed_rows_are_read_again_by_their_time(
    spark: SparkSession, url: str, database: Any, tmp_path: Path
) -> None:
    database.execute("CREATE TABLE orders (id int, name text, changed timestamptz)")
    database.execute("""
        INSERT INTO orders VALUES (1, 'a', '2026-01-01'), (2, 'b', '2026-01-01'),
            (3, 'c', '2026-01-01'), (4, 'young', now() + interval '1 hour'), (5, 'none', null)""")
    batches: list[list[str]] = []

    def keep(frame: DataFrame, batch_id: int) -> None:
        batches.append(sorted(row.name for row in frame.collect()))

    frame = source(
        spark, url, stream=True, table="orders", mode="timestamp+incrementing",
        incrementingColumn="id", timestampColumn="changed", timestampDelay="1s",
        maxRowsPerTrigger=2,
    )  # fmt: skip
    run(frame, tmp_path, keep)
    # The second and the third have the same time, and are told apart by their number.
    assert batches == [["a", "b"], ["c"]]
    database.execute("UPDATE orders SET name = 'A', changed = '2026-01-02' WHERE id = 1")
    run(frame, tmp_path, keep)
    assert batches[2:] == [["A"]]


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({}, "exactly one of table or query"),
        ({"table": "t", "mode": "incrementing"}, "incrementingColumn is needed in mode=increment"),
        ({"table": "t", "incrementingColumn": "id"}, "incrementingColumn contradicts mode=bulk"),
        ({"table": "t", "timestampDelay": "1s"}, "timestampDelay contradicts mode=bulk"),
        ({"table": "t", "maxRowsPerTrigger": "5"}, "maxRowsPerTrigger contradicts mode=bulk"),
        ({"table": "t", "mod": "bulk"}, "unknown option mod; did you mean mode"),
        ({"table": "a.b.c"}, "is no name of a table"),
    ],
)
def test_options_that_are_wrong(
    spark: SparkSession, url: str, options: dict[str, str], match: str
) -> None:
    with pytest.raises(Exception, match=match):
        source(spark, url, stream=False, **options)


# --- the sink -------------------------------------------------------------------------------


def rows_of(database: Any, query: str = "SELECT * FROM totals ORDER BY 1, 2") -> list[Any]:
    return list(database.execute(query).fetchall())


def test_the_last_row_of_a_key_wins_and_deletions_delete(
    spark: SparkSession, url: str, database: Any
) -> None:
    database.execute("CREATE TABLE totals (path text PRIMARY KEY, total numeric(9,2))")
    write = UpsertBatches(
        url, "totals", keys=["path"], latest_by="offset", deleted="gone", sink_id="t"
    )
    columns = "path string, total double, offset bigint, gone boolean"
    first = [("/a", 1.0, 0, False), ("/a", 3.25, 2, False), ("/a", 2.0, 1, False),
             ("/b", 5.0, 3, None), ("/c", 5.0, 4, False), ("/c", None, 5, True)]  # fmt: skip
    write(spark.createDataFrame(first, columns), 0)
    assert rows_of(database) == [("/a", Decimal("3.25")), ("/b", Decimal(5))]
    second = [("/b", None, 6, True), ("/a", 4.0, 7, False)]
    write(spark.createDataFrame(second, columns), 1)
    assert rows_of(database) == [("/a", Decimal(4))]
    # A batch that comes again changes nothing, and leaves nothing behind.
    write(spark.createDataFrame(second, columns), 1)
    # What is another one under its number is not taken for it.
    with pytest.raises(StaleCheckpointError, match=r"batch 1 of table totals .*2 rows.* 1 rows"):
        write(spark.createDataFrame([("/x", 9.0, 1, False)], columns), 1)
    assert rows_of(database) == [("/a", Decimal(4))]
    left = rows_of(database, "SELECT tablename FROM pg_tables WHERE schemaname = 'public'")
    assert sorted(left) == [("penstock_batches",), ("totals",)]
    with pytest.raises(StaleCheckpointError, match="has written batch 1 to totals, and batch 0"):
        write(spark.createDataFrame(second, columns), 0)


def plain_inserts(url: str) -> Any:
    """What writes a batch without keeping its id."""

    def write(batch: DataFrame, batch_id: int) -> None:
        rows = [(row.id,) for row in batch.collect()]
        with psycopg.connect(url) as connection, connection.cursor() as cursor:
            cursor.executemany("INSERT INTO events VALUES (%s)", rows)

    return write


@pytest.mark.parametrize(
    "sink", [(lambda url: UpsertBatches(url, "events"), 50), (plain_inserts, 75)],
    ids=["batches that are kept", "control: plain inserts"],
)  # fmt: skip
def test_a_crash_between_the_database_and_spark_doubles_nothing(
    spark: SparkSession, url: str, database: Any, tmp_path: Path, sink: tuple[Any, int]
) -> None:
    frame = numbers(spark, url, database)
    database.execute("CREATE TABLE events (id int8)")
    write, rows = sink[0](url), sink[1]
    calls: list[int] = []

    def crash_after(batch: DataFrame, batch_id: int) -> None:
        calls.append(batch_id)
        write(batch.repartition(3), batch_id)
        if calls == [0, 1]:
            raise RuntimeError("the driver dies here")

    with pytest.raises(Exception, match="the driver dies here"):
        run(frame, tmp_path, crash_after)
    run(frame, tmp_path, crash_after)
    assert calls == [0, 1, 1]
    assert rows_of(database, "SELECT count(*), count(DISTINCT id) FROM events") == [(rows, 50)]


@pytest.mark.parametrize("by_plan", [True, False])
def test_a_checkpoint_of_one_batch_before_is_refused(
    spark: SparkSession, url: str, database: Any, tmp_path: Path, by_plan: bool
) -> None:
    frame = numbers(spark, url, database)
    database.execute("CREATE TABLE events (id int8)")
    place = tmp_path / "checkpoint"
    write = UpsertBatches(url, "events", checkpoint=str(place) if by_plan else None)
    run(frame, place, write)
    # Both notes of batch 1 are gone: it is planned anew, with what has come since.
    for kind in ("offsets", "commits"):
        for path in (place / kind).glob("*1*"):
            path.unlink()
    # With as many rows as before only the plan tells them apart.
    gone = 10 if by_plan else 0
    database.execute(f"DELETE FROM numbers WHERE id > {50 - gone}")
    database.execute("INSERT INTO numbers SELECT * FROM generate_series(51, 60)")
    later = source(
        spark, url, stream=True, table="numbers", mode="incrementing", incrementingColumn="id"
    )
    with pytest.raises(Exception, match="StaleCheckpointError: batch 1 of table events"):
        run(later, place, write)
    assert rows_of(database, "SELECT count(*), max(id) FROM events") == [(50, 50)]
    run(later, place, UpsertBatches(url, "events", checks_replays=False))
    assert rows_of(database, "SELECT count(*), max(id) FROM events") == [(50, 50)]


def numbers(spark: SparkSession, url: str, database: Any) -> DataFrame:
    """Two batches: 1 to 25, and 26 to 50."""
    database.execute("CREATE TABLE numbers (id int8)")
    database.execute("INSERT INTO numbers SELECT * FROM generate_series(1, 50)")
    return source(
        spark, url, stream=True, table="numbers", mode="incrementing", incrementingColumn="id",
        maxRowsPerTrigger=25,
    )  # fmt: skip


@pytest.mark.parametrize("sink_id", [None, "mine"])
def test_one_query_writes_to_two_tables(
    spark: SparkSession, url: str, database: Any, tmp_path: Path, sink_id: str | None
) -> None:
    frame = numbers(spark, url, database)
    database.execute("CREATE TABLE orders (id int8); CREATE TABLE totals (id int8)")
    calls: list[int] = []

    def write(batch: DataFrame, batch_id: int) -> None:
        calls.append(batch_id)
        UpsertBatches(url, "orders", sink_id=sink_id)(batch, batch_id)
        if calls == [0, 1]:
            raise RuntimeError("the driver dies here")
        UpsertBatches(url, "totals", sink_id=sink_id)(batch, batch_id)

    with pytest.raises(Exception, match="the driver dies here"):
        run(frame, tmp_path, write)
    run(frame, tmp_path, write)
    assert calls == [0, 1, 1]
    for table in ("orders", "totals"):
        found = rows_of(database, f"SELECT count(*), count(DISTINCT id) FROM {table}")
        assert (table, found) == (table, [(50, 50)])


def test_two_writes_of_a_batch_to_one_table_need_two_ids(
    spark: SparkSession, url: str, database: Any, tmp_path: Path
) -> None:
    frame = numbers(spark, url, database)
    database.execute("CREATE TABLE events (id int8)")

    def write(batch: DataFrame, batch_id: int, second: str | None = None) -> None:
        UpsertBatches(url, "events")(batch.where("id % 2 = 0"), batch_id)
        UpsertBatches(url, "events", sink_id=second)(batch.where("id % 2 = 1"), batch_id)

    with pytest.raises(Exception, match=r"SharedSinkIdError: another write .* batch 0 to events"):
        run(frame, tmp_path, write)
    # What the message says to do next loses nothing and doubles nothing.
    run(frame, tmp_path, lambda batch, batch_id: write(batch, batch_id, "odd"))
    assert rows_of(database, "SELECT count(*), count(DISTINCT id) FROM events") == [(50, 50)]


def test_batches_that_are_kept_otherwise_are_refused(
    spark: SparkSession, url: str, database: Any
) -> None:
    database.execute("CREATE TABLE events (id int8)")
    database.execute("CREATE TABLE penstock_batches (sink_id text PRIMARY KEY, batch_id int8)")
    with pytest.raises(ConnectorError, match=r"penstock_batches has other columns.*next: rename"):
        UpsertBatches(url, "events", sink_id="s")(spark.range(5), 0)
    assert rows_of(database, "SELECT * FROM events") == []


def test_a_crash_before_the_database_commits_loses_nothing(
    spark: SparkSession, url: str, database: Any, tmp_path: Path
) -> None:
    database.execute("CREATE TABLE events (id int8 CHECK (id < 3))")
    write = UpsertBatches(url, "events", sink_id="s")
    with pytest.raises(ConnectorError, match="CheckViolation"):
        write(spark.range(5), 0)
    assert rows_of(database, "SELECT * FROM events") == []
    database.execute("ALTER TABLE events DROP CONSTRAINT events_id_check")
    write(spark.range(5), 0)
    assert len(rows_of(database, "SELECT * FROM events")) == 5
    tables = "SELECT count(*) FROM pg_tables WHERE tablename LIKE 'penstock_staging%'"
    assert rows_of(database, tables) == [(0,)]


def test_attempts_that_failed_do_not_count(
    spark: SparkSession, url: str, database: Any, tmp_path: Path
) -> None:
    database.execute("CREATE TABLE events (id int8)")

    def fail_once(batches: Any) -> Any:
        yield from batches
        marker = tmp_path / "failed"
        if not marker.exists():
            marker.touch()
            raise RuntimeError("as asked for")

    frame = spark.range(40).repartition(2).mapInArrow(fail_once, "id bigint")
    UpsertBatches(url, "events", sink_id="s")(frame, 0)
    assert rows_of(database, "SELECT count(*), count(DISTINCT id) FROM events") == [(40, 40)]


def test_frames_that_do_not_fit(spark: SparkSession, url: str) -> None:
    frame = spark.range(1)
    for arguments, match in [
        ({"keys": ["path"]}, "no column 'path'; next: name one of id"),
        ({"keys": ["id"], "deleted": "id"}, "is no BOOLEAN"),
    ]:
        with pytest.raises(OptionError, match=match):
            UpsertBatches(url, "t", sink_id="s", **arguments)(frame, 0)
    with pytest.raises(OptionError, match="pass sink_id="):
        UpsertBatches(url, "t")(frame, 0)
    with pytest.raises(OptionError, match="name the keys as well"):
        UpsertBatches(url, "t", latest_by="offset")
    assert "secret" not in repr(UpsertBatches("postgresql://me:secret@host", "t"))
