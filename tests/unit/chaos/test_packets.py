from __future__ import annotations

import json
import struct
from random import Random

import pytest

from penstock.chaos.backends import packet_queue
from penstock.chaos.backends.packets import (
    IN,
    OUT,
    Fates,
    Faults,
    NodeFaults,
    Wire,
    faults_from_json,
    wires_of,
)
from penstock.chaos.cluster import CLIENTS, Link, LinkFault, PacketFault
from penstock.chaos.errors import FaultError

NODES = ("10.0.0.11", "10.0.0.12", "10.0.0.13")
STRANGER = "10.0.0.1"
ADDRESSES = dict(enumerate(NODES, 1))


def fates(*wires: Wire, packets: PacketFault | None = None) -> Fates:
    made = Fates(Random(1))
    made.change(Faults(NODES, wires, packets))
    return made


def test_without_a_fault_every_packet_goes_on_at_once() -> None:
    assert fates().decide(OUT, NODES[1], 100, 5.0) == [5.0]
    assert fates().decide(IN, STRANGER, 100, 5.0) == [5.0]


def test_a_cut_wire_loses_all_in_its_direction_and_to_its_peer_alone() -> None:
    cut = fates(Wire(OUT, NODES[1], cut=True), Wire(IN, CLIENTS, cut=True))
    assert cut.decide(OUT, NODES[1], 100, 0.0) == []
    assert cut.decide(OUT, NODES[2], 100, 0.0) == [0.0]
    assert cut.decide(IN, NODES[1], 100, 0.0) == [0.0]
    assert cut.decide(IN, STRANGER, 100, 0.0) == []
    assert cut.decide(OUT, STRANGER, 100, 0.0) == [0.0]


def test_a_late_wire_keeps_the_order() -> None:
    late = fates(Wire(OUT, NODES[1], latency_ms=100, jitter_ms=200))
    dues = [late.decide(OUT, NODES[1], 100, at / 1000)[0] for at in range(100)]
    assert dues == sorted(dues)
    assert dues[0] >= 0.1
    assert all(due <= at / 1000 + 0.3 for at, due in enumerate(dues))
    assert len(set(dues)) > 1


def test_a_rate_is_that_of_all_packets_over_the_wire() -> None:
    narrow = fates(Wire(OUT, NODES[1], rate_bytes=1000))
    assert [narrow.decide(OUT, NODES[1], 500, 0.0)[0] for _ in range(3)] == [0.5, 1.0, 1.5]
    assert narrow.decide(OUT, NODES[1], 500, 10.0) == [10.5]
    assert narrow.decide(OUT, NODES[2], 500, 0.0) == [0.0]


@pytest.mark.parametrize("percent", [0.0, 30.0, 100.0])
def test_so_many_of_what_a_node_sends_are_lost(percent: float) -> None:
    lossy = fates(packets=PacketFault(loss=percent))
    lost = sum(not lossy.decide(OUT, NODES[1], 100, 0.0) for _ in range(2000))
    assert lost == pytest.approx(2000 * percent / 100, abs=100)
    assert lossy.decide(IN, STRANGER, 100, 0.0) == [0.0]


def test_so_many_come_twice() -> None:
    doubled = fates(packets=PacketFault(duplicate=50))
    copies = [len(doubled.decide(OUT, NODES[1], 100, 0.0)) for _ in range(2000)]
    assert set(copies) == {1, 2}
    assert copies.count(2) == pytest.approx(1000, abs=100)


def test_those_that_are_reordered_overtake_the_others() -> None:
    mixed = fates(packets=PacketFault(reorder=25, delay_ms=20))
    dues = [mixed.decide(OUT, NODES[1], 100, 0.0)[0] for _ in range(2000)]
    assert set(dues) == {0.0, 0.02}
    assert dues.count(0.0) == pytest.approx(500, abs=100)


def test_packets_overtake_each_other_on_a_late_wire_too() -> None:
    both = fates(Wire(OUT, NODES[1], latency_ms=10), packets=PacketFault(reorder=50, delay_ms=20))
    dues = [both.decide(OUT, NODES[1], 100, 0.0)[0] for _ in range(100)]
    assert dues != sorted(dues)


def test_what_changes_forgets_what_was() -> None:
    changed = fates(Wire(OUT, NODES[1], cut=True), packets=PacketFault(loss=100))
    changed.change(Faults(NODES))
    assert changed.decide(OUT, NODES[1], 100, 1.0) == [1.0]


def test_the_same_seed_has_the_same_fates() -> None:
    one, other = (fates(packets=PacketFault(loss=50, duplicate=50)) for _ in range(2))
    assert [one.decide(OUT, NODES[1], 1, 0.0) for _ in range(50)] == [
        other.decide(OUT, NODES[1], 1, 0.0) for _ in range(50)
    ]


