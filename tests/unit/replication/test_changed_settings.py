"""Settings that change while a replica leads."""

from __future__ import annotations

from penstock.broker.core.partition_events import LagMaxChanged, ProposeIsr
from tests.unit.replication.test_replica import LAG_MS, ack, append, leader, log_of, position


def test_a_shorter_time_to_lag_counts_at_once() -> None:
    log = log_of()
    replica = leader(log)
    for node_id in (2, 3):
        replica.handle(position(node_id, 0, -1))
    append(replica, log, 1, now_ms=50_000)
    replica.handle(ack(2, 1, now_ms=50_100))
    assert replica.handle(LagMaxChanged(2 * LAG_MS, 50_000 + LAG_MS)) == []
    assert replica.next_deadline_ms() == 50_000 + 2 * LAG_MS + 1
    [effect] = replica.handle(LagMaxChanged(100, 50_101))
    assert isinstance(effect, ProposeIsr)
    assert effect.proposal.isr == {1, 2}
