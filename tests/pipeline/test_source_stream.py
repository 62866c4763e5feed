from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from pyspark.errors import AnalysisException, StreamingQueryException
from pyspark.sql import SparkSession

from penstock.client import AdminClient, TopicPartition
from penstock.pipeline.reasons import reason_of
from penstock.pipeline.source.group import commit
from penstock.pipeline.source_options import SourceOptions
from tests.integration.cluster import Cluster, environment_without_penstock
from tests.pipeline.source_tools import Batches, Topics
from tests.support import wait_until

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def topics(spark: SparkSession, penstock_cluster: Cluster) -> Topics:
    return Topics(spark, penstock_cluster)


def numbers_in(text: str) -> dict[str, dict[str, int]]:
    """The offsets that Spark has for a source, without the ids of their topics."""
    found: dict[str, dict[str, int]] = json.loads(text)
    assert all(isinstance(numbers.pop("id"), str) for numbers in found.values())
    return found


def offsets_in(checkpoint: Path) -> list[dict[str, dict[str, int]]]:
    """Where each planned batch ends, as Spark has it on disk."""
    files = sorted((checkpoint / "offsets").glob("[0-9]*"), key=lambda path: int(path.name))
    return [numbers_in(path.read_text().splitlines()[-1]) for path in files]


def offsets_in_last(checkpoint: Path) -> dict[str, dict[str, int]]:
    """Where the newest batch ends."""
    newest = max((checkpoint / "offsets").glob("[0-9]*"), key=lambda path: int(path.name))
    return numbers_in(newest.read_text().splitlines()[-1])


def test_a_stream_goes_on_from_its_checkpoint(topics: Topics, tmp_path: Path) -> None:
    topics.make("stream-restart", 2)
    topics.send("stream-restart", range(50), 0)
    topics.send("stream-restart", range(50, 100), 1)
    first = Batches()
    query = first.run(topics.stream("stream-restart"), tmp_path)
    assert first.numbers == list(range(100))
    assert offsets_in(tmp_path)[-1] == {"stream-restart": {"0": 50, "1": 50}}
    progress = query.lastProgress
    assert numbers_in(progress.sources[0].endOffset) == {"stream-restart": {"0": 50, "1": 50}}
    assert json.loads(progress.sources[0].latestOffset) == {"stream-restart": {"0": 50, "1": 50}}
    topics.send("stream-restart", range(100, 110), 1)
    second = Batches()
    second.run(topics.stream("stream-restart"), tmp_path)
    assert second.numbers == list(range(100, 110))


def test_batches_are_limited(topics: Topics, tmp_path: Path) -> None:
    topics.make("stream-limits", 2)
    topics.send("stream-limits", range(30), 0)
    topics.send("stream-limits", range(30, 90), 1)
    by_count = Batches()
    by_count.run(topics.stream("stream-limits", maxOffsetsPerTrigger="30"), tmp_path / "count")
    assert by_count.sizes == [30, 30, 30]
    assert by_count.numbers == list(range(90))
    by_bytes = Batches()
    # A value has two digits, and Arrow's offsets count as well.
    by_bytes.run(topics.stream("stream-limits", maxBytesPerTrigger="400"), tmp_path / "bytes")
    assert len(by_bytes.sizes) > 2
    assert by_bytes.numbers == list(range(90))


def test_too_few_are_waited_for(topics: Topics, tmp_path: Path) -> None:
    topics.make("stream-min")
    topics.send("stream-min", range(5))
    batches = Batches()
    options = {"minOffsetsPerTrigger": "10", "maxTriggerDelay": "1h"}
    frame = topics.stream("stream-min", **options)
    query = batches.start(frame, tmp_path, processingTime="0 seconds")
    try:
        # The first batch is not held back.
        wait_until(lambda: batches.sizes == [5], "the first batch", 60)
        topics.send("stream-min", range(5, 9))
        topics.send("stream-min", range(9, 15))
        wait_until(lambda: len(batches.numbers) == 15, "all of it", 60)
        assert all(size >= 10 for size in batches.sizes[1:])
    finally:
        query.stop()
    assert batches.numbers == list(range(15))


def test_what_comes_later_is_not_available_now(topics: Topics, tmp_path: Path) -> None:
    topics.make("stream-now")
    topics.send("stream-now", range(20))
    more = iter([range(20, 30), range(30, 40)])

    def write_more(number: int) -> None:
        if (numbers := next(more, None)) is not None:
            topics.send("stream-now", numbers)

    batches = Batches(write_more)
    batches.run(topics.stream("stream-now", maxOffsetsPerTrigger="7"), tmp_path)
    assert batches.numbers == list(range(20))


