"""A log that does not open is copied anew while it is out of sync, and kept while nobody has it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from penstock.broker import leader_reads, shut_logs
from penstock.broker.core.ports import DamagedLogError
from penstock.broker.leader_reads import LeaderReads
from penstock.broker.replication.manager import ReplicaManager
from penstock.v1 import cluster_pb2
from penstock.v1.metadata_pb2 import OUT_OF_SYNC_REASON_DAMAGED
from penstock.wire.errors import CorruptRecordError, StorageError
from penstock.wire.ids import TopicIdPartition
from penstock.wire.records import offset_patch, parse_header
from tests.support import eventually
from tests.unit.replication.brokers import KEY, BrokerProcess, Brokers, running
from tests.unit.replication.memory_log import MemoryLog

WRITTEN = [b"a", b"b", b"c"]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shut_logs, "_LOOK_AGAIN_S", 0.001)
    monkeypatch.setattr(shut_logs, "_MIN_BACKOFF_S", 0.001)


async def written(brokers: Brokers) -> None:
    brokers.create_topic()
    for value in WRITTEN:
        await brokers[1].append(value)
    for broker in brokers.brokers.values():
        await eventually(lambda: broker.log().values() == WRITTEN)  # noqa: B023 - It is called here and now.


async def restarted_shut(
    brokers: Brokers, node_id: int, *, end_offset: int = 3, committed_offset: int = 3
) -> BrokerProcess:
    """The broker dies, its log is damaged so that it does not open, and it comes back."""
    await brokers.kill(node_id)
    return await brought_back(brokers, node_id, end_offset, committed_offset)


async def brought_back(
    brokers: Brokers, node_id: int, end_offset: int = 3, committed_offset: int = 3
) -> BrokerProcess:
    logs = brokers[node_id].logs
    logs.open.pop(KEY)
    logs.shut[KEY] = DamagedLogError("a header is damaged", end_offset, committed_offset)
    return await brokers.restart(node_id)


async def test_it_is_copied_anew_from_the_leader_and_gets_in_sync() -> None:
    async with running(3) as brokers:
        await written(brokers)
        with capture_logs() as lines:
            shut = await restarted_shut(brokers, 2)
            await eventually(lambda: brokers.isr() == {1, 2, 3})
        assert shut.log().values() == WRITTEN
        assert (shut.logs.kept, shut.logs.deleted) == ([KEY], [])
        assert (shut.counts, shut.shut_logs.damaged_count) == ({"damaged": 1, "copied": 1}, 0)
        assert shut.manager.offline_count == 0
        states = [entry.state for report in brokers.reports for entry in report.replicas]
        assert states == [cluster_pb2.REPLICA_STATE_OFFLINE, cluster_pb2.REPLICA_STATE_ONLINE]
        said = [line["event"] for line in lines if line["event"].startswith("damaged log")]
        assert said == [
            "damaged log found",
            "damaged log is copied anew",
            "damaged log was copied anew",
        ]
        await brokers[1].append(b"d")
        assert shut.log().values() == [*WRITTEN, b"d"]


async def test_the_copy_is_whole_where_the_leaders_log_ends() -> None:
    async with running(3) as brokers:
        await written(brokers)
        await brokers.kill(2)
        brokers[2].logs.hold = True
        shut = await brought_back(brokers, 2, end_offset=5)
        await eventually(lambda: KEY in shut.logs.open)
        # The leader lacks what nobody committed, and the copy ends where its log does.
        await eventually(lambda: shut.shut_logs.damaged_count == 0)
        assert shut.counts["copied"] == 1
        shut.logs.release()
        await eventually(lambda: brokers.isr() == {1, 2, 3})


async def test_who_leads_it_after_a_restart_does_so_no_more_and_is_copied_from_another() -> None:
    async with running(2) as brokers:
        await written(brokers)
        # Both die, and the controllers think that 1, which comes back shut, leads.
        await brokers[1].stop()
        brokers[1].logs.crash()
        shut = await brought_back(brokers, 1)
        await eventually(lambda: brokers[2].partition().is_leader)
        await eventually(lambda: brokers.isr() == {1, 2})
        assert shut.log().values() == WRITTEN
        assert not shut.partition().is_leader


async def test_the_last_one_in_sync_keeps_what_it_has_and_says_so_until_another_leads() -> None:
    async with running(2) as brokers:
        await written(brokers)
        await brokers.kill(2)
        await brokers[1].stop()
        brokers[1].logs.crash()
        with capture_logs() as lines:
            shut = await brought_back(brokers, 1)
            await eventually(lambda: shut.shut_logs.unmendable_count == 1)
            await brokers.restart(2)  # It is not in sync: nobody knows what it lacks.
            await asyncio.sleep(0.05)  # Time in which nothing must happen.
        assert (brokers.isr(), brokers.partitions[0].leader) == ({1}, -1)
        assert (shut.logs.kept, list(shut.logs.shut)) == ([], [KEY])
        assert shut.manager.why_out_of_sync(KEY) == {1: OUT_OF_SYNC_REASON_DAMAGED}
        [line] = [line for line in lines if line["event"] == "damaged log can't be copied anew"]
        assert line["reason"] == "no other replica is in sync"
        with pytest.raises(StorageError, match="a header is damaged"):
            await shut.append(b"x")
        brokers.change(leader=2, isr=[2])  # An operator has it elected.
        await eventually(lambda: brokers.isr() == {1, 2})
        assert shut.log().values() == WRITTEN
        assert shut.shut_logs.unmendable_count == 0


@pytest.mark.parametrize("what", ["damaged", "shorter"])
async def test_nothing_is_dropped_that_the_leader_has_not(what: str) -> None:
    async with running(3) as brokers:
        await written(brokers)
        if what == "damaged":
            brokers[1].log().damaged_at = {0}
        committed = 3 if what == "damaged" else 4
        with capture_logs() as lines:
            shut = await restarted_shut(brokers, 2, end_offset=4, committed_offset=committed)
            await eventually(lambda: shut.shut_logs.unmendable_count == 1)
        assert (shut.logs.kept, list(shut.logs.shut)) == ([], [KEY])
        [line] = [line for line in lines if line["event"] == "damaged log can't be copied anew"]
        told = {
            "damaged": "the leader's log is damaged as well: 0 is damaged",
            "shorter": "ends at offset 3, but this one had committed records up to offset 4",
        }
        assert told[what] in line["reason"]
        if what == "damaged":
            brokers.change(leader=3)  # Another one has it whole.
            brokers[1].log().damaged_at = set()
        else:
            await brokers[1].append(b"d")
            brokers.change(leader=3)
        await eventually(lambda: brokers.isr() == {1, 2, 3})


async def test_what_is_known_to_be_committed_is_read_above_the_end_that_was_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where all the files are gone, that is the recovery point, which is seconds old."""
    monkeypatch.setattr(leader_reads, "_READ_BYTES", 1)
    async with running(3) as brokers:
        await written(brokers)
        with capture_logs() as lines:
            shut = await restarted_shut(brokers, 2, end_offset=1, committed_offset=3)
            await eventually(lambda: brokers.isr() == {1, 2, 3})
        assert shut.log().values() == WRITTEN
        [line] = [line for line in lines if line["event"] == "damaged log is copied anew"]
        assert (line["had_end_offset"], line["end_offset"]) == (1, 3)


