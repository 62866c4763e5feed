"""docs/pipelines.md, followed: all of its Python, against real services where they can be had."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from prometheus_client import REGISTRY

from penstock.client import Producer
from penstock.pipeline import functions
from tests.pipeline.logs import fill, make_topic, read, values
from tests.pipeline.postgres import programs, running_postgres
from tests.pipeline.stores import running_store
from tests.support import wait_until
from tests.unit.pipeline.fake_elasticsearch import running

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from tests.integration.cluster import Cluster

GUIDE = Path(__file__).parents[2] / "docs/pipelines.md"
FOLLOWED = {
    "A session": 1,
    "Source": 2,
    "Sink": 1,
    "Exactly once": 2,
    "Converters and transforms": 1,
    "Files": 1,
    "Databases": 2,
    "Object stores": 1,
    "Elasticsearch": 2,
    "AMQP": 1,
    "MQTT": 1,
    "Streams' notions": 2,
}


@cache
def blocks() -> dict[str, list[str]]:
    """All Python of the guide, by heading."""
    found: dict[str, list[str]] = {}
    heading = ""
    text = GUIDE.read_text(encoding="utf-8")
    for part in re.finditer(r"(?ms)^#+ ([^\n]*)\n|^```python\n(.*?)^```", text):
        if part[1]:
            heading = part[1]
        else:
            found.setdefault(heading, []).append(part[2])
    return found


def test_all_python_of_the_guide_is_followed_by_a_test_below() -> None:
    assert {heading: len(found) for heading, found in blocks().items()} == FOLLOWED


class Reader:
    """Who follows the guide, at a cluster and in a directory of their own."""

    def __init__(self, spark: SparkSession, cluster: Cluster, directory: Path) -> None:
        self.spark, self.cluster, self.directory = spark, cluster, directory
        self.names: dict[str, Any] = {"spark": spark}
        # Spark's Java process stays in the directory where it was started.
        self.elsewhere = {
            "localhost:9092": cluster.bootstrap,
            '"checkpoints/': f'"{directory}/checkpoints/',
        }

    def follow(self, heading: str, place: int = 0) -> None:
        """Run a block as it stands, but that what it names is this test's own."""
        program = blocks()[heading][place]
        for there, here in self.elsewhere.items():
            program = program.replace(there, here)
        exec(compile(program, f"{GUIDE.name}, {heading}", "exec"), self.names)

    def end(self) -> None:
        """Have every query do what there is to do, and stop."""
        for query in self.spark.streams.active:
            try:
                query.processAllAvailable()
            finally:
                query.stop()

    def rows(self, frame: DataFrame, name: str = "seen") -> list[Any]:
        """What a stream has now."""
        writer = frame.writeStream.format("memory").queryName(name).trigger(availableNow=True)
        query = writer.option("checkpointLocation", str(self.directory / name)).start()
        query.awaitTermination()
        return self.spark.table(name).collect()


@pytest.fixture
def reader(spark: SparkSession, penstock_cluster: Cluster, tmp_path: Path) -> Iterator[Reader]:
    made = Reader(spark, penstock_cluster, tmp_path)
    yield made
    with contextlib.suppress(Exception):
        made.end()


def numbers(reader: Reader, columns: str) -> DataFrame:
    """A stream of a few rows, from files."""
    directory = reader.directory / "numbers"
    reader.spark.range(4).selectExpr(*columns.split("; ")).write.parquet(str(directory))
    return reader.spark.readStream.schema(reader.spark.read.parquet(str(directory)).schema).parquet(
        str(directory)
    )


def test_a_session(reader: Reader, capsys: pytest.CaptureFixture[str]) -> None:
    reader.follow("A session")
    assert capsys.readouterr().out == "10\n"


def test_source_and_sink(reader: Reader) -> None:
    name = make_topic(reader.cluster, "guide-orders")
    reader.elsewhere |= {
        '"orders"': f'"{name}"',
        '"orders-copy"': f'"{name}"',
        "/var/lib/orders-copy": str(reader.directory / "c"),
    }
    as_it_says = ("CAST(id AS STRING) AS key", "to_json(struct(*)) AS value")
    reader.names["orders"] = numbers(reader, "id; id * 2 AS price").selectExpr(*as_it_says)
    reader.follow("Sink")
    reader.follow("Source", 1)
    reader.end()
    assert values(reader.cluster, name)[0] == '{"id":0,"price":0}'
    try:
        wait_until(
            lambda: any(one.name == "penstock_query_rows" for one in REGISTRY.collect()),
            "there are metrics of queries",
        )
    finally:
        reader.names["watching"].close()
    reader.follow("Source", 0)
    assert len(reader.rows(reader.names["orders"])) == 4


