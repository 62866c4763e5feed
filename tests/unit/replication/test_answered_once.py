"""An append is answered once, whichever comes first: its acknowledgement or its timeout."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.broker.core.ports import AppendInfo
from penstock.broker.replication.appending import Appends, Target
from penstock.broker.replication.purgatory import OffsetWaiters
from penstock.v1 import common_pb2
from penstock.wire.errors import NotLeaderError, RequestTimedOutError
from tests.unit.replication.virtual_loop import run_virtually

TIMEOUT_S = 0.1
INFO = AppendInfo(0, 0, -1, 1)
Outcomes = list[AppendInfo | BaseException]


def begun(acks: common_pb2.Acks.ValueType) -> tuple[OffsetWaiters, Outcomes]:
    """An append that waits for its acknowledgement, and what it is answered with."""
    waiters, outcomes = OffsetWaiters(), Outcomes()
    partition: Any = SimpleNamespace(
        name="orders-0",
        log=SimpleNamespace(durable_offset=0),
        durable_waiters=waiters,
        commit_waiters=waiters,
        replica=SimpleNamespace(
            high_watermark=0, under_min_isr=False, followers=dict, maximal_isr=frozenset({1})
        ),
        append_as_leader=lambda _records, **_more: INFO,
    )
    appends = Appends(
        1,
        lambda *_: partition,
        lambda: 0,
        clock_ms=lambda: 0,
        wall_clock_ms=lambda: 0,
        ask_coordinator=lambda *_: None,
    )
    timeout_ms = round(TIMEOUT_S * 1000)
    appends.begin(Target("orders", b"", 0), b"x", acks, timeout_ms, outcomes.append)
    assert not outcomes
    return waiters, outcomes


each_acks = pytest.mark.parametrize("acks", [common_pb2.ACKS_LEADER, common_pb2.ACKS_ALL])


@each_acks
def test_the_timeout_of_an_append_that_was_acknowledged_says_nothing(
    acks: common_pb2.Acks.ValueType,
) -> None:
    async def main() -> None:
        waiters, outcomes = begun(acks)
        waiters.release(1)
        assert outcomes == [INFO]
        await asyncio.sleep(2 * TIMEOUT_S)  # Of virtual time.
        assert outcomes == [INFO]

    run_virtually(main())


@each_acks
def test_nor_does_that_of_one_whose_leader_was_deposed(acks: common_pb2.Acks.ValueType) -> None:
    async def main() -> None:
        waiters, outcomes = begun(acks)
        waiters.fail(lambda: NotLeaderError("another one leads"))
        await asyncio.sleep(2 * TIMEOUT_S)  # Of virtual time.
        assert [type(outcome) for outcome in outcomes] == [NotLeaderError]

    run_virtually(main())


@each_acks
@pytest.mark.parametrize("deposed", [False, True])
def test_an_acknowledgement_that_comes_after_the_timeout_says_nothing(
    acks: common_pb2.Acks.ValueType, deposed: bool
) -> None:
    async def main() -> None:
        waiters, outcomes = begun(acks)
        await asyncio.sleep(2 * TIMEOUT_S)  # Of virtual time.
        assert [type(outcome) for outcome in outcomes] == [RequestTimedOutError]
        if deposed:
            waiters.fail(lambda: NotLeaderError("another one leads"))
        else:
            waiters.release(1)
        assert [type(outcome) for outcome in outcomes] == [RequestTimedOutError]

    run_virtually(main())