async def test_what_the_leader_has_deleted_meanwhile_is_not_asked_for() -> None:
    async with running(3) as brokers:
        await written(brokers)
        for node_id in (1, 3):
            brokers[node_id].log().advance_log_start(2)
        shut = await restarted_shut(brokers, 2)
        await eventually(lambda: brokers.isr() == {1, 2, 3})
        assert (shut.log().log_start_offset, shut.log().values()) == (2, [b"c"])


@pytest.mark.parametrize("by", ["the news", "a snapshot"])
async def test_a_shut_log_of_a_topic_that_is_deleted_is_given_up(by: str) -> None:
    async with running(2) as brokers:
        await written(brokers)
        brokers[1].log().damaged_at = {0}
        shut = await restarted_shut(brokers, 2)
        await eventually(lambda: shut.shut_logs.unmendable_count == 1)
        brokers.partitions.clear()
        brokers.deleted_topics = [bytes(KEY.topic_id)]
        if by == "the news":
            brokers.publish(removed_topics=brokers.deleted_topics)
        else:
            brokers.index += 1
            for broker in brokers.brokers.values():
                broker.hear(brokers.snapshot())
        await eventually(lambda: shut.shut_logs.damaged_count == 0)
        assert shut.logs.deleted == [KEY]


async def test_a_log_whose_records_the_leader_replaced_by_others_is_kept() -> None:
    """Offsets say nothing of that: after an unclean election they are other records."""
    async with running(2) as brokers:
        await written(brokers)
        await brokers.kill(2)
        await brokers[1].stop()  # Alone in sync, it loses its disk, and leads on with nothing.
        log = brokers[1].log()
        log.truncate_to(0)
        log.epochs.clear()
        brokers[1].logs.saved.clear()
        await brokers.restart(1)
        brokers.change(leader=1)
        shut = await brought_back(brokers, 2)
        await eventually(lambda: shut.shut_logs.unmendable_count == 1)
        for value in (b"x", b"y", b"z"):
            await brokers[1].append(value)
        brokers.change(leader=1)  # Any news has it look again.
        with capture_logs() as lines:
            await eventually(lambda: brokers.isr() == {1, 2})
        assert (shut.logs.kept, shut.logs.deleted) == ([KEY], [])
        assert shut.log().values() == [b"x", b"y", b"z"]
        [line] = [line for line in lines if line["event"] == "damaged log is copied anew"]
        assert (line["kept"], line["had_end_offset"], line["end_offset"]) == ("kept", 3, 3)
        assert "look first" in line["next_step"]


