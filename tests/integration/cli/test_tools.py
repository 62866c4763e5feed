"""The tools of the command against a cluster of `penstock dev`: bench, groups, offsets, replay."""

from __future__ import annotations

import json
import re
import shlex
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.client import Consumer, ConsumerRecord, Producer, TransactionAbortableError
from tests.integration.cli.dev_cluster import COMMAND, DevCluster
from tests.integration.cluster import environment_without_penstock
from tests.support import wait_until

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def dev(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DevCluster]:
    cluster = DevCluster(tmp_path_factory.mktemp("tools") / "data", 27_300)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.close()


# --- penstock bench -------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["send", "many"])
def test_writing_is_measured_and_leaves_nothing(dev: DevCluster, mode: str) -> None:
    options = ("--records", "3000", "--size", "50", "--linger-ms", "1", "--mode", mode)
    figures = dev.json("bench", "produce", *options)
    assert (figures["records"], figures["errors"]) == (3000, 0)
    assert figures["records_per_s"] > 0
    assert figures["mb_per_s"] == pytest.approx(figures["records_per_s"] * 50 / 1e6, rel=0.05)
    assert figures["cpu_s_per_million"] > 0
    assert 0 < figures["p50_ms"] <= figures["p99_ms"] <= figures["max_ms"]
    assert dev.json("topics", "list") == []


@pytest.mark.parametrize("mode", ["iterate", "poll", "poll_batch", "arrow"])
def test_reading_is_measured(dev: DevCluster, mode: str) -> None:
    figures = dev.json("bench", "consume", "--mode", mode, "--records", "2000", "--size", "30")
    assert (figures["records"], figures["mode"]) == (2000, mode)
    assert figures["mb_per_s"] == pytest.approx(figures["records_per_s"] * 30 / 1e6, rel=0.05)
    assert dev.json("topics", "list") == []


def test_a_topic_that_is_there_is_read_as_it_is(dev: DevCluster) -> None:
    dev.ok("topics", "create", "kept", "--partitions", "2")
    dev.ok("bench", "produce", "--topic", "kept", "--records", "100", "--size", "10")
    # One record to each partition warmed up.
    assert dev.json("bench", "consume", "--topic", "kept", "--mode", "poll")["records"] == 102
    dev.ok("topics", "delete", "kept")


