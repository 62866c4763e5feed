"""A replica that comes to lead though it was not in sync."""

from __future__ import annotations

from penstock.broker.core.partition_events import (
    HighWatermarkChanged,
    LogAdvanced,
    PartitionChanged,
)
from tests.unit.replication.test_replica import follower, log_of, state


def test_a_new_leader_shows_nothing_that_it_could_lose_with_its_power() -> None:
    """Who is elected uncleanly may have copied what was committed without having flushed it."""
    log = log_of((4, 7))
    log.append([(4, 0)] * 3)
    replica = follower(log, high_watermark=10)
    effects = replica.handle(
        PartitionChanged(state(2, epoch=6, version=11, isr=(2,), min_isr=1), 1, 0)
    )
    assert HighWatermarkChanged(7) in effects
    assert replica.high_watermark == 7
    replica.validate()
    log.flush()
    assert replica.handle(LogAdvanced(0)) == [HighWatermarkChanged(10)]
