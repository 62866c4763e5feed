from __future__ import annotations

import random
import sys
from collections import Counter
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.broker.core.assignor_values import Assignment, Assignor, MemberSpec, Racks
from penstock.broker.core.assignors import ASSIGNORS, assign_range, assign_round_robin
from penstock.broker.core.rack_assignor import assign_rack_aware
from penstock.broker.core.uniform_assignor import assign_uniform
from penstock.wire.ids import TopicId, TopicIdPartition


def topic(number: int) -> TopicId:
    return TopicId(bytes([number]) * 16)


A, B, C = topic(1), topic(2), topic(3)


def nowhere(_partition: TopicIdPartition) -> frozenset[str]:
    """The racks of brokers that say of none."""
    return frozenset()


def numbers(assignment: Assignment, member_id: str, topic_id: TopicId) -> list[int]:
    return sorted(p.partition for p in assignment[member_id] if p.topic_id == topic_id)


def specs(
    members: dict[str, set[TopicId]], previous: Assignment | None = None
) -> dict[str, MemberSpec]:
    return {
        member_id: MemberSpec(frozenset(topics), (previous or {}).get(member_id, frozenset()))
        for member_id, topics in members.items()
    }


def spread(seed: int) -> Racks:
    """Replicas in one or two of three racks, by chance."""

    def racks(partition: TopicIdPartition) -> frozenset[str]:
        chance = random.Random(f"{seed} {partition}")
        return frozenset(chance.sample("abc", chance.randint(1, 2)))

    return racks


topic_counts = st.dictionaries(
    st.integers(1, 5).map(topic), st.integers(1, 9), min_size=1, max_size=5
)
subscriptions = st.dictionaries(
    st.sampled_from([f"m{n}" for n in range(8)]),
    st.frozensets(st.integers(1, 6).map(topic), max_size=6),
    max_size=8,
)


def check_sound(
    assignment: Assignment, members: dict[str, MemberSpec], counts: dict[TopicId, int]
) -> None:
    assert assignment.keys() == members.keys()
    owners = Counter(p for parts in assignment.values() for p in parts)
    wanted = {
        TopicIdPartition(topic_id, n)
        for topic_id, count in counts.items()
        if any(topic_id in spec.topics for spec in members.values())
        for n in range(count)
    }
    assert owners == dict.fromkeys(wanted, 1)
    for member_id, parts in assignment.items():
        assert {p.topic_id for p in parts} <= members[member_id].topics


@pytest.mark.parametrize("name", ASSIGNORS)
@settings(max_examples=100, deadline=None)
@given(subscriptions=subscriptions, counts=topic_counts, data=st.data())
def test_every_wanted_partition_goes_to_exactly_one_subscriber(
    name: str,
    subscriptions: dict[str, frozenset[TopicId]],
    counts: dict[TopicId, int],
    data: st.DataObject,
) -> None:
    universe = [TopicIdPartition(topic(n), p) for n in range(1, 7) for p in range(9)]
    claims = st.frozensets(st.sampled_from(universe), max_size=20)
    racks = st.sampled_from(["", "a", "b", "c"])
    members = {
        m: MemberSpec(t, data.draw(claims), rack=data.draw(racks)) for m, t in subscriptions.items()
    }
    seed = data.draw(st.integers(0, 2**32))
    assignment = ASSIGNORS[name](members, counts, spread(seed))
    check_sound(assignment, members, counts)
    reordered = dict(reversed(members.items()))
    again = ASSIGNORS[name](reordered, dict(reversed(counts.items())), spread(seed))
    assert again == assignment


@settings(max_examples=150, deadline=None)
@given(
    before=st.sets(st.integers(0, 9), min_size=1),
    after=st.sets(st.integers(0, 9), min_size=1),
    counts=topic_counts,
    grown=topic_counts,
)
def test_uniform_moves_no_more_than_balance_needs(
    before: set[int], after: set[int], counts: dict[TopicId, int], grown: dict[TopicId, int]
) -> None:
    topics = set(counts) | set(grown)
    first = assign_uniform(specs({f"m{n}": topics for n in before}), counts, nowhere)
    members = specs({f"m{n}": topics for n in after}, first)
    second = assign_uniform(members, grown, nowhere)
    check_sound(second, members, grown)
    loads = sorted(len(parts) for parts in second.values())
    assert loads[-1] - loads[0] <= 1
    # What can stay at most: of what members had and still exists, up to quota each, plus one
    # more for as many members as there are partitions left over.
    total = sum(grown.values())
    quota, extra = divmod(total, len(members))
    had = [
        sum(p.partition < grown.get(p.topic_id, 0) for p in members[m].previous) for m in members
    ]
    can_stay = sum(min(count, quota) for count in had) + min(
        extra, sum(count > quota for count in had)
    )
    stayed = sum(len(second[m] & members[m].previous) for m in members)
    assert stayed == can_stay


