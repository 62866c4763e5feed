"""The rack-aware assignor: even as uniform, and with as many partitions as possible read nearby.

A partition is near a member that has a replica of it in its rack (KIP-881): there it can be read
without crossing to another rack (KIP-392). Evenness goes before nearness, and nearness before
stickiness, as with Kafka's assignors.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from penstock.broker.core.assignor_values import Assignment, MemberSpec, Racks, subscribed
from penstock.broker.core.uniform_assignor import assign_uniform
from penstock.wire.ids import TopicId, TopicIdPartition


def assign_rack_aware(
    members: Mapping[str, MemberSpec], counts: Mapping[TopicId, int], racks: Racks
) -> Assignment:
    """The uniform assignment, changed until no exchange brings another partition nearer.

    Where all members subscribe to the same, no even assignment has more partitions near.
    """
    assignment = assign_uniform(members, counts, racks)
    if not any(spec.rack for spec in members.values()):
        return assignment
    return _Exchange(members, counts, racks, assignment).run()


class _Sort(NamedTuple):
    """Partitions that are alike: the same members may have them, and they are near the same."""

    topics: int  # Those with the same subscribers share a number.
    racks: tuple[str, ...]


class _Class(NamedTuple):
    """Members that are alike: in one rack, with the same subscription, and as many partitions."""

    rack: str
    topics: tuple[int, ...]
    load: int

    def takes(self, sort: _Sort) -> bool:
        return sort.topics in self.topics

    def is_near(self, sort: _Sort) -> bool:
        return self.rack in sort.racks and sort.topics in self.topics


@dataclass(frozen=True, slots=True)
class _Stop:
    """A member of ``place`` gives ``given`` to the next stop, or home from the last.

    None: it gives nothing, as it takes one more. At the next stop, if there is one, somebody who
    has more gives instead.
    """

    place: _Class
    given: _Sort | None


class _Exchange:
    """Brings far partitions near, along chains in which nobody else's goes from near to far.

    A chain begins with a far partition, which goes to a member nearby; that one gives another in
    exchange, and so on, until someone has fewer than the first had and keeps what it gets, or
    someone can give the first what is no farther there. Members and partitions that are alike are
    searched together, so that a search costs by racks and not by members. These are the augmenting
    paths of a flow, for which reason they find the most where subscriptions are the same.
    """

    def __init__(
        self,
        members: Mapping[str, MemberSpec],
        counts: Mapping[TopicId, int],
        racks: Racks,
        assignment: Assignment,
    ) -> None:
        self._members = members
        self._held = {member_id: set(parts) for member_id, parts in assignment.items()}
        self._holders = {p: member_id for member_id, parts in assignment.items() for p in parts}
        numbers: dict[frozenset[str], int] = {}
        topics = {
            topic_id: numbers.setdefault(frozenset(those), len(numbers))
            for topic_id, those in subscribed(members, counts).items()
        }
        self._sorts = {
            p: _Sort(topics[p.topic_id], tuple(sorted(racks(p)))) for p in sorted(self._holders)
        }
        self._wants = {
            member_id: tuple(sorted({topics[t] for t in spec.topics if t in topics}))
            for member_id, spec in members.items()
        }
        self._alike: dict[_Class, set[str]] = defaultdict(set)
        self._stock: dict[_Class, dict[_Sort, set[TopicIdPartition]]] = defaultdict(dict)
        for member_id in members:
            self._enter(member_id)

    def run(self) -> Assignment:
        """Carry out every chain that there is. Each brings a partition nearer for good."""
        hopeless: set[tuple[_Class, _Sort]] = set()
        for partition, sort in self._sorts.items():
            home = self._class_of(self._holders[partition])
            if home.is_near(sort) or (home, sort) in hopeless:
                continue
            chain = self._find(home, sort)
            if chain:
                self._carry_out(partition, chain)
            else:
                hopeless.add((home, sort))
        return {member_id: frozenset(parts) for member_id, parts in self._held.items()}

    def _class_of(self, member_id: str) -> _Class:
        rack, load = self._members[member_id].rack, len(self._held[member_id])
        return _Class(rack, self._wants[member_id], load)

    def _enter(self, member_id: str) -> None:
        place = self._class_of(member_id)
        self._alike[place].add(member_id)
        for partition in self._held[member_id]:
            self._stock[place].setdefault(self._sorts[partition], set()).add(partition)

    def _withdraw(self, member_id: str) -> None:
        place = self._class_of(member_id)
        self._alike[place].remove(member_id)
        for partition in self._held[member_id]:
            self._stock[place][self._sorts[partition]].remove(partition)

    def _in_stock(self, place: _Class) -> list[_Sort]:
        return sorted(sort for sort, parts in self._stock[place].items() if parts)

    # ------------------------------------------------------------------ finding a chain

    def _find(self, home: _Class, sort: _Sort) -> list[_Stop]:
        """The shortest chain that brings a partition of ``home`` nearer; empty if there is none."""
        places = sorted(place for place, those in self._alike.items() if those)
        reached: dict[_Class, tuple[_Class, _Sort | None]] = {}
        queue: deque[_Class] = deque()
        for place in places:
            if place.is_near(sort):
                reached[place] = (home, sort)
                queue.append(place)
        while queue:
            place = queue.popleft()
            if place.load < home.load:
                return _stops(home, _Stop(place, None), reached)
            stock = self._in_stock(place)
            for given in stock:
                if home.takes(given) and (home.is_near(given) or not place.is_near(given)):
                    return _stops(home, _Stop(place, given), reached)
            for other in places:
                if other in reached or other == home:
                    continue
                nearer = next((given for given in stock if other.is_near(given)), None)
                if nearer is not None or other.load > place.load:
                    reached[other] = (place, nearer)
                    queue.append(other)
        return []

    # ------------------------------------------------------------------ carrying it out

    def _carry_out(self, partition: TopicIdPartition, chain: list[_Stop]) -> None:
        first = self._holders[partition]
        moves: dict[TopicIdPartition, str] = {}
        moving: TopicIdPartition | None = partition
        for stop in chain:
            if stop.given is None:
                if moving is not None:
                    moves[moving] = min(self._alike[stop.place])
                moving = None
                continue
            given = self._choose(stop.place, stop.given)
            if moving is not None:
                moves[moving] = self._holders[given]
            moving = given
        if moving is not None:
            moves[moving] = first
        touched = {*moves.values(), *(self._holders[moved] for moved in moves)}
        for member_id in touched:
            self._withdraw(member_id)
        for moved, taker in moves.items():
            self._held[self._holders[moved]].remove(moved)
            self._held[taker].add(moved)
            self._holders[moved] = taker
        for member_id in touched:
            self._enter(member_id)

    def _choose(self, place: _Class, sort: _Sort) -> TopicIdPartition:
        """One that is new to its holder, rather than one that it had."""
        return min(
            self._stock[place][sort],
            key=lambda p: (p in self._members[self._holders[p]].previous, p),
        )


def _stops(
    home: _Class, last: _Stop, reached: Mapping[_Class, tuple[_Class, _Sort | None]]
) -> list[_Stop]:
    chain = [last]
    before, given = reached[last.place]
    while before != home:
        chain.append(_Stop(before, given))
        before, given = reached[before]
    chain.reverse()
    return chain
