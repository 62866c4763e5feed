"""The lease: a cut-off broker stops before it can have been replaced."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.broker.core.lease import Lease, MetadataLag


def test_no_lease_before_the_first_answer() -> None:
    lease = Lease(6000)
    assert not lease.valid(0)
    assert lease.silent_ms(0) is None


def test_it_counts_from_the_sending() -> None:
    lease = Lease(6000)
    lease.answered(1000)
    assert lease.valid(6999)
    assert not lease.valid(7000)


def test_a_late_answer_to_an_old_heartbeat_does_not_shorten_it() -> None:
    lease = Lease(6000)
    lease.answered(2000)
    lease.answered(1000)
    assert lease.valid(7999)


def test_being_disowned_ends_it() -> None:
    lease = Lease(6000)
    lease.answered(0)
    lease.lost()
    assert not lease.valid(1)


@given(st.lists(st.integers(0, 10_000), min_size=1), st.integers(0, 30_000))
def test_it_never_outlives_the_controllers_patience(sent: list[int], now: int) -> None:
    """The controller heard each heartbeat at or after it was sent, so it waits at least as long."""
    lease = Lease(500)
    for moment in sent:
        lease.answered(moment)
    if lease.valid(now):
        assert now < max(sent) + 500


def test_metadata_lag_counts_from_when_something_was_missing_first() -> None:
    lag = MetadataLag()
    lag.told(7, 7, 0)
    assert lag.behind_ms(100) == 0
    lag.told(9, 7, 100)
    lag.told(12, 7, 500)
    assert lag.behind_ms(600) == 500
    lag.reached(8)
    assert lag.behind_ms(600) == 500
    lag.reached(9)
    assert lag.behind_ms(700) == 0
    lag.told(12, 9, 800)
    assert lag.behind_ms(900) == 100


def test_time_in_which_the_broker_acts_is_not_the_feeds() -> None:
    lag = MetadataLag()
    lag.told(9, 7, 100)
    lag.acting(300)
    assert lag.behind_ms(5_000) == 200
    lag.told(12, 8, 5_000)
    lag.acted(6_000)
    assert lag.behind_ms(6_000) == 200
    assert lag.behind_ms(6_100) == 300
    lag.reached(9)
    lag.acting(7_000)
    lag.told(12, 9, 7_500)
    assert lag.behind_ms(8_000) == 0
    lag.acted(8_000)
    assert lag.behind_ms(8_001) == 1
