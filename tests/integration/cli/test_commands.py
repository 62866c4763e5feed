"""Every command of the README against a cluster of `penstock dev`."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.raft_meta.core.versions import METADATA_VERSION
from tests.integration.cli.dev_cluster import COMMAND, DevCluster
from tests.integration.cluster import environment_without_penstock
from tests.support import wait_until

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def dev(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DevCluster]:
    cluster = DevCluster(tmp_path_factory.mktemp("commands") / "data", 27_000)
    try:
        cluster.start()
        cluster.ok("topics", "create", "orders", "--partitions", "6", "--replication-factor", "3")
        yield cluster
    finally:
        cluster.close()


def test_the_ready_line_names_every_broker(dev: DevCluster) -> None:
    wanted = ",".join(f"127.0.0.1:{dev.base_port + i}" for i in range(3))
    assert dev.bootstrap == wanted


def test_partitions_lie_where_the_documentation_says(dev: DevCluster) -> None:
    for node in (1, 2, 3):
        logs = dev.directory / f"node-{node}" / "logs"
        wait_until(
            lambda logs=logs: (logs / "orders-5").is_dir(), f"{logs} has the topic's partitions"
        )


def test_topics_are_listed_and_described(dev: DevCluster) -> None:
    assert "orders" in dev.ok("topics", "list")
    described = dev.ok("topics", "describe", "orders")
    assert "PartitionCount: 6  ReplicationFactor: 3" in described
    (topic,) = dev.json("topics", "describe", "orders")
    assert [entry["partition"] for entry in topic["partitions"]] == list(range(6))
    assert all(sorted(entry["replicas"]) == [1, 2, 3] for entry in topic["partitions"])
    assert {entry["leader"] for entry in topic["partitions"]} == {1, 2, 3}
    assert [entry["out_of_sync"] for entry in topic["partitions"]] == [[]] * 6


def test_a_topic_is_made_once_and_deleted(dev: DevCluster) -> None:
    configs = ("--config", "min.insync.replicas=1", "--config", "segment.bytes=1048576")
    assert dev.ok("topics", "create", "passing", *configs) == "created topic passing\n"
    assert "exists already" in dev.refused("topics", "create", "passing")
    assert "stays as it is" in dev.ok("topics", "create", "passing", "--if-not-exists")
    (topic,) = dev.json("topics", "describe", "passing")
    assert topic["configs"] == {"min.insync.replicas": "1", "segment.bytes": "1048576"}
    assert dev.ok("topics", "delete", "passing") == "deleted topic passing\n"
    assert "passing" not in dev.ok("topics", "list")


def test_a_topic_is_altered_and_obeys_at_once(dev: DevCluster) -> None:
    dev.ok("topics", "create", "narrow", "--config", "max.message.bytes=1000")
    line = b"x" * 5000 + b"\n"
    errors = dev.refused("produce", "narrow", stdin=line)
    assert "`penstock topics alter narrow --config max.message.bytes=5070`" in errors
    wider = ("--config", "max.message.bytes=20000", "--config", "min.insync.replicas=1")
    assert dev.ok("topics", "alter", "narrow", *wider) == (
        "altered topic narrow: max.message.bytes=20000, min.insync.replicas=1\n"
    )

    def accepted() -> bool:
        return dev.run("produce", "narrow", stdin=line).status == 0

    # Each leader learns it from the metadata log, moments after the controller said yes.
    wait_until(accepted, "the new limit to count", 10.0)
    assert dev.json("topics", "alter", "narrow", "--reset", "max.message.bytes") == {
        "name": "narrow",
        "set": {},
        "reset": ["max.message.bytes"],
    }
    (topic,) = dev.json("topics", "describe", "narrow")
    assert topic["configs"] == {"min.insync.replicas": "1"}
    assert "did you mean 'narrow'?" in dev.refused("topics", "alter", "narow", *wider)
    errors = dev.refused("topics", "alter", "narrow", "--config", "max.message.byte=1")
    assert "did you mean 'max.message.bytes'?" in errors
    assert "next: correct what --config" in errors


def test_partitions_move_and_their_leaders_are_elected(dev: DevCluster) -> None:
    dev.ok("topics", "create", "moving", "--partitions", "3", "--replication-factor", "1")
    shown = dev.ok("partitions", "reassign", "moving", "--replicas", "1,2,3", "--dry-run")
    assert "nothing was moved" in shown
    moves = dev.json("partitions", "reassign", "moving", "--replicas", "1,2,3")
    assert [move["to"] for move in moves] == [[1, 2, 3], [2, 3, 1], [3, 1, 2]]

    def moved() -> bool:
        return dev.json("partitions", "reassign", "--list") == []

    wait_until(moved, "the moves are over", 30.0)
    assert dev.ok("partitions", "reassign", "--list") == "nothing moves\n"
    (topic,) = dev.json("topics", "describe", "moving")
    assert [part["replicas"] for part in topic["partitions"]] == [[1, 2, 3], [2, 3, 1], [3, 1, 2]]
    plan = dev.directory.with_name("plan.json")
    plan.write_text('{"partitions": [{"topic": "moving", "partition": 0, "replicas": [2, 1, 3]}]}')
    assert "moving-0" in dev.ok("partitions", "reassign", "--file", str(plan))
    elected = dev.json("partitions", "elect", "moving:0")
    assert elected in ([{"topic": "moving", "partition": 0, "leader": 2}], [])
    (topic,) = dev.json("topics", "describe", "moving")
    assert topic["partitions"][0]["leader"] == 2
    dev.ok("partitions", "elect", "moving")
    (topic,) = dev.json("topics", "describe", "moving")
    assert [part["leader"] for part in topic["partitions"]] == [2, 2, 3]
    assert dev.ok("partitions", "elect", "moving") == "no election was needed\n"
    assert "nothing was cancelled" in dev.ok("partitions", "reassign", "moving", "--cancel")


def test_a_broker_is_drained(dev: DevCluster) -> None:
    dev.ok("topics", "create", "draining", "--partitions", "3", "--replication-factor", "2")
    leaving = ("draining", "--from-broker", "3")
    shown = dev.ok("partitions", "reassign", *leaving, "--dry-run")
    assert "nothing was moved" in shown
    moves = dev.json("partitions", "reassign", *leaving)
    assert moves
    for move in moves:
        assert 3 in move["from"]
        assert sorted(move["to"]) == [1, 2]

    def drained() -> bool:
        (topic,) = dev.json("topics", "describe", "draining")
        return all(sorted(part["replicas"]) == [1, 2] for part in topic["partitions"])

    wait_until(drained, "the broker has none of the topic any more", 30.0)
    assert "has no replicas" in dev.ok("partitions", "reassign", *leaving)
    assert dev.json("partitions", "reassign", *leaving) == []
    everything = ("partitions", "reassign", "--from-broker", "3", "--to")
    errors = dev.refused(*everything, "1,2", "--dry-run")
    assert "have replicas on every broker that could take one (1, 2)" in errors
    assert "next: add a broker" in errors
    for arguments in (("--from-broker", "7"), ("--from-broker", "3", "--to", "1,7")):
        errors = dev.refused("partitions", "reassign", *arguments)
        assert "broker 7 is not registered; the brokers are 1, 2, 3" in errors


def test_impossible_moves_are_refused(dev: DevCluster) -> None:
    errors = dev.refused("partitions", "reassign", "orders", "--replicas", "1,9")
    assert "not registered: [9]" in errors
    assert "next: choose among the brokers" in errors
    assert "no topic 'ordes'" in dev.refused(
        "partitions", "reassign", "ordes", "--replicas", "1,2,3"
    )
    for command in (("reassign", "orders:77", "--replicas", "1,2,3"), ("elect", "orders:77")):
        errors = dev.refused("partitions", *command)
        assert "orders has no partition 77; it has 6, from 0 to 5" in errors
        assert "next: name one of these" in errors
    for arguments in (
        ("orders",),
        ("orders", "--replicas", "1,x"),
        ("--replicas", "1"),
        ("orders", "--list", "--cancel"),
        (":3", "--cancel"),
    ):
        dev.refused("partitions", "reassign", *arguments, status=2)
    plan = dev.directory.with_name("no-plan.json")
    for text in ("[]", '{"partitions": []}', "junk", '{"partitions": [{"topic": "a"}]}'):
        plan.write_text(text)
        assert "wanted" in dev.refused("partitions", "reassign", "--file", str(plan))
    dev.refused("partitions", "elect", "--unclean", status=2)


def test_settings_of_the_cluster_are_changed_and_shown_with_their_origin(dev: DevCluster) -> None:
    def setting(key: str) -> tuple[str, str]:
        entries = dev.json("cluster", "describe", "--configs", "--node", "2")
        return next((entry["value"], entry["source"]) for entry in entries if entry["key"] == key)

    errors = dev.refused("cluster", "describe", "--configs", "--node", "77")
    assert "broker 77 is not registered; the brokers are 1, 2, 3" in errors
    assert "next: name one of these" in errors
    key = "replica.lag.time.max.ms"
    assert setting(key) == ("10000", "default")
    assert setting("node.id") == ("2", "node file")
    assert dev.ok("cluster", "alter", "--config", f"{key}=9000") == (
        f"altered the cluster: {key}=9000\n"
    )
    wait_until(lambda: setting(key) == ("9000", "cluster"), "node 2 to know it", 10.0)
    assert "cluster" in dev.ok("cluster", "describe", "--configs")
    assert dev.json("cluster", "alter", "--delete-config", key) == {"set": {}, "deleted": [key]}
    wait_until(lambda: setting(key) == ("10000", "default"), "node 2 to know it", 10.0)
    errors = dev.refused("cluster", "alter", "--config", "replica.lag.max.ms=1")
    assert f"did you mean '{key}'?" in errors
    assert "next: correct what --config" in errors
    dev.refused("cluster", "alter", status=2)
    dev.refused("cluster", "describe", "--node", "1", status=2)


def test_a_topic_grows_and_shows_the_origin_of_its_configs(dev: DevCluster) -> None:
    dev.ok("topics", "create", "grown", "--config", "retention.ms=5000")
    assert "3 partitions" in dev.ok("topics", "alter", "grown", "--partitions", "3")
    (topic,) = dev.json("topics", "describe", "grown")
    assert topic["partition_count"] == 3
    assert "3 is not more" in dev.refused("topics", "alter", "grown", "--partitions", "3")
    sources = {
        entry["key"]: entry["source"]
        for entry in dev.json("topics", "describe", "grown", "--configs")
    }
    assert (sources["retention.ms"], sources["segment.ms"]) == ("topic", "default")
    assert "retention.ms" in dev.ok("topics", "describe", "grown", "--configs")


def test_the_oldest_records_of_a_partition_are_deleted(dev: DevCluster) -> None:
    dev.ok("topics", "create", "pruned", "--partitions", "1")
    lines = [f"line {number}" for number in range(10)]
    result = dev.run("produce", "pruned", stdin="\n".join(lines).encode() + b"\n")
    assert result.status == 0, result.stderr
    delete = ("topics", "delete-records", "pruned", "--before")
    assert dev.ok(*delete, "0=4") == "pruned-0 begins at offset 4\n"
    assert dev.consumed("pruned", "--max-records", "6") == lines[4:]
    assert "high watermark 10" in dev.refused(*delete, "0=11")
    assert dev.json(*delete, "0=end") == {
        "topic": "pruned",
        "partition": 0,
        "log_start_offset": 10,
    }


def test_the_level_of_the_cluster_and_its_members(dev: DevCluster) -> None:
    assert "already" in dev.ok("cluster", "upgrade")
    assert dev.json("cluster", "upgrade")["metadata_version"] == METADATA_VERSION
    errors = dev.refused("cluster", "upgrade", "--metadata-version", "99")
    assert "next: install the same Penstock on every node" in errors
    assert "is alive" in dev.refused("cluster", "unregister", "1")
    errors = dev.refused("cluster", "unregister", "77")
    assert "next: `penstock cluster describe` lists the brokers" in errors


def test_lines_come_back_as_they_went_in(dev: DevCluster) -> None:
    dev.ok("topics", "create", "lines")
    lines = [f"line {number} äöü \t x" for number in range(500)]
    result = dev.run(
        "produce", "lines", "--compression", "zstd", stdin="\n".join(lines).encode() + b"\n"
    )
    assert result.status == 0, result.stderr
    assert re.match(r"500 records, [0-9.]+ kB in ", result.stderr)
    assert dev.consumed("lines", "--max-records", "500") == lines
    assert dev.consumed("lines") == lines


@pytest.mark.parametrize("acks", ["0", "1", "all"])
def test_every_way_to_acknowledge_writes(dev: DevCluster, acks: str) -> None:
    topic = f"acks-{acks}"
    dev.ok("topics", "create", topic)
    dev.ok("produce", topic, "--acks", acks, stdin=b"one\ntwo\n")
    assert dev.consumed(topic, "--max-records", "2") == ["one", "two"]


def test_the_same_key_goes_to_the_same_partition(dev: DevCluster) -> None:
    dev.ok("topics", "create", "keyed", "--partitions", "4")
    lines = "".join(f"user-{number % 7} did {number}\n" for number in range(70))
    dev.ok("produce", "keyed", "--key-regex", r"^(\S+)", stdin=lines.encode())
    records = [
        json.loads(line)
        for line in dev.consumed("keyed", "--format", "json", "--max-records", "70")
    ]
    assert sorted(record["value"] for record in records) == sorted(lines.splitlines())
    places: dict[str, set[int]] = {}
    for record in records:
        assert record["value"].startswith(record["key"])
        places.setdefault(record["key"], set()).add(record["partition"])
    assert all(len(partitions) == 1 for partitions in places.values())
    for partition in range(4):
        offsets = [record["offset"] for record in records if record["partition"] == partition]
        assert sorted(offsets) == list(range(len(offsets)))


def test_one_partition_is_read_at_an_offset(dev: DevCluster) -> None:
    dev.ok("topics", "create", "counted")
    dev.ok("produce", "counted", stdin=b"".join(b"%d\n" % number for number in range(10)))
    at_seven = dev.ok(
        "consume", "counted", "--partition", "0", "--offset", "7", "--max-records", "2"
    )
    assert at_seven.split() == ["7", "8"]
    end = dev.ok("consume", "counted", "--partition", "0", "--offset", "latest", "--timeout", "1")
    assert end == ""
    assert "has offsets 0 to 10, 99 is outside" in dev.refused(
        "consume", "counted", "--partition", "0", "--offset", "99", "--timeout", "5"
    )


def test_a_group_goes_on_where_it_stopped(dev: DevCluster) -> None:
    dev.ok("topics", "create", "shared", "--partitions", "2")
    lines = b"".join(b"%d %d\n" % (number % 5, number) for number in range(20))
    dev.ok("produce", "shared", "--key-separator", " ", stdin=lines)
    options = ("--group", "readers")
    first = dev.consumed("shared", *options, "--max-records", "7")
    assert len(first) == 7
    rest = dev.consumed("shared", *options)
    assert sorted(map(int, first + rest)) == list(range(20))
    assert dev.consumed("shared", *options) == []

    assert {"group_id": "readers", "state": "empty", "member_count": 0} in [
        {name: group[name] for name in ("group_id", "state", "member_count")}
        for group in dev.json("groups", "list")
    ]
    (group,) = dev.json("groups", "describe", "readers")
    assert [entry["lag"] for entry in group["partitions"]] == [0, 0]
    dev.ok("produce", "shared", stdin=b"20\n21\n22\n")
    (group,) = dev.json("groups", "describe", "readers")
    assert sum(entry["lag"] for entry in group["partitions"]) == 3


def test_ctrl_c_leaves_the_group_at_once_and_commits(dev: DevCluster) -> None:
    dev.ok("topics", "create", "stopped")
    dev.ok("produce", "stopped", stdin=b"one\ntwo\n")
    consumer = subprocess.Popen(
        [*COMMAND, *("consume", "stopped", "--group", "leavers", "--from-beginning")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment_without_penstock() | {"PENSTOCK_BOOTSTRAP": dev.bootstrap},
    )
    assert consumer.stdout is not None
    assert [consumer.stdout.readline() for _ in range(2)] == [b"one\n", b"two\n"]
    (group,) = dev.json("groups", "describe", "leavers")
    (member,) = group["members"]
    assert member["host"].split(":")[0] in ("127.0.0.1", "ipv4", "localhost")
    assert member["assigned"] == [{"topic": "stopped", "partition": 0}]
    consumer.send_signal(signal.SIGINT)
    _, errors = consumer.communicate(timeout=20)
    assert consumer.returncode == 130
    assert errors == b""
    (group,) = dev.json("groups", "describe", "leavers")
    assert group["members"] == []
    assert [entry["lag"] for entry in group["partitions"]] == [0]


def test_the_cluster_is_described(dev: DevCluster) -> None:
    cluster = dev.json("cluster", "describe")
    assert [broker["fenced"] for broker in cluster["brokers"]] == [False] * 3
    assert cluster["quorum"]["leader_id"] == cluster["controller_id"] > 0
    table = dev.ok("cluster", "describe")
    assert table.count("live") == 3
    assert table.count("follower") == 2


def test_every_segment_is_sound(dev: DevCluster) -> None:
    dev.ok("produce", "orders", stdin=b"".join(b"%d\n" % number for number in range(1000)))
    segments = sorted(dev.directory.glob("node-*/logs/orders-*/*.log"))
    assert len(segments) == 18
    records = 0
    for segment in segments[:6]:
        *_, verdict = dev.ok(
            "log", "dump", str(segment), "--verify", "--output", "json"
        ).splitlines()
        assert json.loads(verdict)["ok"], verdict
        records += json.loads(verdict)["records"]
    assert records == 1000


# --- What users get wrong ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [["consume", "ordrs"], ["produce", "ordrs"], ["topics", "describe", "ordrs"]],
    ids=lambda arguments: arguments[0],
)
def test_an_unknown_topic_names_the_near_one(dev: DevCluster, arguments: list[str]) -> None:
    errors = dev.refused(*arguments, stdin=b"a line\n")
    assert "'ordrs'" in errors
    assert "did you mean 'orders'?" in errors
    assert "next: `penstock topics list` shows the topics" in errors


def test_an_unknown_config_names_the_near_one(dev: DevCluster) -> None:
    errors = dev.refused("topics", "create", "x", "--config", "min.insync.replica=2")
    assert "unknown topic config 'min.insync.replica'" in errors
    assert "did you mean 'min.insync.replicas'?" in errors


def test_more_replicas_than_brokers_are_refused(dev: DevCluster) -> None:
    errors = dev.refused("topics", "create", "x", "--replication-factor", "4")
    assert "4" in errors
    assert "`penstock cluster describe` lists them" in errors


def test_an_unreachable_address_is_named_with_what_it_resolved_to(dev: DevCluster) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        errors = dev.refused("-b", f"localhost:{port}", "topics", "list")
    assert f"localhost:{port}" in errors
    assert "127.0.0.1" in errors
    assert "refused" in errors
    assert "`penstock dev`" in errors


def test_a_name_that_does_not_resolve_is_named(dev: DevCluster) -> None:
    errors = dev.refused("-b", "no-such-host.invalid:9092", "topics", "list")
    assert "no-such-host.invalid" in errors
    assert "does not resolve" in errors


def test_a_record_that_is_too_large_says_how_large_and_what_is_allowed(dev: DevCluster) -> None:
    large = b"x" * 2_000_000
    result = dev.run("produce", "orders", stdin=b"small\n" + large + b"\nalso small\n")
    assert result.status == 1
    errors = result.stderr
    assert "2 records" in errors
    assert "error (first at line 2)" in errors
    assert "2000000" in errors
    assert "max_request_size=1048576" in errors


def test_a_topic_with_a_larger_limit_takes_larger_records(dev: DevCluster) -> None:
    dev.ok("topics", "create", "large", "--config", "max.message.bytes=4000000")
    line = b"x" * 3_000_000
    errors = dev.refused("produce", "large", stdin=line + b"\n")
    assert "next: send smaller records, or pass --max-request-size BYTES" in errors
    dev.ok("produce", "large", "--max-request-size", "4000000", stdin=line + b"\n")
    assert dev.consumed("large", "--max-records", "1") == [line.decode()]


def test_a_full_disk_behind_a_consumer_is_said_and_nothing_is_committed(dev: DevCluster) -> None:
    dev.ok("topics", "create", "unseen")
    dev.ok("produce", "unseen", stdin=b"one\n")
    with Path("/dev/full").open("wb") as full:
        result = subprocess.run(
            [*COMMAND, *("consume", "unseen", "--group", "blind", "--from-beginning")],
            stdout=full,
            stderr=subprocess.PIPE,
            env=environment_without_penstock() | {"PENSTOCK_BOOTSTRAP": dev.bootstrap},
            timeout=60,
            check=False,
        )
    assert result.returncode == 1
    first, second = result.stderr.splitlines()
    assert first == b"error: cannot write to standard output: No space left on device"
    assert second.startswith(b"next: ")
    assert dev.consumed("unseen", "--group", "blind", "--max-records", "1") == ["one"]


def test_an_unknown_group_is_named(dev: DevCluster) -> None:
    errors = dev.refused("groups", "describe", "nobody")
    assert "'nobody'" in errors
    assert "next: `penstock groups list` shows the groups" in errors


def test_a_port_in_use_is_named_before_anything_starts(dev: DevCluster, tmp_path: Path) -> None:
    errors = dev.refused(
        "dev", "--data-dir", str(tmp_path / "other"), "--base-port", str(dev.base_port)
    )
    assert f"port {dev.base_port} on 127.0.0.1 is in use already" in errors
    assert "--base-port" in errors
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("move", [(), ("--base-port", "27900")], ids=["again", "moved"])
def test_a_cluster_that_runs_is_not_started_again_nor_moved(
    dev: DevCluster, move: tuple[str, ...]
) -> None:
    files = [dev.directory / "cluster.json", *dev.directory.glob("node-*/node.toml")]
    before = [file.read_bytes() for file in files]
    errors = dev.refused("dev", "--data-dir", str(dev.directory), *move)
    first, second = errors.splitlines()
    assert first.startswith(f"error: a cluster runs in {dev.directory}")
    assert second.startswith("next: stop it first")
    assert [file.read_bytes() for file in files] == before


def test_a_directory_in_use_is_refused(dev: DevCluster) -> None:
    errors = dev.refused("node", "--config", str(dev.directory / "node-1" / "node.toml"), status=2)
    first, second = errors.splitlines()[-2:]
    assert "in use" in first
    assert second == "next: stop that node first"


def test_a_partition_that_is_not_there_says_which_are(dev: DevCluster) -> None:
    first, second = dev.refused("consume", "orders", "--partition", "77").splitlines()
    assert "no partition 77; it has 6, from 0 to 5" in first
    assert second == "next: name one of these with --partition, or leave it out to read all"


def test_a_directory_of_another_cluster_is_refused(tmp_path: Path, dev: DevCluster) -> None:
    data = tmp_path / "disk"
    formatted = dev.json("format", "--data-dir", str(data), "--node-id", "1")
    assert formatted["formatted"] is True
    assert dev.json(
        *("format", "--data-dir", str(data), "--node-id", "1"),
        *("--cluster-id", formatted["cluster_id"]),
    ) == formatted | {"formatted": False}
    errors = dev.refused(
        "format", "--data-dir", str(data), "--node-id", "1", "--cluster-id", "another"
    )
    assert f"belongs to cluster {formatted['cluster_id']}, not to another" in errors
    errors = dev.refused(
        "node",
        *("--config", str(dev.directory / "node-1" / "node.toml"), "--set", f"data.dir={data}"),
        *("--set", "node.id=2", "--set", "controller.listen=127.0.0.1:1"),
        status=2,
    )
    assert "belongs to node 1, not to node 2" in errors
