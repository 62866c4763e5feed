from __future__ import annotations

from random import Random

import pytest

from penstock.chaos.backends.following import Follower, Holder
from penstock.chaos.backends.lane import NO_FAULT, Lane, LinkState
from penstock.chaos.cluster import LinkFault
from tests.unit.chaos.http2_bytes import data


def lane_of(fault: LinkFault, call: str = "/a.B/C") -> tuple[Lane, LinkState]:
    link = LinkState(Random(1))
    link.fault = fault
    return Lane(link, None, call), link


def test_a_piece_comes_after_the_latency() -> None:
    lane, _ = lane_of(LinkFault(latency_ms=50))
    lane.push(b"one", now=1.0)
    assert lane.take(1.049) == []
    assert lane.next_due() == pytest.approx(1.05)
    assert lane.take(1.051) == [b"one"]
    assert lane.next_due() is None


def test_jitter_changes_no_order() -> None:
    lane, _ = lane_of(LinkFault(latency_ms=1, jitter_ms=500))
    for number in range(100):
        lane.push(b"%d " % number, now=number / 1000)
    came = [lane.take(now / 1000) for now in range(700)]
    assert b"".join(p or b"" for one in came for p in one).split() == [
        b"%d" % n for n in range(100)
    ]
    assert len([one for one in came if one]) > 1, "not all at once"


def test_the_rate_is_that_of_all_connections_over_a_link() -> None:
    first, link = lane_of(LinkFault(rate_bytes=1000))
    second = Lane(link, None)
    came = 0
    for tick in range(1000):  # Ten seconds.
        now = tick / 100
        for lane in (first, second):
            if lane.wants_more(now):
                lane.push(bytes(link.largest_piece), now)
            came += sum(len(piece or b"") for piece in lane.take(now))
    assert 9_000 <= came <= 10_000


def test_the_end_comes_behind_everything() -> None:
    lane, _ = lane_of(LinkFault(latency_ms=10))
    lane.push(b"last words", now=0.0)
    lane.push_end(now=0.0)
    assert lane.take(1.0) == [b"last words", None]


def test_the_end_comes_behind_what_is_held() -> None:
    link = LinkState(Random(1))
    link.fault = LinkFault(hold=("Produce",), hold_ms=1000)
    lane = Lane(link, Holder(Follower({1: "/p.Log/Produce"}, requests=False)))
    lane.push(data(1, b"late") + data(3, b"soon"), now=0.0)
    lane.push_end(now=0.0)
    assert lane.take(0.5) == [data(3, b"soon")]
    assert lane.take(1.0) == [data(1, b"late"), None]


def test_a_connection_in_frames_is_all_of_one_call() -> None:
    fault = LinkFault(hold=("Replication/Fetch",), hold_ms=1000)
    lane, _ = lane_of(fault, call="/penstock.v1.Replication/Fetch")
    lane.push(b"push", now=0.0)
    assert lane.take(0.9) == []
    assert lane.take(1.0) == [b"push"]
    other, _ = lane_of(LinkFault(hold=("Produce",), hold_ms=1000), "/penstock.v1.Replication/Fetch")
    other.push(b"push", now=0.0)
    assert other.take(0.0) == [b"push"]


def test_what_waits_is_healed_with_the_link() -> None:
    for fault in (LinkFault(latency_ms=60_000), LinkFault(rate_bytes=1)):
        lane, link = lane_of(fault)
        lane.push(b"one", now=0.0)
        assert lane.take(0.0) == []
        assert not lane.is_plain
        link.fault = NO_FAULT
        lane.fault_changed(now=0.0)
        assert not lane.is_plain, "what has waited goes first"
        assert lane.take(0.0) == [b"one"]
        assert lane.is_plain


def test_a_sender_waits_when_much_is_under_way() -> None:
    lane, _ = lane_of(LinkFault(latency_ms=60_000))
    while lane.wants_more(0.0):
        lane.push(bytes(1 << 20), now=0.0)
    lane.take(61.0)
    assert lane.wants_more(61.0)