def test_uniform_gives_the_same_again_when_nothing_changed() -> None:
    members = {"a": {A, B}, "b": {A}, "c": {B, C}}
    counts = {A: 5, B: 4, C: 3}
    first = assign_uniform(specs(members), counts, nowhere)
    assert assign_uniform(specs(members, first), counts, nowhere) == first


@settings(max_examples=150, deadline=None)
@given(subscriptions=subscriptions, counts=topic_counts)
def test_uniform_is_as_even_as_unequal_subscriptions_allow(
    subscriptions: dict[str, frozenset[TopicId]], counts: dict[TopicId, int]
) -> None:
    members = {m: MemberSpec(t) for m, t in subscriptions.items()}
    loads = {m: len(parts) for m, parts in assign_uniform(members, counts, nowhere).items()}
    # The sum of squares is least exactly for the most even assignments; find it by min-cost
    # augmentation from nothing, one partition after the other.
    best = _least_squares(subscriptions, counts)
    assert sum(load * load for load in loads.values()) == best


def _least_squares(subscriptions: dict[str, frozenset[TopicId]], counts: dict[TopicId, int]) -> int:
    """Place each partition by the best augmenting path (incremental optimal semi-matching)."""
    owner: dict[TopicIdPartition, str] = {}
    loads = dict.fromkeys(subscriptions, 0)
    for topic_id, count in counts.items():
        for n in range(count):
            start = TopicIdPartition(topic_id, n)
            came_from: dict[str, TopicIdPartition] = {}
            frontier = [start]
            while frontier:
                partition = frontier.pop()
                for m, topics in subscriptions.items():
                    if partition.topic_id in topics and m not in came_from:
                        came_from[m] = partition
                        frontier += [p for p, holder in owner.items() if holder == m]
            if not came_from:
                continue
            m = min(came_from, key=lambda name: loads[name])
            loads[m] += 1
            while True:
                partition = came_from[m]
                previous = owner.get(partition)
                owner[partition] = m
                if previous is None:
                    break
                m = previous
    return sum(load * load for load in loads.values())


def test_uniform_spreads_each_topic() -> None:
    assignment = assign_uniform(specs({"a": {A, B}, "b": {A, B}}), {A: 2, B: 2}, nowhere)
    for member_id in ("a", "b"):
        assert len(numbers(assignment, member_id, A)) == 1
        assert len(numbers(assignment, member_id, B)) == 1


def test_members_beyond_the_partitions_stand_by() -> None:
    assignment = assign_uniform(specs({"a": {A}, "b": {A}, "c": {A}}), {A: 2}, nowhere)
    assert sorted(len(parts) for parts in assignment.values()) == [0, 1, 1]


def test_range_copartitions_topics() -> None:
    assignment = assign_range(specs({"a": {A, B}, "b": {A, B}}), {A: 5, B: 5}, nowhere)
    assert numbers(assignment, "a", A) == numbers(assignment, "a", B) == [0, 1, 2]
    assert numbers(assignment, "b", A) == numbers(assignment, "b", B) == [3, 4]


def test_round_robin_deals_over_topics() -> None:
    assignment = assign_round_robin(specs({"a": {A, B}, "b": {A, B}}), {A: 3, B: 3}, nowhere)
    assert (numbers(assignment, "a", A), numbers(assignment, "a", B)) == ([0, 2], [1])
    assert (numbers(assignment, "b", A), numbers(assignment, "b", B)) == ([1], [0, 2])


@pytest.mark.parametrize("assign", [assign_range, assign_round_robin])
def test_a_static_member_keeps_its_place_under_another_member_id(assign: Assignor) -> None:
    def by_instance(ids: dict[str, str]) -> dict[str, frozenset[TopicIdPartition]]:
        members = {m: MemberSpec(frozenset({A}), instance_id=i) for i, m in ids.items()}
        assignment = assign(members, {A: 7}, nowhere)
        return {i: assignment[m] for i, m in ids.items()}

    assert by_instance({"i1": "m1", "i2": "m2"}) == by_instance({"i1": "m9", "i2": "m2"})


# ---------------------------------------------------------------------- racks


def near(assignment: Assignment, members: dict[str, MemberSpec], racks: Racks) -> int:
    return sum(members[m].rack in racks(p) for m, parts in assignment.items() for p in parts)


def loads(assignment: Assignment) -> list[int]:
    return sorted(len(parts) for parts in assignment.values())


def _most_near(
    members: dict[str, MemberSpec], partitions: list[TopicIdPartition], racks: Racks
) -> int:
    """How many partitions can be near at most: by trying who gets one more, and matching."""
    quota, extra = divmod(len(partitions), len(members))
    best = 0
    for lucky in combinations(sorted(members), extra):
        rooms = {m: quota + (m in lucky) for m in members}
        matching = _Matching(members, rooms, racks)
        best = max(best, sum(matching.place(p, set()) for p in partitions))
    return best


