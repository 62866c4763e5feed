"""One Spark session and one real cluster for all tests of pipelines: to start takes seconds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from penstock.pipeline import session
from tests.integration.cluster import Cluster, running_cluster
from tests.pipeline.brokers import mosquitto, rabbitmq
from tests.pipeline.failing import FailingSource
from tests.pipeline.pipe import Pipe
from tests.pipeline.streams import Streams

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """A small session; whatever Spark writes lies in pytest's directory."""
    directory = tmp_path_factory.mktemp("spark")
    temporary = directory / "tmp"
    temporary.mkdir()
    made = session(
        "penstock-tests",
        master="local[2,4]",
        settings={
            "spark.driver.memory": "600m",
            "spark.driver.extraJavaOptions": (
                f"-Djava.io.tmpdir={temporary} -Dderby.system.home={directory} -XX:-UsePerfData "
                # Java compiles what runs but once or twice no better than it must.
                "-XX:TieredStopAtLevel=1"
            ),
            "spark.local.dir": str(temporary),
            "spark.sql.warehouse.dir": str(directory / "warehouse"),
            "spark.sql.shuffle.partitions": "2",
            "spark.plugins": "org.apache.spark.sql.connect.SparkConnectPlugin",
            "spark.connect.grpc.binding.address": "127.0.0.1",
            "spark.connect.grpc.binding.port": "0",
        },
    )
    try:
        yield made
    finally:
        made.stop()


@pytest.fixture(scope="session")
def connect_url(spark: SparkSession) -> str:
    """Where the same Spark serves Spark Connect, for processes of their own."""
    java: Any = spark._jvm
    service = getattr(java, "org.apache.spark.sql.connect.service.SparkConnectService$")
    return f"sc://127.0.0.1:{getattr(service, 'MODULE$').localPort()}"


@pytest.fixture(scope="session")
def penstock_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Three real nodes. Tests share them: a topic's name is its test's alone."""
    settings = {"log.cleaner.backoff.ms": 100, "log.retention.check.interval.ms": 100}
    with running_cluster(tmp_path_factory.mktemp("cluster"), settings=settings) as cluster:
        yield cluster


@pytest.fixture
def pipe(
    spark: SparkSession, penstock_cluster: Cluster, tmp_path: Path, request: pytest.FixtureRequest
) -> Pipe:
    """A query to a topic of this test's alone."""
    spark.dataSource.register(FailingSource)
    name = "".join(letter if letter.isalnum() else "-" for letter in request.node.name)
    return Pipe(spark, penstock_cluster, tmp_path, name)


@pytest.fixture
def small_batches(spark: SparkSession) -> Iterator[None]:
    """Tasks get their rows in several Arrow batches."""
    spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", "50")
    yield
    spark.conf.unset("spark.sql.execution.arrow.maxRecordsPerBatch")


@pytest.fixture(scope="session")
def rabbitmq_port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """A RabbitMQ that tests share: a queue's name is its test's alone."""
    with rabbitmq(tmp_path_factory.mktemp("rabbitmq")) as port:
        yield port


@pytest.fixture(scope="session")
def mosquitto_port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """A Mosquitto that tests share: a topic's and a client's name are its test's alone."""
    with mosquitto(tmp_path_factory.mktemp("mosquitto")) as port:
        yield port


@pytest.fixture
def streams(
    spark: SparkSession, penstock_cluster: Cluster, tmp_path: Path, request: pytest.FixtureRequest
) -> Streams:
    """Topics of the test's own, and queries over them."""
    name = "".join(letter if letter.isalnum() else "-" for letter in request.node.name)
    return Streams(spark, penstock_cluster, tmp_path, name)