async def test_a_log_that_nobody_could_copy_outlives_a_move_of_its_replica() -> None:
    async with running(3) as brokers:
        await written(brokers)
        shut = await restarted_shut(brokers, 2, end_offset=4, committed_offset=4)
        await eventually(lambda: shut.shut_logs.unmendable_count == 1)
        brokers.change(replicas=[1, 3], isr=[1, 3], offline_replicas=[])
        await eventually(lambda: shut.shut_logs.damaged_count == 0)
        assert (shut.logs.deleted, shut.manager.offline_count) == ([], 0)


async def test_an_open_log_that_is_shut_outlives_a_move_of_its_replica_too() -> None:
    async with running(3) as brokers:
        await written(brokers)
        hosted = brokers[2].partition()
        hosted.fail(DamagedLogError("it says that a later epoch wrote its end", 4, 4))
        brokers.change(replicas=[1, 3], isr=[1, 3], offline_replicas=[])
        await eventually(lambda: brokers[2].shut_logs.damaged_count == 0)
        assert brokers[2].manager.hosted(KEY) is None
        assert (brokers[2].logs.deleted, list(brokers[2].logs.aside)) == ([], [KEY])


async def test_a_copy_that_is_damaged_as_well_is_copied_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begin_anew, failed = ReplicaManager.begin_anew, list[bool]()

    def damaged_at_once(self: ReplicaManager, key: TopicIdPartition) -> Path | None:
        kept = begin_anew(self, key)
        if kept is not None and not failed:
            failed.append(True)
            hosted = self.hosted(key)
            assert hosted is not None
            hosted.fail(DamagedLogError("another bit has flipped", 0))
        return kept

    monkeypatch.setattr(ReplicaManager, "begin_anew", damaged_at_once)
    async with running(3) as brokers:
        await written(brokers)
        shut = await restarted_shut(brokers, 2)
        await eventually(lambda: brokers.isr() == {1, 2, 3})
        assert failed
        assert shut.log().values() == WRITTEN
        assert (shut.logs.kept, shut.counts["copied"]) == ([KEY, KEY], 1)