class _Matching:
    """Partitions with members nearby that have room, found by trying to make room (Kuhn)."""

    def __init__(self, members: dict[str, MemberSpec], rooms: dict[str, int], racks: Racks) -> None:
        self._members, self._rooms, self._racks = members, rooms, racks
        self._holds: dict[str, list[TopicIdPartition]] = {m: [] for m in members}

    def place(self, partition: TopicIdPartition, tried: set[str]) -> bool:
        for m, spec in self._members.items():
            if spec.rack not in self._racks(partition) or m in tried:
                continue
            tried.add(m)
            if len(self._holds[m]) < self._rooms[m]:
                self._holds[m].append(partition)
                return True
            for other in list(self._holds[m]):
                if self.place(other, tried):
                    self._holds[m].remove(other)
                    self._holds[m].append(partition)
                    return True
        return False


@settings(max_examples=300, deadline=None)
@given(
    member_racks=st.lists(st.sampled_from(["", "a", "b", "c"]), min_size=1, max_size=5),
    before=st.integers(0, 4),
    counts=st.dictionaries(st.sampled_from([A, B]), st.integers(1, 7), min_size=1),
    seed=st.integers(0, 2**32),
)
def test_no_even_assignment_has_more_partitions_near_than_rack_aware(
    member_racks: list[str], before: int, counts: dict[TopicId, int], seed: int
) -> None:
    topics, racks = frozenset(counts), spread(seed)
    members = {f"m{n}": MemberSpec(topics, rack=rack) for n, rack in enumerate(member_racks)}
    # Some of them were there before.
    first = assign_rack_aware(dict(list(members.items())[: before + 1]), counts, racks)
    members = {
        m: MemberSpec(topics, first.get(m, frozenset()), rack=spec.rack)
        for m, spec in members.items()
    }
    assignment = assign_rack_aware(members, counts, racks)
    check_sound(assignment, members, counts)
    assert loads(assignment) == loads(assign_uniform(members, counts, racks))
    partitions = sorted(p for parts in assignment.values() for p in parts)
    assert near(assignment, members, racks) == _most_near(members, partitions, racks)
    held = {m: MemberSpec(topics, assignment[m], rack=s.rack) for m, s in members.items()}
    assert assign_rack_aware(held, counts, racks) == assignment, "nothing changed"


@settings(max_examples=150, deadline=None)
@given(subscriptions=subscriptions, counts=topic_counts, seed=st.integers(0, 2**32))
def test_rack_aware_is_as_even_as_uniform_and_never_farther(
    subscriptions: dict[str, frozenset[TopicId]], counts: dict[TopicId, int], seed: int
) -> None:
    racks = spread(seed)
    members = {
        m: MemberSpec(topics, rack="abc"[n % 3])
        for n, (m, topics) in enumerate(subscriptions.items())
    }
    uniform = assign_uniform(members, counts, racks)
    assignment = assign_rack_aware(members, counts, racks)
    check_sound(assignment, members, counts)
    assert sum(n * n for n in loads(assignment)) == sum(n * n for n in loads(uniform))
    assert near(assignment, members, racks) >= near(uniform, members, racks)


def test_rack_aware_reads_each_partition_in_its_rack_where_that_is_even() -> None:
    def racks(partition: TopicIdPartition) -> frozenset[str]:
        return frozenset("abc"[partition.partition % 3])

    members = {f"m{n}": MemberSpec(frozenset({A}), rack="cab"[n % 3]) for n in range(6)}
    assignment = assign_rack_aware(members, {A: 12}, racks)
    assert loads(assignment) == [2] * 6
    assert near(assignment, members, racks) == 12


def test_rack_aware_costs_little_however_many_partitions_are_far_at_first() -> None:
    def racks(partition: TopicIdPartition) -> frozenset[str]:
        return frozenset("abc"[(partition.partition * 7 + n) % 3] for n in range(2))

    members = {f"m{n:03}": MemberSpec(frozenset({A}), rack="abc"[n // 100]) for n in range(300)}
    calls = Counter[str]()

    def count(_frame: object, what: str, _arg: object) -> None:
        calls[what] += 1

    sys.setprofile(count)
    try:
        assignment = assign_rack_aware(members, {A: 10_000}, racks)
    finally:
        sys.setprofile(None)
    assert near(assignment, members, racks) == 10_000
    # Of the coordinator's event loop: when each partition cost its holder's others, it were 2 s.
    assert calls["call"] + calls["c_call"] < 40 * 10_000


def test_rack_aware_moves_no_more_than_it_must_when_a_member_goes() -> None:
    def racks(partition: TopicIdPartition) -> frozenset[str]:
        return frozenset("ab"[partition.partition % 2])

    members = {f"m{n}": MemberSpec(frozenset({A}), rack="ab"[n % 2]) for n in range(4)}
    first = assign_rack_aware(members, {A: 12}, racks)
    left = {
        m: MemberSpec(frozenset({A}), first[m], rack=spec.rack)
        for m, spec in members.items()
        if m != "m3"
    }
    second = assign_rack_aware(left, {A: 12}, racks)
    assert all(first[m] <= second[m] for m in left)