def test_ctrl_c_prints_what_was_measured_so_far(dev: DevCluster) -> None:
    command = ("bench", "latency", "--records", "100000", "--rate", "100", "--output", "json")
    running = subprocess.Popen(
        [*COMMAND, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment_without_penstock() | {"PENSTOCK_BOOTSTRAP": dev.bootstrap},
    )
    assert running.stderr is not None
    # The first line of its progress.
    assert b" of 100,000 records" in running.stderr.readline()
    running.send_signal(signal.SIGINT)
    out, errors = running.communicate(timeout=30)
    assert running.returncode == 130, errors
    figures = json.loads(out)
    assert 100 <= figures["records"] < 100_000
    assert (figures["errors"], figures["unacknowledged"]) == (0, 0)
    assert figures["longest_gap_ms"] > 0
    assert dev.json("topics", "list") == []


# --- penstock groups and penstock offsets ---------------------------------------------------------


def lags(dev: DevCluster, group_id: str) -> list[int]:
    (group,) = dev.json("groups", "describe", group_id)
    return [entry["lag"] for entry in group["partitions"]]


def test_offsets_of_a_group_are_saved_moved_and_restored(dev: DevCluster, tmp_path: Path) -> None:
    dev.ok("topics", "create", "moved", "--partitions", "2")
    # Keys of both partitions.
    lines = b"".join(b"%d %d\n" % (number % 5, number) for number in range(20))
    dev.ok("produce", "moved", "--key-separator", " ", stdin=lines)
    (ends, starts) = (
        [entry["offset"] for entry in dev.json("offsets", "get", "moved", "--at", at)]
        for at in ("latest", "earliest")
    )
    assert (sum(ends), starts) == (20, [0, 0])
    everything = ("--group", "movers", "--max-records", "20", "--timeout", "30")
    assert len(dev.consumed("moved", *everything)) == 20
    saved = tmp_path / "saved.json"
    dev.ok("groups", "offsets", "export", "movers", "--file", str(saved))

    reset = ("groups", "offsets", "reset", "movers", "--topic", "moved")
    assert "nothing was changed" in dev.ok(*reset, "--to", "earliest")
    assert lags(dev, "movers") == [0, 0]
    assert "committed 2 offsets" in dev.ok(*reset, "--to", "earliest", "--execute")
    assert sorted(map(int, dev.consumed("moved", *everything))) == list(range(20))

    [change, _] = dev.json(*reset, "--shift-by", "-1000", "--execute")["offsets"]
    assert (change["new_offset"], change["asked_offset"]) == (0, change["committed_offset"] - 1000)
    assert sum(lags(dev, "movers")) > 0
    dev.ok("groups", "offsets", "import", "movers", str(saved), "--execute")
    assert lags(dev, "movers") == [0, 0]
    # Another group begins where that one stood.
    dev.ok("groups", "offsets", "import", "successors", str(saved), "--execute")
    assert lags(dev, "successors") == [0, 0]
    dev.ok("groups", "delete", "successors")
    assert "'successors'" in dev.refused("groups", "delete", "successors")


def test_offsets_of_topics_that_nobody_reads_are_forgotten(dev: DevCluster) -> None:
    for topic in ("read", "unread"):
        dev.ok("topics", "create", topic, "--partitions", "2")
    begin = ("--to", "earliest", "--execute")
    dev.ok("groups", "offsets", "reset", "leavers", "--topic", "read", "--topic", "unread", *begin)

    def committed() -> list[str]:
        (group,) = dev.json("groups", "describe", "leavers")
        entries = [e for e in group["partitions"] if e["committed_offset"] is not None]
        return [f"{entry['topic']}-{entry['partition']}" for entry in entries]

    delete = ("groups", "offsets", "delete", "leavers")
    with Consumer(dev.bootstrap, group_id="leavers", topics=["read"]) as member:
        wait_until(
            lambda: member.poll(50) == [] and len(member.assignment()) == 2, "it is a member"
        )
        assert "add --execute" in dev.ok(*delete, "--topic", "unread")
        assert len(committed()) == 4
        assert "deleted 1 offset" in dev.ok(*delete, "--topic", "unread:1", "--execute")
        assert committed() == ["read-0", "read-1", "unread-0"]
        errors = dev.refused(*delete, "--topic", "read", "--execute")
        assert "has members that read topic 'read'" in errors
        assert "no offset for unread-1" in dev.refused(*delete, "--topic", "unread:1", "--execute")
    report = dev.json(*delete, "--topic", "read", "--topic", "unread", "--execute")
    assert len(report["offsets"]) == 3
    assert "'leavers' does not exist" in dev.refused("groups", "describe", "leavers")


def test_a_time_is_found_in_a_log(dev: DevCluster) -> None:
    dev.ok("topics", "create", "timed")
    dev.ok("produce", "timed", stdin=b"one\ntwo\n")
    times = [
        json.loads(line)["timestamp_ms"]
        for line in dev.consumed(
            "timed", "--format", "json", "--max-records", "2", "--timeout", "30"
        )
    ]
    (entry,) = dev.json("offsets", "get", "timed", "--at", str(times[0]))
    assert (entry["offset"], entry["timestamp_ms"]) == (0, times[0])
    (entry,) = dev.json("offsets", "get", "timed", "--at", "2100-01-01")
    assert entry["offset"] is None
    (entry,) = dev.json("offsets", "get", "timed:0", "--at", "max-timestamp")
    assert entry["timestamp_ms"] == max(times)
    assert "did you mean 'timed'?" in dev.refused("offsets", "get", "tmied")


def test_a_group_with_members_is_sound_and_keeps_its_offsets(dev: DevCluster) -> None:
    dev.ok("topics", "create", "guarded", "--partitions", "4")
    with (
        Consumer(dev.bootstrap, group_id="guards", topics=["guarded"]) as one,
        Consumer(dev.bootstrap, group_id="guards", topics=re.compile("guard.*")) as two,
    ):

        def shared() -> bool:
            one.poll(0)
            two.poll(0)
            return len(one.assignment()) == len(two.assignment()) == 2

        wait_until(shared, "the members share the partitions", 20.0)
        assert dev.ok("groups", "verify", "guards") == (
            "group guards is sound: stable, 2 members, 4 partitions held\n"
        )
        reset = ("groups", "offsets", "reset", "guards", "--topic", "guarded", "--to", "latest")
        dev.ok(*reset)
        errors = dev.refused(*reset, "--execute")
        assert "group guards has 2 members" in errors
        assert "next: stop them, and try again" in errors
        assert "2 members" in dev.refused("groups", "delete", "guards")
    verdict = dev.json("groups", "verify", "guards")
    assert (verdict["sound"], verdict["members"]) == (True, 0)


# --- penstock replay ------------------------------------------------------------------------------


def contents(bootstrap: str, topic: str, count: int) -> list[tuple[object, ...]]:
    """Everything of so many records but where they are; by key."""
    with Consumer(bootstrap, topics=[topic], auto_offset_reset="earliest") as consumer:
        found: list[ConsumerRecord] = []

        def all_there() -> bool:
            found.extend(consumer.poll(200))
            return len(found) >= count

        wait_until(all_there, f"{count} records of {topic}", 20.0)
        assert consumer.poll(0) == []
    return sorted((one.key, one.value, one.headers, one.timestamp_ms) for one in found)


def test_a_topic_is_copied_and_interrupted_and_goes_on(dev: DevCluster) -> None:
    dev.ok("topics", "create", "from", "--partitions", "2")
    dev.ok("topics", "create", "to", "--partitions", "2")
    dev.ok("topics", "create", "wide", "--partitions", "5")
    with Producer(dev.bootstrap) as producer:
        for number in range(2_000):
            producer.send(
                "from",
                b"" if number % 7 else None,
                b"%04d" % number,
                [("n", b"%d" % number), ("empty", None)],
                timestamp_ms=1_600_000_000_000 + number,
            )
    wanted = contents(dev.bootstrap, "from", 2_000)

    running = subprocess.Popen(
        [*COMMAND, "replay", "from", "to", "--rate", "100"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment_without_penstock() | {"PENSTOCK_BOOTSTRAP": dev.bootstrap},
    )
    assert running.stderr is not None
    # The first line of its progress.
    assert b" of 2,000 records" in running.stderr.readline()
    running.send_signal(signal.SIGINT)
    out, errors = running.communicate(timeout=30)
    assert running.returncode == 130, errors
    assert re.match(rb"replayed [\d,]+ records", out)
    rest = errors.decode().partition("to go on: penstock ")[2].strip()
    words = shlex.split(rest)
    words[words.index("--rate") + 1] = "0"
    report = json.loads(dev.ok(*words, "--output", "json"))
    assert report["complete"] is True
    assert 0 < report["records"] < 2_000
    assert contents(dev.bootstrap, "to", 2_000) == wanted, "nothing lost, nothing doubled"

    dev.ok("replay", "from", "wide", "--partition-by", "key")
    assert contents(dev.bootstrap, "wide", 2_000) == wanted
    # The last ten by their time.
    last = ("--from", "1600000001990", "--max-records", "50", "--output", "json")
    assert json.loads(dev.ok("replay", "from", "to", *last))["records"] == 10
    assert "next: choose --partition-by key" in dev.refused("replay", "wide", "to")


# --- penstock transactions ------------------------------------------------------------------------


def test_an_open_transaction_is_seen_and_ended(dev: DevCluster) -> None:
    dev.ok("topics", "create", "paid", "--partitions", "2")
    with Producer(dev.bootstrap, transactional_id="till-1") as producer:
        producer.begin_transaction()
        producer.send("paid", b"never", partition=1).result(20)
        [listed] = dev.json("transactions", "list", "--state", "ongoing")
        assert listed["transactional_id"] == "till-1"
        assert listed["since_ms"] > 0
        [described] = dev.json("transactions", "describe", "till-1")
        assert described["partitions"] == [{"topic": "paid", "partition": 1}]
        hanging = dev.json("transactions", "hanging", "--longer-than", "0")
        assert hanging == {"hanging": [], "in_doubt": [], "not_searched": []}
        assert "till-1" in dev.ok("transactions", "abort", "till-1")
        with pytest.raises(TransactionAbortableError):
            producer.commit_transaction()
        producer.abort_transaction()
        assert "aborted by timeout_or_person" in dev.ok("transactions", "describe", "till-1")
        # By its place, as if its coordinator were lost for good.
        producer.begin_transaction()
        producer.send("paid", b"neither", partition=1).result(20)
        place = ("--topic", "paid", "--partition", "1", "--producer-id", str(listed["producer_id"]))
        assert "'till-1' has this transaction" in dev.refused("transactions", "abort", *place)
        dev.ok("transactions", "abort", *place, "--force")
        with Producer(dev.bootstrap) as plain:
            plain.send("paid", b"plain", partition=1).result(20)
        with Consumer(
            dev.bootstrap,
            topics="paid",
            auto_offset_reset="earliest",
            isolation_level="read_committed",
        ) as consumer:
            assert [record.value for record in consumer.poll(20_000)] == [b"plain"]
    with Producer(dev.bootstrap, transactional_id="till-2") as producer, producer.transaction():
        producer.send("paid", b"last", partition=1)
    # Behind the last record there is a mark; in partition 0 there is nothing.
    group = ("consume", "paid", "--group", "cashier", "--timeout", "1")
    committed = ("--isolation-level", "read_committed")
    assert dev.ok(*group, "--from-beginning", *committed).split() == ["plain", "last"]
    [described] = dev.json("groups", "describe", "cashier")
    assert {entry["lag"] for entry in described["partitions"]} == {0}
    dev.ok("topics", "delete", "paid")
