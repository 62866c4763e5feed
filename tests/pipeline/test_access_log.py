"""The demo's queries over an access log: beside plain Python, and while a broker is killed."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet
import pytest

from penstock.client import ConsumerRecord
from tests.integration.cluster import environment_without_penstock

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.integration

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "pipelines" / "access_log"
GOOD = '1.2.3.4 - bob [17/May/2015:10:05:03 +0200] "GET /a?b=c HTTP/1.1" 404 5 "-" "agent"'
LINES: list[bytes | None] = [
    GOOD.encode(),
    GOOD.replace(" 5 ", " - ").encode(),
    GOOD.replace("agent", r"a \"quoted\" agent").encode(),
    GOOD.replace("agent", "ágent").encode(),
    GOOD.replace("agent", "").encode(),
    GOOD[:-1].encode(),  # Cut off.
    GOOD.replace("May", "Mai").encode(),
    GOOD.replace("17/May", "32/May").encode(),
    GOOD.replace("404", "4O4").encode(),
    GOOD.replace(" HTTP/1.1", "").encode(),
    GOOD.replace(" - bob", "  bob").encode(),
    GOOD.replace("agent", "\udcff").encode(errors="surrogateescape"),  # No UTF-8.
    GOOD.encode() + b" ",
    b"",
    None,
]


@pytest.fixture(scope="module", autouse=True)
def found_modules() -> Iterator[None]:
    """The example's modules, which find one another in its directory."""
    sys.path.insert(0, str(EXAMPLE))
    yield
    sys.path.remove(str(EXAMPLE))


@pytest.fixture
def batch() -> ModuleType:
    return importlib.import_module("batch")


@pytest.fixture
def outputs() -> ModuleType:
    return importlib.import_module("outputs")


@pytest.mark.timeout(300)
def test_spark_and_python_read_the_same_in_lines(
    spark: SparkSession, batch: ModuleType, outputs: ModuleType
) -> None:
    queries = importlib.import_module("queries")
    rows = [(b"1.2.3.4", line, "access-log", 3, offset) for offset, line in enumerate(LINES)]
    schema = "key binary, value binary, topic string, partition int, offset bigint"
    before = spark.conf.get("spark.sql.session.timeZone")
    spark.conf.set("spark.sql.session.timeZone", "UTC")
    try:
        parsed = queries.parsed(spark.createDataFrame(rows, schema)).collect()
    finally:
        spark.conf.set("spark.sql.session.timeZone", before)
    for row, line, offset in zip(parsed, LINES, range(len(LINES)), strict=True):
        wanted = batch.read_line(batch.Sent(line or b"", 3, offset))
        if wanted is None:
            assert (row.topic, row.value) == ("dead-letters", line)
            headers = {header.key: bytes(header.value).decode() for header in row.headers}
            assert headers.pop("reason") in ("no such time", "not in the combined format")
            assert headers == {"topic": "access-log", "partition": "3", "offset": str(offset)}
        else:
            assert row.topic == "requests"
            assert outputs.row_of(record(b"", row.value)) == wanted
    assert [row.topic for row in parsed].count("requests") == 5


def record(key: bytes, value: bytes) -> ConsumerRecord:
    return ConsumerRecord("topic", 0, 0, 0, key, bytes(value), (), 0)


def test_the_batch_counts_by_hand(batch: ModuleType) -> None:
    def sent(minute: int, path: str, status: int, offset: int) -> Any:
        time = datetime(2015, 5, 17, 10, tzinfo=UTC) + timedelta(minutes=minute)
        line = (
            f'1.1.1.1 - - [{time:%d/%b/%Y:%H:%M:%S +0000}] "GET {path} HTTP/1.1" {status} 7 "-" "-"'
        )
        return batch.Sent(line.encode(), 0, offset)

    lines = [
        sent(0, "/a", 200, 0), sent(1, "/b", 404, 1), sent(1, "/b", 404, 2), sent(1, "/c", 404, 3),
        sent(91, "/a", 200, 4), sent(182, "/a", 500, 5), sent(183 + 24 * 60, "/z", 200, 6),
    ]  # fmt: skip
    found = batch.work_out(lines, timedelta(days=1))
    # A pause of exactly 90 minutes is not yet one; the last visit of 182 has not ended by 183.
    assert [(row["requests"], row["landing"], row["exit"]) for row in found.sessions] == [
        (5, "/a", "/a")
    ]
    assert [(row["path"], row["requests"], row["errors"]) for row in found.minutes] == [
        ("/a", 1, 0), ("/b", 2, 2), ("/c", 1, 1), ("/a", 1, 0), ("/a", 1, 1),
    ]  # fmt: skip
    assert found.paths["/a"] == {"path": "/a", "requests": 3, "errors": 1, "bytes": 21}
    (alert,) = found.alerts.values()
    assert (alert["missing"], alert["last"]) == (3, "/c")


def test_what_is_lost_doubled_or_changed_is_seen(outputs: ModuleType) -> None:
    def lost_and_surplus(found: list[str]) -> tuple[list[str], list[str]]:
        one = outputs.difference("x", ["a", "b", "b"], found, str)
        assert one.agrees == (not one.missing and not one.surplus)
        return one.missing, one.surplus

    assert lost_and_surplus(["b", "a", "b"]) == ([], [])
    assert lost_and_surplus(["b", "a"]) == (["b"], [])
    assert lost_and_surplus(["b", "a", "b", "a"]) == ([], ["a"])
    assert lost_and_surplus(["b", "c", "b"]) == (["a"], ["c"])


def test_an_upsert_that_comes_twice_is_seen(outputs: ModuleType) -> None:
    def surplus(*counts: int) -> int:
        records = [record(b"/a", b'{"requests": %d}' % count) for count in counts]
        wanted = {"/a": {"requests": 2}}
        return len(outputs._compare_upserts("paths", wanted, records, "requests").surplus)

    assert surplus(1, 2) == 0
    assert surplus(1, 2, 2) == 1
    assert surplus(1, 2, 3) == 1


def test_files_that_no_batch_has_committed_do_not_count(
    outputs: ModuleType, tmp_path: Path
) -> None:
    (tmp_path / "_spark_metadata").mkdir()
    for number in range(4):
        time = datetime(2015, 5, 17, number, tzinfo=UTC)
        table = pa.table({"minute": pa.array([time], pa.timestamp("us", "UTC"))})
        pyarrow.parquet.write_table(table, tmp_path / f"{number}.parquet")

    def commit(batch: str, *files: int) -> None:
        entries = [f'{{"path": "file:///x/{number}.parquet"}}' for number in files]
        (tmp_path / "_spark_metadata" / batch).write_text("\n".join(["v1", *entries]))

    def hours() -> list[int]:
        return [row["minute"].hour for row in outputs.read_parquet(tmp_path)]

    commit("0", 0)
    commit("1", 1)
    assert hours() == [0, 1]
    commit("9.compact", 0, 1)
    commit("10", 3)
    assert hours() == [0, 1, 3]


@pytest.mark.timeout(500)
def test_a_killed_broker_changes_no_row(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, EXAMPLE / "demo.py", "--hours", "4"],
        env=environment_without_penstock() | {"TMPDIR": str(tmp_path)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=480,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "(SIGKILL)" in done.stdout
    assert "no row is lost, none is there twice: Spark and plain Python agree" in done.stdout
    assert done.stderr == ""
    assert list(tmp_path.iterdir()) == []