def test_new_partitions_are_read_from_their_start(topics: Topics, tmp_path: Path) -> None:
    topics.make("stream-grows")
    topics.send("stream-grows", range(10))
    batches = Batches()
    frame = topics.stream("stream-grows")
    query = batches.start(frame, tmp_path, processingTime="0 seconds")
    try:
        wait_until(lambda: batches.numbers == list(range(10)), "the first partition", 60)
        with AdminClient(topics.cluster.bootstrap) as admin:
            admin.create_partitions("stream-grows", 2)
        topics.send("stream-grows", range(10, 20), 1)
        wait_until(lambda: batches.numbers == list(range(20)), "the second one", 60)
    finally:
        query.stop()
    # The checkpoint says where the new one begins before anything of it is read.
    assert {"stream-grows": {"0": 10, "1": 0}} in offsets_in(tmp_path)


def test_from_latest_on_nothing_is_lost_to_a_crash(topics: Topics, tmp_path: Path) -> None:
    topics.make("stream-latest")
    topics.send("stream-latest", range(10))

    def fail(number: int) -> None:
        if number == 0:
            topics.send("stream-latest", range(10, 20))
            raise RuntimeError("as asked for")

    frame = topics.stream("stream-latest", startingOffsets="latest")
    with pytest.raises(StreamingQueryException, match="as asked for"):
        Batches(fail).run(frame, tmp_path)
    after = Batches()
    after.run(frame, tmp_path)
    assert after.numbers == list(range(10, 20))


def test_a_leader_is_killed_in_mid_query(topics: Topics, tmp_path: Path) -> None:
    cluster = topics.cluster
    topics.make("stream-killed")
    topics.send("stream-killed", range(2_000))
    killed: list[int] = []

    def kill(number: int) -> None:
        if number == 2:
            leader = cluster.topic("stream-killed").partitions[0].leader
            cluster.nodes[leader].kill()
            killed.append(leader)

    batches = Batches(kill)
    try:
        batches.run(topics.stream("stream-killed", maxOffsetsPerTrigger="300"), tmp_path)
    finally:
        cluster.start()
    assert killed
    assert batches.numbers == list(range(2_000))


def test_retention_overtakes_a_slow_query(topics: Topics, tmp_path: Path) -> None:
    topics.make("stream-lost")
    topics.send("stream-lost", range(30))
    where = TopicPartition("stream-lost", 0)

    def delete(number: int) -> None:
        if number == 1:
            with AdminClient(topics.cluster.bootstrap) as admin:
                admin.delete_records({where: 25})

    slow = {"maxOffsetsPerTrigger": "10"}
    batches = Batches(delete)
    with pytest.raises(StreamingQueryException, match=r"DataLossError.*begins at offset 25"):
        batches.run(topics.stream("stream-lost", **slow), tmp_path)
    assert batches.numbers == list(range(10))
    goes_on = Batches()
    goes_on.run(topics.stream("stream-lost", **slow, failOnDataLoss="false"), tmp_path)
    assert goes_on.numbers == list(range(25, 30))


def test_a_topic_made_anew_is_noticed(topics: Topics, tmp_path: Path) -> None:
    topics.make("stream-anew")
    topics.send("stream-anew", range(5))
    Batches().run(topics.stream("stream-anew"), tmp_path)
    with AdminClient(topics.cluster.bootstrap) as admin:
        admin.delete_topic("stream-anew")
    topics.make("stream-anew")
    # More than the old one had: offsets alone tell nothing.
    topics.send("stream-anew", range(100, 108))
    with pytest.raises(StreamingQueryException, match=r"DataLossError.*deleted and made anew"):
        Batches().run(topics.stream("stream-anew"), tmp_path)
    goes_on = Batches()
    goes_on.run(topics.stream("stream-anew", failOnDataLoss="false"), tmp_path)
    assert goes_on.numbers == list(range(100, 108))


def test_a_checkpoint_without_ids_goes_on(topics: Topics, tmp_path: Path) -> None:
    topics.make("stream-no-ids")
    topics.send("stream-no-ids", range(5))
    Batches().run(topics.stream("stream-no-ids"), tmp_path)
    (last,) = (tmp_path / "offsets").glob("[0-9]*")
    # As an earlier version has written it.
    lines = last.read_text().splitlines()
    last.write_text("\n".join([*lines[:-1], '{"stream-no-ids": {"0": 5}}']))
    (last.parent / f".{last.name}.crc").unlink(missing_ok=True)
    topics.send("stream-no-ids", range(5, 9))
    goes_on = Batches()
    goes_on.run(topics.stream("stream-no-ids"), tmp_path)
    assert goes_on.numbers == list(range(5, 9))
    assert offsets_in_last(tmp_path) == {"stream-no-ids": {"0": 9}}


def test_a_topic_made_anew_in_mid_query_is_noticed(topics: Topics, tmp_path: Path) -> None:
    topics.make("stream-anew-within")
    topics.send("stream-anew-within", range(5))
    batches = Batches()
    frame = topics.stream("stream-anew-within")
    query = batches.start(frame, tmp_path, processingTime="0 seconds")
    try:
        wait_until(lambda: len(batches.numbers) == 5, "the old topic's records", 60)
        with AdminClient(topics.cluster.bootstrap) as admin:
            admin.delete_topic("stream-anew-within")
        topics.make("stream-anew-within")
        # More than the old one had: offsets alone tell nothing.
        topics.send("stream-anew-within", range(100, 120))
        with pytest.raises(StreamingQueryException, match="DataLossError"):
            query.awaitTermination(60)
    finally:
        query.stop()
    assert batches.numbers == list(range(5))


