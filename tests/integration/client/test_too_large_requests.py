"""A real node that takes small requests, and producers that send larger ones."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.client import AdminClient, Producer
from penstock.wire.errors import InvalidRequestError, RecordTooLargeError
from tests.integration.cluster import Cluster, running_cluster
from tests.integration.raw import create_topic, read_all

pytestmark = pytest.mark.integration

MIB = 1024 * 1024
TOPIC = "orders"


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with running_cluster(tmp_path, 1, {"request.max.bytes": MIB}) as cluster:
        create_topic(cluster, TOPIC, 3, 1, {"max.message.bytes": str(8 * MIB)})
        yield cluster


def test_a_record_that_fits_into_no_request_fails_at_once_and_the_others_are_written(
    cluster: Cluster,
) -> None:
    with Producer(cluster.bootstrap, max_request_size=8 * MIB, linger_ms=50) as producer:
        before = [producer.send(TOPIC, b"before", partition=n) for n in (0, 1)]
        large = producer.send(TOPIC, bytes(2 * MIB), partition=0)
        after = [producer.send(TOPIC, b"after", partition=n) for n in (0, 1)]
        begun_s = time.monotonic()
        with pytest.raises(RecordTooLargeError, match=r"1048576, by request.max.bytes; next: "):
            large.result(20)
        assert time.monotonic() - begun_s < 10
        for future in (*before, *after):
            future.result(20)
    values = [
        record.value or b"" for n in (0, 1) for record in read_all(cluster, TOPIC, n, at_least=2)
    ]
    assert sorted(values) == [b"after", b"after", b"before", b"before"]


def test_many_records_that_are_too_large_together_are_all_written_once(cluster: Cluster) -> None:
    with Producer(
        cluster.bootstrap, max_request_size=8 * MIB, batch_size=4 * MIB, linger_ms=200
    ) as producer:
        sent = [
            producer.send(TOPIC, f"{n}-{i}".encode().ljust(50_000), partition=n)
            for i in range(40)
            for n in (0, 1, 2)
        ]
        for future in sent:
            future.result(60)
    for n in (0, 1, 2):
        values = [
            (record.value or b"").split()[0] for record in read_all(cluster, TOPIC, n, at_least=40)
        ]
        assert values == [f"{n}-{i}".encode() for i in range(40)]


def test_other_calls_say_so_too(cluster: Cluster) -> None:
    with (
        AdminClient(cluster.bootstrap) as admin,
        pytest.raises(InvalidRequestError, match=r"by request.max.bytes; next: send less"),
    ):
        admin.describe_topics([f"{n:0200}" for n in range(6_000)])
