"""A replica that is damaged beyond mending is dropped while it is out of sync, and copied anew."""

from __future__ import annotations

import pytest

from penstock.broker.core.partition_events import (
    CopyAnew,
    HighWatermarkChanged,
    PartitionChanged,
    StatePosition,
    TruncateFullyAndStartAt,
)
from penstock.v1.metadata_pb2 import OUT_OF_SYNC_REASON_DAMAGED, OUT_OF_SYNC_REASON_OFFLINE
from penstock.wire.errors import CorruptRecordError
from tests.support import eventually
from tests.unit.replication.brokers import KEY, running
from tests.unit.replication.test_replica import follower, leader, log_of, push, state

DAMAGED = CorruptRecordError("a bit has flipped")


def test_it_is_dropped_and_states_where_it_begins() -> None:
    log = log_of((4, 5), start=2)
    replica = follower(log, high_watermark=4)
    replica.handle(PartitionChanged(state(version=11, isr=(1, 3)), 2, 0))
    assert replica.handle(CopyAnew()) == [
        TruncateFullyAndStartAt(2),
        HighWatermarkChanged(2),
        StatePosition(),
    ]
    log.restart_at(2)
    assert replica.handle(push(5, records=b"x")) == [], "sent before the leader knew of it"
    replica.validate()


def test_nothing_is_dropped_of_who_is_in_sync_or_leads() -> None:
    assert follower(log_of((4, 5))).handle(CopyAnew()) == []
    assert leader(log_of((4, 5))).handle(CopyAnew()) == []


@pytest.mark.parametrize("frames", [True, False])
async def test_the_leader_sends_everything_again_and_it_gets_in_sync(*, frames: bool) -> None:
    async with running(3, frames=frames) as brokers:
        brokers.create_topic()
        await brokers[1].append(b"a")
        await brokers[1].append(b"b")
        damaged = brokers[2]
        await eventually(lambda: damaged.log().values() == [b"a", b"b"])
        assert not damaged.manager.copy_anew(KEY), "it is in sync"
        damaged.manager.set_damaged(KEY, DAMAGED)
        await eventually(lambda: damaged.manager.may_mend(KEY))
        assert damaged.manager.why_out_of_sync(KEY) == {2: OUT_OF_SYNC_REASON_DAMAGED}
        assert brokers[1].manager.why_out_of_sync(KEY) == {2: OUT_OF_SYNC_REASON_OFFLINE}
        assert brokers[3].manager.why_out_of_sync(KEY) == {}
        assert damaged.manager.copy_anew(KEY)
        assert damaged.log().log_end_offset == 0
        await eventually(lambda: damaged.log().values() == [b"a", b"b"])
        await brokers[1].append(b"c")
        assert brokers.isr(0) == {1, 3}
        damaged.manager.set_sound(KEY)
        await eventually(lambda: brokers.isr(0) == {1, 2, 3})
        assert damaged.manager.why_out_of_sync(KEY) == {}
        assert damaged.log().values() == [b"a", b"b", b"c"]