def test_a_pattern_finds_new_topics(topics: Topics, tmp_path: Path) -> None:
    batches = Batches()
    frame = topics.stream("", subscribePattern="stream-pattern-.*")
    query = batches.start(frame, tmp_path, processingTime="0 seconds")
    try:
        topics.make("stream-pattern-1")
        topics.send("stream-pattern-1", range(5))
        wait_until(lambda: batches.numbers == list(range(5)), "the first topic", 60)
        topics.make("stream-pattern-2")
        topics.send("stream-pattern-2", range(5, 9))
        wait_until(lambda: batches.numbers == list(range(9)), "the second topic", 60)
    finally:
        query.stop()


def test_a_query_has_a_group_that_shows_how_far_it_is(topics: Topics, tmp_path: Path) -> None:
    topics.make("stream-group")
    topics.send("stream-group", range(30))
    options = {"maxOffsetsPerTrigger": "10", "groupIdPrefix": "team"}
    query = Batches().run(topics.stream("stream-group", **options), tmp_path)
    group = f"team-{query.id}"
    with AdminClient(topics.cluster.bootstrap) as admin:
        found = admin.list_group_offsets(group)
        where = TopicPartition("stream-group", 0)
        assert found[where].offset == 20  # A batch late.
        # A task of the second batch was held up, and commits now.
        clients = SourceOptions.load(topics.options("stream-group")).clients
        assert commit(clients, group, {where: 10}) is None
        assert admin.list_group_offsets(group)[where].offset == 20
        assert admin.describe_groups([group])[0].members == ()


def test_the_command_shows_the_lag_of_a_query_that_runs(topics: Topics, tmp_path: Path) -> None:
    topics.make("stream-lag")
    topics.send("stream-lag", range(30))
    batches = Batches()
    frame = topics.stream("stream-lag", maxOffsetsPerTrigger="10")
    query = batches.start(frame, tmp_path, processingTime="0 seconds")
    try:
        wait_until(lambda: len(batches.numbers) == 30, "all is read", 60)
        topics.send("stream-lag", range(30, 35))
        wait_until(lambda: len(batches.numbers) == 35, "the rest is read", 60)
        command = [sys.executable, "-m", "penstock.cli", "groups", "describe", f"spark-{query.id}"]
        done = subprocess.run(
            [*command, "-b", topics.cluster.bootstrap],
            env=environment_without_penstock(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    finally:
        query.stop()
    assert done.returncode == 0, done.stderr
    # The newest batch has begun at 30, and what it reads counts as lag until the next one does.
    (row,) = [line.split() for line in done.stdout.splitlines() if "stream-lag" in line]
    assert {"30", "35", "5"} <= set(row), done.stdout


def test_what_is_wrong_for_a_stream(topics: Topics, tmp_path: Path) -> None:
    topics.make("stream-wrong")
    with pytest.raises(
        AnalysisException, match=r"unknown option startingoffset; did you mean startingOffsets"
    ):
        topics.stream("stream-wrong", startingOffset="earliest")
    # That it is a stream Spark says when it plans the first batch: there is none yet.
    ending = topics.stream("stream-wrong", endingOffsets="latest")
    with pytest.raises(StreamingQueryException, match="endingOffsets is for batch") as caught:
        Batches().run(ending, tmp_path / "ending")
    # The last error of Python is what people look at, and what QueryFailedError says.
    assert reason_of(str(caught.value)).startswith("OptionError: the penstock source: endingOffset")
    assert "UnboundLocalError" not in str(caught.value)
    assert offsets_in(tmp_path / "ending") == []
    missing = topics.stream("stream-no-such-topic")
    with pytest.raises(StreamingQueryException, match="stream-no-such-topic"):
        Batches().run(missing, tmp_path / "missing")
    topics.send("stream-wrong", range(3))
    beyond = topics.stream("stream-wrong", startingOffsets='{"stream-wrong":{"0":9}}')
    with pytest.raises(StreamingQueryException, match="DataLossError") as caught:
        Batches().run(beyond, tmp_path / "beyond")
    why = reason_of(str(caught.value))
    assert "startingOffsets: partition stream-wrong-0: offset 9 was asked for" in why
    assert "ends at 3: its log has never come so far" in why
    assert "retention" not in why


def test_a_wrong_option_is_told_when_a_stream_goes_on(topics: Topics, tmp_path: Path) -> None:
    topics.make("stream-wrong-later")
    topics.send("stream-wrong-later", range(3))
    Batches().run(topics.stream("stream-wrong-later"), tmp_path)
    ending = topics.stream("stream-wrong-later", endingOffsets="latest")
    with pytest.raises(StreamingQueryException) as caught:
        Batches().run(ending, tmp_path)
    assert reason_of(str(caught.value)).startswith("OptionError: the penstock source: endingOffset")
