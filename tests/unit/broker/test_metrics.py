"""What is counted, and under which names."""

from __future__ import annotations

from prometheus_client import generate_latest

from penstock.broker.metrics import BrokerMetrics
from penstock.wire.errors import ErrorCode


def test_refusals_of_the_active_controller_are_counted_by_command_and_reason() -> None:
    metrics = BrokerMetrics()
    for _ in range(2):
        metrics.controller_refused("alter_partition", ErrorCode.INVALID_UPDATE_VERSION)
    metrics.controller_refused("heartbeat", ErrorCode.STALE_BROKER_EPOCH)
    metrics.controller_refused("", ErrorCode.INVALID_REQUEST)
    shown = generate_latest(metrics.registry).decode().splitlines()
    name = "penstock_controller_refusals_total"
    assert f'{name}{{command="alter_partition",error="INVALID_UPDATE_VERSION"}} 2.0' in shown
    assert f'{name}{{command="heartbeat",error="STALE_BROKER_EPOCH"}} 1.0' in shown
    assert f'{name}{{command="none",error="INVALID_REQUEST"}} 1.0' in shown
