"""Quiet times: little happens, what ages does, and a minute of them costs next to nothing."""

from __future__ import annotations

import pytest

from penstock.broker.core.producer_state import ProducerState
from penstock.chaos.simulator.contents import Contents
from penstock.chaos.simulator.memory_log import MemoryLog
from penstock.chaos.simulator.simulation import FAULTS_UNTIL_MS, Simulation
from penstock.wire.errors import OutOfOrderSequenceError
from penstock.wire.ids import LeaderEpoch
from penstock.wire.records import RecordData, encode_batch

QUIET_MS = 120_000
CALM = {"quiet_ms": QUIET_MS, "flush_policy": "commit", "unclean": False, "nodes": (1, 2, 3)}


@pytest.mark.simulation
@pytest.mark.parametrize("seed", range(4))
def test_no_promise_is_broken_in_a_quiet_time(seed: int) -> None:
    report = Simulation(seed, given={"quiet_ms": QUIET_MS}).run()
    assert report.violation is None, str(report)
    assert report.virtual_ms > QUIET_MS


@pytest.mark.simulation
def test_no_promise_is_broken_in_a_quiet_time_with_transactions() -> None:
    report = Simulation(2, given={"quiet_ms": QUIET_MS, "transactions": True}).run()
    assert report.violation is None, str(report)
    assert report.of_transactions["transactions committed"] > 0


@pytest.mark.simulation
def test_clients_go_on_in_a_quiet_time_and_it_has_few_steps() -> None:
    steps, acknowledged = [], []
    for quiet_ms in (0, QUIET_MS):
        report = Simulation(1, faults=[], given={**CALM, "quiet_ms": quiet_ms}).run()
        assert report.violation is None, str(report)
        steps.append(report.steps)
        acknowledged.append(report.acknowledged)
    # The run with it has three seconds of load more than the one without.
    a_second_of_load = steps[0] / (FAULTS_UNTIL_MS / 1000)
    quiet_steps = steps[1] - steps[0] - 3 * a_second_of_load
    assert quiet_steps / (QUIET_MS / 1000) < 200
    assert acknowledged[1] > acknowledged[0] + 20


@pytest.mark.simulation
def test_old_records_are_deleted_and_silent_producers_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    forgotten: list[int] = []
    expire = ProducerState.expire

    def counted(self: ProducerState, now_ms: int, expiration_ms: int) -> int:
        forgotten.append(expire(self, now_ms, expiration_ms))
        return forgotten[-1]

    monkeypatch.setattr(ProducerState, "expire", counted)
    ages = {"producer_expiration_ms": 10_000, "retention_ms": 20_000}
    run = Simulation(1, faults=[], given={**CALM, **ages})
    report = run.run()
    assert report.violation is None, str(report)
    assert sum(forgotten) > 0
    assert run.checkers.deleted_from() == set(run.checkers.partitions)
    for partition in run.cluster.hosted():
        # What came after the quiet time is too young.
        assert 0 < partition.log.log_start_offset < partition.log.log_end_offset


def batch(producer_id: int, sequence: int) -> bytes:
    return encode_batch(
        [RecordData(0, None, b"x")],
        producer_id=producer_id,
        producer_epoch=0,
        base_sequence=sequence,
    )


def test_a_producer_is_forgotten_by_the_time_that_passed_and_may_go_on() -> None:
    now_ms = 0
    log = MemoryLog(Contents(), clock_ms=lambda: now_ms)
    log.append_as_leader(batch(7, 0), LeaderEpoch(0), now_ms=0)
    now_ms = 900
    log.append_as_leader(batch(5, 0), LeaderEpoch(0), now_ms=0)
    now_ms = 1000
    assert log.expire_producers(1000) == 1
    assert log.producers.entry(7) is None
    assert log.producers.entry(5) is not None
    log.append_as_leader(batch(7, 1), LeaderEpoch(0), now_ms=0)
    with pytest.raises(OutOfOrderSequenceError):
        log.append_as_leader(batch(8, 1), LeaderEpoch(0), now_ms=0)


def test_who_opens_a_log_takes_its_producers_for_seen_just_now() -> None:
    log = MemoryLog(Contents(), clock_ms=lambda: 0)
    log.append_as_leader(batch(7, 0), LeaderEpoch(0), now_ms=0)
    log.begin_flush()()
    log.advance_log_start(1)  # That it is deleted makes it no older.
    opened = MemoryLog(log.after_crash(None), clock_ms=lambda: 5000)
    assert opened.expire_producers(1000) == 0