def test_a_link_is_carried_out_by_one_node_alone() -> None:
    links = {
        Link(1, 2): LinkFault(cut=True),
        Link(2, CLIENTS): LinkFault(latency_ms=5, jitter_ms=2),
        Link(CLIENTS, 3): LinkFault(rate_bytes=10),
    }
    assert wires_of(1, ADDRESSES, links) == [Wire(OUT, NODES[1], cut=True)]
    assert wires_of(2, ADDRESSES, links) == [Wire(OUT, CLIENTS, latency_ms=5, jitter_ms=2)]
    assert wires_of(3, ADDRESSES, links) == [Wire(IN, CLIENTS, rate_bytes=10)]


def test_faults_come_through_json_as_they_were() -> None:
    for faults in (
        Faults(NODES),
        Faults(NODES, (Wire(IN, CLIENTS, cut=True),), PacketFault(loss=1.5)),
    ):
        assert faults_from_json(json.loads(json.dumps(faults.to_json()))) == faults


def test_a_rule_is_needed_only_where_packets_must_be_looked_at() -> None:
    assert not Faults(NODES).needs_out
    assert not Faults(NODES).needs_in
    assert Faults(NODES, packets=PacketFault(loss=1)).needs_out
    inward = Faults(NODES, (Wire(IN, CLIENTS, cut=True),))
    assert (inward.needs_in, inward.needs_out) == (True, False)


# --- what is said to the kernel


def packet(source: str, target: str, hook: int) -> bytes:
    """What the kernel says of a packet that it has queued, as the body of its message."""
    header = bytes(12) + bytes(map(int, source.split("."))) + bytes(map(int, target.split(".")))
    whole = packet_queue.message(
        0, (1, struct.pack("!IHB", 77, 0x0800, hook)), (10, header + b"payload")
    )
    ((kind, body),) = packet_queue.read_messages(whole)
    assert kind == 3 << 8
    return body


def test_the_peer_of_a_packet_is_the_other_end() -> None:
    sent = packet_queue.read_packet(packet(NODES[0], NODES[1], 3))
    assert sent is not None
    assert (sent.id, sent.direction, sent.peer) == (77, OUT, NODES[1])
    got = packet_queue.read_packet(packet(NODES[1], NODES[0], 1))
    assert got is not None
    assert (got.direction, got.peer) == (IN, NODES[1])
    assert got.payload.endswith(b"payload")


def test_a_verdict_names_the_packet() -> None:
    # nfgenmsg, then one attribute of eight bytes: NF_DROP or NF_ACCEPT, and the id.
    ((kind, body),) = packet_queue.read_messages(packet_queue.verdict(77, passes=True))
    assert kind == 3 << 8 | 1
    assert body[4:] == struct.pack("=HH", 12, 2) + struct.pack("!II", 1, 77)
    ((_, body),) = packet_queue.read_messages(packet_queue.verdict(78, passes=False))
    assert body[8:] == struct.pack("!II", 0, 78)


def test_a_message_that_was_cut_short_is_none() -> None:
    assert list(packet_queue.read_messages(b"\0" * 16)) == []
    assert list(packet_queue.read_messages(b"\1")) == []


def test_what_waits_goes_on_in_the_order_of_its_time() -> None:
    done: list[str] = []
    waiting = packet_queue.Waiting()
    for due, name in ((3.0, "late"), (1.0, "first"), (1.0, "second")):
        waiting.add(due, lambda name=name: done.append(name))
    assert waiting.next_due == 1.0
    waiting.run(2.0)
    assert done == ["first", "second"]
    waiting.run(3.0)
    assert done == ["first", "second", "late"]
    assert waiting.next_due is None


def test_a_node_is_told_only_when_something_of_its_own_changes() -> None:
    told: list[tuple[int, Faults]] = []
    faults = NodeFaults(ADDRESSES, lambda node, what: told.append((node, what)))
    faults.set_links({})
    faults.set_packets(1, None)
    assert told == []
    cut = {Link(1, 2): LinkFault(cut=True)}
    faults.set_links(cut)
    faults.set_links(cut)
    assert told == [(1, Faults(NODES, (Wire(OUT, NODES[1], cut=True),)))]
    faults.set_packets(1, PacketFault(loss=1))
    assert told[1:] == [(1, Faults(NODES, (Wire(OUT, NODES[1], cut=True),), PacketFault(loss=1)))]
    faults.set_links({})
    faults.set_packets(1, None)
    assert told[-1] == (1, Faults(NODES))


def test_a_node_that_did_not_hear_is_told_again() -> None:
    refusing = True
    told: list[int] = []

    def tell(node: int, _faults: Faults) -> None:
        if refusing:
            raise FaultError("nobody hears")
        told.append(node)

    faults = NodeFaults(ADDRESSES, tell)
    with pytest.raises(FaultError):
        faults.set_links({Link(2, 1): LinkFault(cut=True)})
    refusing = False
    faults.set_links({})  # It may have heard half of it.
    assert told == [2]
