from __future__ import annotations

from itertools import pairwise

import pytest

from penstock.chaos.backends.traffic import TrafficPlan, plug
from penstock.chaos.cluster import CLIENTS, Link, LinkFault, PacketFault

ADDRESSES: dict[int | str, str] = {1: "10.0.0.1", 20: "10.0.0.20", CLIENTS: "10.0.0.254"}
CUT = LinkFault(cut=True)


def begun() -> TrafficPlan:
    plan = TrafficPlan(ADDRESSES)
    plan.begin()
    return plan


def queue(fault: LinkFault) -> str:
    """What a link of that fault has, without where it is."""
    [line] = begun().links({Link(1, 20): fault})
    return line.split(": ", 1)[1]


def test_at_the_plug_of_each_end_what_comes_is_sorted_by_who_sent_it() -> None:
    lines = TrafficPlan(ADDRESSES).begin()
    assert [line for line in lines if " root " in line] == [
        "qdisc add dev node1 root handle 1: htb",
        "qdisc add dev node20 root handle 1: htb",
        "qdisc add dev clients root handle 1: htb",
    ]
    sorting = {line for line in lines if line.startswith("filter")}
    at_one = "filter add dev node1 parent 1: protocol ip prio 1 u32 match ip src"
    # Classes are in hexadecimal.
    assert {line for line in sorting if "dev node1 " in line} == {
        f"{at_one} 10.0.0.20/32 flowid 1:14",
        f"{at_one} 10.0.0.254/32 flowid 1:100",
    }
    assert len(sorting) == 6
    queues = [line for line in lines if line.startswith("qdisc replace")]
    assert len(queues) == 6
    assert all(line.endswith("pfifo limit 20000") for line in queues)


def test_a_cut_is_of_one_direction_at_whoever_is_not_to_hear() -> None:
    plan = begun()
    [line] = plan.links({Link(1, 20): CUT})
    assert line.startswith("qdisc replace dev node20 parent 1:1 handle ")
    assert line.endswith(": blackhole")
    [line] = plan.links({Link(1, 20): CUT, Link(20, CLIENTS): CUT})
    assert line.startswith("qdisc replace dev clients parent 1:14 ")
    assert plug(CLIENTS) == "clients"


def test_only_what_changes_is_said_and_healing_is_to_say_nothing_more() -> None:
    plan = begun()
    assert plan.links({}) == []
    assert len(plan.links({Link(1, 20): CUT, Link(20, 1): CUT})) == 2
    assert plan.links({Link(1, 20): CUT, Link(20, 1): CUT}) == []
    assert len(plan.links({Link(20, 1): LinkFault(latency_ms=5)})) == 2
    [line] = plan.links({})
    assert "dev node1 parent 1:14 " in line
    assert line.endswith("pfifo limit 20000")
    assert plan.links({}) == []


def test_when_nobody_knows_what_was_heard_all_is_said() -> None:
    plan = begun()
    plan.links({Link(1, 20): CUT})
    plan.forget()
    assert len(plan.links({})) == 6


def handles(lines: list[str]) -> list[int]:
    return [int(line.split(" handle ")[1].split(":")[0], 16) for line in lines]


def test_every_queue_is_a_new_one_also_after_very_many() -> None:
    plan = TrafficPlan(ADDRESSES)
    other = next(
        line for line in plan.begin() if "dev node20 parent 1:100 " in line and "ha" in line
    )
    seen = handles([other])
    for turn in range(70_000):
        seen += handles(plan.links({Link(1, 20): CUT} if turn % 2 == 0 else {}))
    assert all(one != after for one, after in pairwise(seen))
    # The other one at this plug is there still, and above are those of the kernel.
    assert seen.count(seen[0]) == 1
    assert 0x200 <= min(seen) < max(seen) <= 0x7FFF


def test_jitter_is_added_and_the_order_is_kept_by_a_rate() -> None:
    late = queue(LinkFault(latency_ms=100, jitter_ms=25))
    assert late == "netem limit 20000 delay 112.5ms 12.5ms rate 10gbit"
    assert queue(LinkFault(latency_ms=5)) == "netem limit 20000 delay 5ms 0ms rate 10gbit"


@pytest.mark.parametrize(("rate_bytes", "waiting"), [(1 << 14, 32), (1 << 20, 699)])
def test_a_narrow_link_has_bytes_a_second_and_a_second_of_waiting(
    rate_bytes: int, waiting: int
) -> None:
    narrow = queue(LinkFault(rate_bytes=rate_bytes))
    assert narrow == f"netem limit {waiting} delay 0ms 0ms rate {rate_bytes}bps"


def test_a_fault_of_nothing_is_a_whole_link() -> None:
    assert begun().links({Link(1, 20): LinkFault()}) == []


def test_packets_suffer_at_the_node_and_the_old_fault_goes_first() -> None:
    plan = begun()
    assert plan.packets(1, None) == []
    bad = PacketFault(loss=2.5, duplicate=10, reorder=25, delay_ms=20)
    netem = "netem limit 20000 delay 20ms loss 2.5% duplicate 10% reorder 25%"
    assert plan.packets(1, bad) == [f"qdisc add dev eth0 root handle 200: {netem}"]
    assert plan.packets(20, None) == []
    assert plan.packets(1, PacketFault(loss=1)) == [
        "qdisc del dev eth0 root",
        "qdisc add dev eth0 root handle 200: netem limit 20000 loss 1%",
    ]
    assert plan.packets(1, None) == ["qdisc del dev eth0 root"]
    assert plan.packets(1, None) == []