def test_foreach_batch(reader: Reader) -> None:
    for place, wanted in enumerate((["404", "500"], ["200", "404", "500"])):
        name = make_topic(reader.cluster, f"guide-foreach-{place}")
        reader.names["sink"] = {
            "penstock.bootstrap.servers": reader.cluster.bootstrap, "topic": name
        }  # fmt: skip
        reader.follow("Exactly once", place)
        rows = reader.spark.createDataFrame([(404, "404"), (500, "500"), (200, "200")],
                                            "status int, value string")  # fmt: skip
        reader.names["write"](rows if place == 0 else rows.select("value"), 0)
        assert values(reader.cluster, name) == wanted


def test_transforms(reader: Reader, capsys: pytest.CaptureFixture[str]) -> None:
    reader.follow("Converters and transforms")
    assert '|orders|{"id":7,"card":"","offset":5}|' in capsys.readouterr().out


def test_files(reader: Reader) -> None:
    name = make_topic(reader.cluster, "guide-people")
    incoming = reader.directory / "incoming"
    incoming.mkdir()
    (incoming / "one.csv").write_text("id,name\n7,Ada\n")
    reader.elsewhere |= {'"people"': f'"{name}"', '"incoming"': f'"{incoming}"'}
    reader.names |= {"to_json": functions.to_json}
    exec("from pyspark.sql import functions as sf", reader.names)
    reader.follow("Files")
    reader.end()
    assert values(reader.cluster, name) == ['{"id":7,"name":"Ada"}']


@pytest.mark.skipif(
    programs() is None, reason="PostgreSQL is not installed: apt-get install postgresql"
)
def test_databases(reader: Reader) -> None:
    with running_postgres() as url, psycopg.connect(url, autocommit=True) as database:
        database.execute("CREATE TABLE orders (id bigint); INSERT INTO orders VALUES (1), (2)")
        reader.elsewhere["postgresql://user:secret@localhost/shop"] = url
        reader.follow("Databases", 0)
        assert sorted(row.id for row in reader.rows(reader.names["orders"])) == [1, 2]
        database.execute("CREATE TABLE totals (path text PRIMARY KEY, sum bigint)")
        reader.names["totals"] = numbers(reader, "'/a' AS path; id * 10 AS sum; id AS offset")
        reader.follow("Databases", 1)
        reader.end()
        assert database.execute("SELECT * FROM totals").fetchall() == [("/a", 30)]


def test_object_stores(reader: Reader) -> None:
    with running_store("guide") as store:
        reader.elsewhere |= {
            "bucket/orders": "guide/orders",  # What stores have, all of a process have.
            "http://localhost:9000": store.endpoint,
            '"key"': f'"{store.access_key}"',
            ".start()": f'.option("checkpointLocation", "{reader.directory}/c").start()'
                        ".processAllAvailable()",
            ".load()": f'.option("accessKey", "{store.access_key}")'
                       f'.option("secretKey", "{store.secret_key}").load()',
        }  # fmt: skip
        reader.names["orders"] = numbers(reader, "id")
        reader.follow("Object stores")
        assert sorted(row.id for row in reader.rows(reader.names["again"])) == [0, 1, 2, 3]
        reader.end()


def test_elasticsearch(reader: Reader) -> None:
    name = make_topic(reader.cluster, "guide-search")
    with running() as fake:
        reader.elsewhere |= {
            "https://es1:9200,https://es2:9200": fake.url,
            "http://localhost:9200": fake.url,
            '"orders"': f'"{name}"',
        }
        reader.names["key"] = "secret"
        reader.follow("Elasticsearch", 0)
        query = reader.names["query"]
        query.processAllAvailable()
        fill(reader.cluster, name, ['{"n": 1}'])
        wait_until(lambda: len(fake.of(name)) == 1, "the record is a document", 60.0)
        query.stop()

        reader.names["counts"] = numbers(reader, "'/a' AS path; 3 AS count").groupBy("path").count()
        reader.follow("Elasticsearch", 1)
        reader.end()
        assert fake.of("counts") == {"/a": {"path": "/a", "count": 4}}


def test_amqp_and_mqtt(reader: Reader) -> None:
    reader.names["password"] = "secret"
    # Their servers have tests of their own.
    reader.elsewhere[".load()"] = '.option("checkOnLoad", "false").load()'
    for heading in ("AMQP", "MQTT"):
        reader.follow(heading)
        assert reader.names.pop("messages").isStreaming


def test_tables(reader: Reader, capsys: pytest.CaptureFixture[str]) -> None:
    customers = make_topic(reader.cluster, "guide-customers", **{"cleanup.policy": "compact"})
    totals = make_topic(reader.cluster, "guide-totals", **{"cleanup.policy": "compact"})
    with Producer(reader.cluster.bootstrap) as producer:
        producer.send(customers, b"Ada", b"7").result(60)
    reader.elsewhere |= {'"customers"': f'"{customers}"', '"totals"': f'"{totals}"'}
    reader.follow("Streams' notions", 0)
    assert "Ada" in capsys.readouterr().out
    frame = numbers(reader, "'/a' AS key; '3' AS value")
    reader.names["totals"] = frame
    reader.follow("Streams' notions", 1)
    reader.end()
    assert {record.key for record in read(reader.cluster, totals)} == {b"/a"}