async def test_of_a_copy_that_is_damaged_as_well_counts_how_far_it_had_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The log that it took the place of did not go as far, and all of that the leader has."""
    begin_anew = ReplicaManager.begin_anew

    def damaged_later(self: ReplicaManager, key: TopicIdPartition) -> Path | None:
        kept = begin_anew(self, key)
        hosted = self.hosted(key)
        if hosted is not None:
            hosted.fail(DamagedLogError("another bit has flipped", 4, 4))
        return kept

    monkeypatch.setattr(ReplicaManager, "begin_anew", damaged_later)
    async with running(3) as brokers:
        await written(brokers)
        shut = await restarted_shut(brokers, 2)
        await eventually(lambda: shut.shut_logs.unmendable_count == 1)
        assert shut.logs.kept == [KEY]
        assert shut.shut_logs.damaged_count == 1


async def test_an_open_log_that_is_shut_is_let_go_of_when_another_takes_its_place() -> None:
    async with running(3) as brokers:
        await written(brokers)
        before = brokers[2].partition()
        before.fail(DamagedLogError("it says that a later epoch wrote its end", 3, 3))
        await eventually(lambda: brokers[2].shut_logs.damaged_count == 0)
        assert brokers[2].logs.kept == [KEY]
        assert before.closed
        assert brokers[2].partition() is not before


async def test_what_a_scrubber_finds_in_the_copy_is_not_sound_when_it_is_whole() -> None:
    async with running(3) as brokers:
        await written(brokers)
        await brokers.kill(2)
        brokers[2].logs.hold = True
        shut = await brought_back(brokers, 2)
        await eventually(lambda: KEY in shut.logs.open)
        shut.manager.set_damaged(KEY, CorruptRecordError("a batch of the copy"))
        shut.logs.release()
        await eventually(lambda: shut.shut_logs.damaged_count == 0)
        assert shut.manager.why_out_of_sync(KEY) == {2: OUT_OF_SYNC_REASON_DAMAGED}
        assert brokers.isr() == {1, 3}
        shut.manager.set_sound(KEY)
        await eventually(lambda: brokers.isr() == {1, 2, 3})


async def test_a_leader_is_read_through_once_while_the_disk_refuses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reads, tries, read = list[int](), list[TopicIdPartition](), LeaderReads.read

    async def counted(self: LeaderReads, key: TopicIdPartition, offset: int) -> bytes:
        reads.append(offset)
        return await read(self, key, offset)

    def refuse(key: TopicIdPartition) -> Path:
        tries.append(key)
        raise StorageError("the directory has failed")

    monkeypatch.setattr(LeaderReads, "read", counted)
    monkeypatch.setattr(shut_logs, "_MAX_BACKOFF_S", 0.001)
    async with running(3) as brokers:
        await written(brokers)
        monkeypatch.setattr(brokers[2].logs, "keep_damaged", refuse)
        await restarted_shut(brokers, 2)
        await eventually(lambda: len(tries) > 3)
        assert reads.count(0) == 1


@pytest.mark.parametrize("leader", [1, 3])
async def test_what_another_leadership_has_is_not_known_from_the_one_before(
    monkeypatch: pytest.MonkeyPatch, leader: int
) -> None:
    """Also where the same broker leads on: what it has had may have been lost in between."""
    tries = list[TopicIdPartition]()

    def refuse(key: TopicIdPartition) -> Path:
        tries.append(key)
        raise StorageError("the directory has failed")

    async with running(3) as brokers:
        await written(brokers)
        with monkeypatch.context() as patch:
            patch.setattr(brokers[2].logs, "keep_damaged", refuse)
            shut = await restarted_shut(brokers, 2)
            await eventually(lambda: tries)
            brokers[leader].log().damaged_at = {0}
            brokers.change(leader=leader)
        await eventually(lambda: shut.shut_logs.unmendable_count == 1)
        assert (shut.logs.kept, list(shut.logs.shut)) == ([], [KEY])


async def test_a_log_is_given_up_only_for_the_leader_that_all_of_it_was_read_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read, moved = LeaderReads.read, list[int]()

    async def moved_meanwhile(self: LeaderReads, key: TopicIdPartition, offset: int) -> bytes:
        records = await read(self, key, offset)
        if not moved:
            moved.append(offset)
            brokers[3].log().damaged_at = {0}
            brokers.change(leader=3)
        return records

    monkeypatch.setattr(LeaderReads, "read", moved_meanwhile)
    async with running(3) as brokers:
        await written(brokers)
        shut = await restarted_shut(brokers, 2)
        await eventually(lambda: shut.shut_logs.unmendable_count == 1)
        assert moved
        assert (shut.logs.kept, list(shut.logs.shut)) == ([], [KEY])


async def test_how_far_a_copy_goes_is_up_to_whoever_leads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It would wait for ever for what the one before had, and the next one has not."""
    monkeypatch.setattr(shut_logs, "next_offset_after", lambda _: 5)
    async with running(3) as brokers:
        await written(brokers)
        shut = await restarted_shut(brokers, 2)
        await eventually(lambda: KEY in shut.logs.open and shut.log().values() == WRITTEN)
        assert (brokers.isr(), shut.shut_logs.damaged_count) == ({1, 3}, 1)
        brokers.change(leader=3)
        await eventually(lambda: brokers.isr() == {1, 2, 3})
        assert shut.counts["copied"] == 0


