"""A bit flips on the disk of a real node, or files go: nobody is served it, and it is mended."""

from __future__ import annotations

import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import lmdb
import pytest

from penstock.broker.storage.checkpoints import read_metadata
from penstock.broker.storage.damage_notes import NOTE_FILE, encode_note
from penstock.broker.storage.local_state import DIRECTORY_NAME, PartitionState
from penstock.client import AdminClient, Consumer
from penstock.client.descriptions import PartitionDescription
from penstock.wire.errors import CorruptRecordError, ErrorCode
from penstock.wire.ids import TopicPartition
from penstock.wire.records import RecordData, encode_batch
from tests.integration.cluster import Cluster
from tests.integration.ports import free_ports
from tests.integration.raw import batch_of, fetch_at, produce_at, read_all
from tests.support import wait_until

pytestmark = pytest.mark.integration

TIMEOUT_S = 60.0
RECORDS = 40


class Scrubbed(Cluster):
    """Three nodes; only those that are asked to scrub do, again and again."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, settings={"leader.imbalance.enable": False})
        self.metrics: dict[int, str] = {}
        for node, port in zip(self.nodes.values(), free_ports(3), strict=True):
            self.metrics[node.node_id] = f"127.0.0.1:{port}"
            with node.config.open("a") as config:
                config.write(f'metrics.listen = "{self.metrics[node.node_id]}"\n')

    def scrub(self, *nodes: int) -> None:
        for node_id in nodes:
            with self.nodes[node_id].config.open("a") as config:
                config.write("scrub.interval.ms = 200\n")

    def metric(self, node_id: int, name: str) -> float:
        with urllib.request.urlopen(f"http://{self.metrics[node_id]}/metrics", timeout=5) as page:
            lines = page.read().decode().splitlines()
        return next(float(line.split()[1]) for line in lines if line.startswith(f"{name} "))

    def closed_segments(self, node_id: int, topic: str) -> list[Path]:
        made = self.nodes[node_id].partition_directory(topic, 0)
        return sorted(made.glob("*.log"))[:-1]

    def contents(self, node_id: int, topic: str) -> list[bytes]:
        return [path.read_bytes() for path in self.closed_segments(node_id, topic)]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Scrubbed]:
    made = Scrubbed(tmp_path)
    try:
        yield made
    finally:
        made.close()


def values() -> list[bytes]:
    return [f"record {number} ".encode() + b"x" * 300 for number in range(RECORDS)]


def make(cluster: Scrubbed, topic: str, replicas: list[int], **configs: str) -> str:
    """Make a topic of one partition with small segments; the address of its leader."""
    settings = {name.replace("_", "."): value for name, value in configs.items()}
    settings["segment.bytes"] = "4096"
    with AdminClient(cluster.bootstrap) as admin:
        admin.create_topic(topic, replica_assignments=[replicas], configs=settings)
    wait_until(lambda: leader(cluster, topic) == replicas[0], "it leads", TIMEOUT_S)
    return cluster.nodes[replicas[0]].address


def write(address: str, topic: str, data: bytes) -> None:
    """Append a batch to partition 0. A broker may hear later than others that it leads."""

    def is_written() -> bool:
        result = produce_at(address, topic, data)
        is_early = result.error.code == ErrorCode.NOT_LEADER
        assert is_early or not result.HasField("error"), result.error.message
        return not is_early

    wait_until(is_written, "it is written", TIMEOUT_S)


def fill(cluster: Scrubbed, topic: str, replicas: list[int]) -> None:
    """A batch for each record, in segments of a few."""
    address = make(cluster, topic, replicas)
    for value in values():
        write(address, topic, batch_of([value]))


def described(cluster: Scrubbed, topic: str) -> PartitionDescription:
    with AdminClient(cluster.bootstrap) as admin:
        return admin.describe_topics([topic])[0].partitions[0]


def leader(cluster: Scrubbed, topic: str) -> int:
    found = cluster.topic(topic).partitions
    return found[0].leader if found else -1


def flip(path: Path) -> None:
    """One bit of a record in the middle of the file."""
    data = path.read_bytes()
    position = data.index(b"record ", len(data) // 2)
    with path.open("r+b") as file:
        file.seek(position)
        file.write(bytes([data[position] ^ 4]))


def whole(cluster: Scrubbed, topic: str) -> None:
    assert [record.value for record in read_all(cluster, topic, at_least=RECORDS)] == values()


def in_order(cluster: Scrubbed, topic: str) -> bool:
    now = described(cluster, topic)
    return set(now.isr) == {1, 2, 3} and not now.offline


def test_a_bit_that_flips_under_a_running_follower_is_found_by_scrubbing(
    cluster: Scrubbed,
) -> None:
    cluster.scrub(2)
    cluster.start()
    fill(cluster, "t", [1, 2, 3])
    sound = cluster.contents(1, "t")
    wait_until(lambda: cluster.contents(2, "t") == sound, "it has all", TIMEOUT_S)
    flip(cluster.closed_segments(2, "t")[1])
    wait_until(lambda: cluster.metric(2, "penstock_mended_batches_total") == 1, "mended", TIMEOUT_S)
    assert cluster.contents(2, "t") == sound
    assert cluster.metric(2, "penstock_damaged_batches_total") == 1
    wait_until(lambda: in_order(cluster, "t"), "it is in sync again", TIMEOUT_S)
    assert cluster.metric(2, "penstock_damaged_replicas") == 0
    said = cluster.nodes[2].log.read_text()
    assert "damaged batch found" in said
    assert "damaged batch mended" in said
    assert leader(cluster, "t") == 1, "nobody else is concerned"
    kept = list(cluster.nodes[2].partition_directory("t", 0).glob("*.damaged"))
    assert len(kept) == 1, "what was damaged can be looked at"


def test_a_bit_that_flips_under_a_running_leader_is_found_by_reading(cluster: Scrubbed) -> None:
    cluster.start()
    fill(cluster, "t", [1, 2, 3])
    sound = cluster.contents(1, "t")
    flip(cluster.closed_segments(1, "t")[1])
    whole(cluster, "t")  # Another leads by then, and nothing is missing.
    assert leader(cluster, "t") in (2, 3)
    wait_until(lambda: in_order(cluster, "t"), "it is in sync again", TIMEOUT_S)
    assert cluster.contents(1, "t") == sound
    assert cluster.metric(1, "penstock_mended_batches_total") == 1


def test_a_consumer_that_runs_into_a_bit_that_flipped_gets_everything_once_and_in_order(
    cluster: Scrubbed,
) -> None:
    cluster.start()
    fill(cluster, "t", [1, 2, 3])
    flip(cluster.closed_segments(1, "t")[2])
    read: list[bytes] = []
    # Answers of a few records each, so that it runs while the leader comes upon the damage.
    with Consumer(
        cluster.bootstrap,
        topics="t",
        auto_offset_reset="earliest",
        max_partition_fetch_bytes=1_000,
        prefetch_max_bytes=1_000,
    ) as consumer:
        deadline = time.monotonic() + TIMEOUT_S
        while len(read) < RECORDS:
            read += [record.value for record in consumer.poll(500, max_records=1)]
            assert time.monotonic() < deadline, f"only {len(read)} records came"
        assert read == values()
        write(cluster.nodes[leader(cluster, "t")].address, "t", batch_of([b"after"]))
        wait_until(
            lambda: [record.value for record in consumer.poll(500)] == [b"after"],
            "it reads on from the new leader",
            TIMEOUT_S,
        )
    assert leader(cluster, "t") in (2, 3)
    wait_until(lambda: in_order(cluster, "t"), "it is in sync again", TIMEOUT_S)


def test_the_only_replica_serves_what_is_sound_and_refuses_the_rest(cluster: Scrubbed) -> None:
    cluster.scrub(2)
    cluster.start()
    fill(cluster, "t", [2])
    flip(cluster.closed_segments(2, "t")[1])
    wait_until(lambda: cluster.metric(2, "penstock_damaged_replicas") == 1, "found", TIMEOUT_S)
    address = cluster.nodes[2].address
    assert leader(cluster, "t") == 2
    refused = [
        offset
        for offset in range(RECORDS)
        if (answer := fetch_at(address, "t", offset)).HasField("error")
        and answer.error.code == ErrorCode.CORRUPT_MESSAGE
    ]
    assert len(refused) == 1, "one batch holds one record"
    message = fetch_at(address, "t", refused[0]).error.message
    assert "t-0" in message
    assert str(cluster.closed_segments(2, "t")[1]) in message
    assert not produce_at(address, "t", batch_of([b"more"])).HasField("error")
    with Consumer(
        cluster.bootstrap, topics="t", auto_offset_reset="earliest", default_api_timeout_ms=5_000
    ) as consumer:
        read: list[bytes] = []
        while len(read) < refused[0]:
            read += [record.value for record in consumer.poll(None)]
        for _ in range(2):
            with pytest.raises(CorruptRecordError, match=f"t-0, offset {refused[0]}: .*asked for"):
                consumer.poll(None)
        consumer.seek(TopicPartition("t", 0), refused[0] + 1)
        while len(read) < RECORDS:
            read += [record.value for record in consumer.poll(None)]
        assert read == [*values()[: refused[0]], *values()[refused[0] + 1 :], b"more"]
    assert described(cluster, "t").offline == ()
    # Once another replica were in sync it would be asked; nobody is, so nothing was mended.
    assert cluster.metric(2, "penstock_mended_batches_total") == 0


@pytest.mark.parametrize("clean", [True, False])
def test_a_bit_that_flips_while_a_node_is_down_is_found_and_mended(
    cluster: Scrubbed, clean: bool
) -> None:
    cluster.start()
    fill(cluster, "t", [1, 2, 3])
    sound = cluster.contents(1, "t")
    node = cluster.nodes[1]
    _ = node.stop() if clean else node.kill()
    flip(cluster.closed_segments(1, "t")[1])
    cluster.scrub(1)
    cluster.start()
    wait_until(lambda: cluster.contents(1, "t") == sound, "mended", TIMEOUT_S)
    wait_until(lambda: in_order(cluster, "t"), "it is in sync again", TIMEOUT_S)
    # It can serve everything by itself.
    with AdminClient(cluster.bootstrap) as admin:
        admin.alter_cluster_configs(
            {"leader.imbalance.enable": True, "leader.imbalance.check.interval.ms": 100}
        )
    wait_until(lambda: leader(cluster, "t") == 1, "it leads again", TIMEOUT_S)
    whole(cluster, "t")
    assert leader(cluster, "t") == 1


def test_what_a_node_knew_to_be_damaged_it_mends_after_a_restart(cluster: Scrubbed) -> None:
    cluster.start()
    fill(cluster, "t", [1, 2, 3])
    sound = cluster.contents(1, "t")
    wait_until(lambda: cluster.contents(2, "t") == sound, "it has all", TIMEOUT_S)
    cluster.nodes[2].stop()
    damaged = cluster.closed_segments(2, "t")[1]
    flip(damaged)
    note = damaged.with_name(NOTE_FILE)
    topic_id = read_metadata(damaged.parent).topic_id
    note.write_bytes(encode_note(topic_id, [int(damaged.stem)]))
    cluster.nodes[2].start()  # Which scrubs nothing, and leads nothing that anybody reads.
    wait_until(lambda: cluster.contents(2, "t") == sound, "mended", TIMEOUT_S)
    wait_until(lambda: in_order(cluster, "t"), "it is in sync again", TIMEOUT_S)
    wait_until(lambda: not note.exists(), "it is forgotten", TIMEOUT_S)


def test_what_is_damaged_on_every_replica_is_told_and_heals_when_it_is_deleted(
    cluster: Scrubbed,
) -> None:
    cluster.start()
    fill(cluster, "t", [1, 2, 3])
    sound = cluster.contents(1, "t")
    for node_id in (2, 3):
        wait_until(lambda: cluster.contents(node_id, "t") == sound, "it has all", TIMEOUT_S)  # noqa: B023 - It is called here and now.
    for node_id in (1, 2, 3):
        cluster.nodes[node_id].stop()
        flip(cluster.closed_segments(node_id, "t")[1])
    cluster.scrub(1, 2, 3)
    cluster.start()

    def are_unmendable(count: int) -> bool:
        name = "penstock_unmendable_replicas"
        return [cluster.metric(node_id, name) for node_id in (1, 2, 3)] == [count] * 3

    wait_until(lambda: are_unmendable(1), "everybody says so", TIMEOUT_S)
    now = described(cluster, "t")
    assert (now.isr, len(now.offline)) == ((now.leader,), 2)
    address = cluster.nodes[now.leader].address
    answers = {offset: fetch_at(address, "t", offset) for offset in range(RECORDS)}
    [lost] = [offset for offset, answer in answers.items() if answer.HasField("error")]
    assert answers[lost].error.code == ErrorCode.CORRUPT_MESSAGE
    order = f"`penstock topics delete-records t --before 0={lost + 1}`"
    assert order in answers[lost].error.message
    said = cluster.nodes[now.leader].log.read_text()
    assert "log can't be mended" in said
    assert order in said
    with AdminClient(cluster.bootstrap) as admin:
        admin.delete_records({TopicPartition("t", 0): lost + 1})
    wait_until(lambda: in_order(cluster, "t"), "all are in sync", TIMEOUT_S)
    assert are_unmendable(0)
    records = read_all(cluster, "t", start=lost + 1, at_least=RECORDS - lost - 1)
    assert [record.value for record in records] == values()[lost + 1 :]


def test_a_segment_that_is_gone_when_a_node_starts_is_copied_anew(cluster: Scrubbed) -> None:
    cluster.start()
    fill(cluster, "t", [1, 2, 3])
    sound = cluster.contents(1, "t")
    wait_until(lambda: cluster.contents(2, "t") == sound, "it has all", TIMEOUT_S)
    cluster.nodes[2].stop()
    cluster.closed_segments(2, "t")[1].unlink()
    cluster.nodes[2].start()
    wait_until(lambda: cluster.contents(2, "t") == sound, "copied anew", TIMEOUT_S)
    wait_until(lambda: in_order(cluster, "t"), "it is in sync again", TIMEOUT_S)


def is_cleaned(cluster: Scrubbed, node_id: int, topic: str) -> bool:
    """Whether everything but the segment that is appended to is clean."""
    node = cluster.nodes[node_id]
    active = max(node.partition_directory(topic, 0).glob("*.log"))
    said = [line for line in node.log.read_text().splitlines() if "log_cleaned" in line]
    return bool(said) and f"end_offset={int(active.stem)} " in said[-1]


def test_a_follower_that_has_cleaned_more_than_its_leader_is_copied_anew(
    cluster: Scrubbed,
) -> None:
    for node_id, setting in ((1, "threads = 0"), (2, "backoff.ms = 100"), (3, "threads = 0")):
        with cluster.nodes[node_id].config.open("a") as config:
            config.write(f"log.cleaner.{setting}\n")
    cluster.scrub(2)
    cluster.start()
    address = make(
        cluster, "t", [1, 2, 3], cleanup_policy="compact", min_cleanable_dirty_ratio="0.0"
    )
    now_ms = int(time.time() * 1000)
    for number, value in enumerate(values()):
        # What is left of each batch has another size than the batch.
        pair = [RecordData(now_ms, b"again", value), RecordData(now_ms, b"%d" % number, value)]
        write(address, "t", encode_batch(pair))
    wait_until(lambda: is_cleaned(cluster, 2, "t"), "it is cleaned", TIMEOUT_S)
    flip(cluster.closed_segments(2, "t")[0])
    said = cluster.nodes[2].log
    wait_until(lambda: "damaged log was copied anew" in said.read_text(), "copied", TIMEOUT_S)
    wait_until(lambda: in_order(cluster, "t"), "it is in sync again", TIMEOUT_S)
    cluster.nodes[1].kill()
    wait_until(lambda: leader(cluster, "t") == 2, "it leads", TIMEOUT_S)
    last = {record.key: record.value for record in read_all(cluster, "t", at_least=RECORDS)}
    expected = {b"%d" % number: value for number, value in enumerate(values())}
    assert last == expected | {b"again": values()[-1]}


def recovery_point(cluster: Scrubbed, node_id: int, topic: str) -> int:
    """Up to where partition 0 is on the disk, as the running broker has noted it there."""
    directory = cluster.nodes[node_id].partition_directory(topic, 0)
    topic_id = read_metadata(directory).topic_id
    with (
        lmdb.open(str(directory.parent / DIRECTORY_NAME), readonly=True) as environment,
        environment.begin() as transaction,
    ):
        for key, data in transaction.cursor():
            if key.startswith(topic_id):
                state = PartitionState.decode(key, data)
                assert state is not None
                return state.recovery_point
    return 0


def break_active_header(cluster: Scrubbed, node_id: int, topic: str) -> None:
    """A bit of the length of the first batch in the segment that is appended to."""
    active = max(cluster.nodes[node_id].partition_directory(topic, 0).glob("*.log"))
    data = bytearray(active.read_bytes())
    data[10] ^= 4
    active.write_bytes(data)


def remove_first_segment(cluster: Scrubbed, node_id: int, topic: str) -> None:
    cluster.closed_segments(node_id, topic)[0].unlink()


@pytest.mark.parametrize(
    ("damage", "leads"), [(break_active_header, True), (remove_first_segment, False)]
)
def test_a_log_that_does_not_open_after_a_crash_is_copied_anew_by_itself(
    cluster: Scrubbed, damage: Callable[[Scrubbed, int, str], None], leads: bool
) -> None:
    cluster.start()
    fill(cluster, "t", [2, 1, 3] if leads else [1, 2, 3])
    sound = cluster.contents(1, "t")
    wait_until(lambda: cluster.contents(2, "t") == sound, "it has all", TIMEOUT_S)
    wait_until(lambda: recovery_point(cluster, 2, "t") == RECORDS, "it is noted", TIMEOUT_S)
    cluster.nodes[2].kill()
    damage(cluster, 2, "t")
    cluster.start()
    wait_until(lambda: cluster.metric(2, "penstock_copied_logs_total") == 1, "copied", TIMEOUT_S)
    wait_until(lambda: in_order(cluster, "t"), "it is in sync again", TIMEOUT_S)
    assert cluster.metric(2, "penstock_damaged_logs_total") == 1
    assert cluster.metric(2, "penstock_damaged_replicas") == 0
    said = cluster.nodes[2].log.read_text()
    assert "damaged log found" in said
    assert "damaged log was copied anew" in said
    assert cluster.contents(2, "t") == sound
    whole(cluster, "t")


@pytest.mark.timeout(300)
def test_a_mended_replica_that_leads_knows_what_a_producer_sends_again(cluster: Scrubbed) -> None:
    cluster.start()
    address = make(cluster, "orders", [1, 2, 3])
    mine = encode_batch(
        [RecordData(int(time.time() * 1000), b"k", b"record " * 60, ())],
        producer_id=777_000,
        producer_epoch=0,
        base_sequence=0,
    )
    write(address, "orders", mine)

    def is_in_sync() -> bool:
        return set(cluster.topic("orders", 1).partitions[0].isr) == {1, 2, 3}

    wait_until(is_in_sync, "in sync", TIMEOUT_S)
    wait_until(lambda: recovery_point(cluster, 2, "orders") == 1, "it is noted", TIMEOUT_S)
    cluster.nodes[2].kill()
    flip(cluster.nodes[2].partition_directory("orders", 0) / f"{0:020d}.log")
    cluster.nodes[2].start()

    def is_mended() -> bool:
        return "damaged batch mended" in cluster.nodes[2].log.read_text() and is_in_sync()

    wait_until(is_mended, "mended and in sync", TIMEOUT_S)
    cluster.nodes[1].kill()
    wait_until(lambda: cluster.topic("orders", 2).partitions[0].leader == 2, "led", TIMEOUT_S)
    write(cluster.nodes[2].address, "orders", mine)
    assert len(read_all(cluster, "orders", at_least=1)) == 1