async def test_who_is_in_sync_begins_nothing_anew() -> None:
    async with running(2) as brokers:
        await written(brokers)
        brokers.controllers_answer = False
        brokers[2].partition().fail(DamagedLogError("it says that a later epoch wrote its end", 3))
        assert brokers[2].manager.why_shut(KEY) is not None
        assert brokers[2].manager.begin_anew(KEY) is None
        assert brokers[2].logs.kept == []
        brokers.controllers_answer = True
        await eventually(lambda: brokers[2].shut_logs.damaged_count == 0)


def flip_epoch(log: MemoryLog, leader_epoch: int) -> None:
    """Of the last batch that is left, which no flush had covered: only the first one is."""
    log.truncate_to(1)
    [batch] = log.batches
    log.batches = [offset_patch(parse_header(batch), 0, leader_epoch) + batch[16:]]
    log.epochs.clear()
    log.epochs.assign(leader_epoch, 0)


@pytest.mark.parametrize("leader_epoch", [1, 1 << 27])
async def test_a_log_with_a_leader_epoch_that_nobody_wrote_there_is_copied_anew(
    leader_epoch: int,
) -> None:
    """Be it one that has been, of another place, or one that never was."""
    async with running(3) as brokers:
        await written(brokers)
        await brokers.kill(2)
        brokers.change(leader=3)
        await brokers[3].append(b"d")
        flip_epoch(brokers[2].log(), leader_epoch)
        with capture_logs() as lines:
            shut = await brokers.restart(2)
            await eventually(lambda: brokers.isr() == {1, 2, 3})
        assert shut.log().values() == [*WRITTEN, b"d"]
        assert shut.log().epochs.entries == brokers[3].log().epochs.entries
        assert (shut.counts, shut.logs.kept) == ({"damaged": 1, "copied": 1}, [KEY])
        assert not shut.logs.aside
        [line] = [line for line in lines if line["event"] == "damaged log found"]
        assert "no checksum covers" in line["reason"]


async def test_without_reports_nothing_is_dropped() -> None:
    async with running(2) as brokers:
        await written(brokers)
        brokers.metadata_version = 2
        brokers.publish(metadata_version=2)
        shut = await restarted_shut(brokers, 2)
        await asyncio.sleep(0.05)  # Time in which nothing must happen.
        assert (shut.logs.kept, shut.shut_logs.damaged_count) == ([], 1)
