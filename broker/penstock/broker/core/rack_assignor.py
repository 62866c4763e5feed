"""The rack-aware assignor: even as uniform, and with as many partitions as possible read nearby.

A partition is near a member that has a replica of it in its rack (KIP-881): there it can be read
without crossing to another rack (KIP-392). Evenness goes before nearness, and nearness before
stickiness, as with Kafka's assignors.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
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


class _Lot(NamedTuple):
    """Partitions that are alike for one holder as well: it had them before, or they are new."""

    sort: _Sort
    had: bool


class _Exchange:
    """Brings far partitions near, along chains in which nobody else's goes from near to far.

    A chain begins with a far partition, which goes to a member nearby; that one gives another in
    exchange, and so on, until someone has fewer than the first had and keeps what it gets, or
    someone can give the first what is no farther there. Members and partitions that are alike are
    searched together, so that a search costs by racks and not by members, and what was found
    serves as often as there is something to give at each stop. These are the augmenting
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
        holders = {p: member_id for member_id, parts in assignment.items() for p in parts}
        numbers: dict[frozenset[str], int] = {}
        topics = {
            topic_id: numbers.setdefault(frozenset(those), len(numbers))
            for topic_id, those in subscribed(members, counts).items()
        }
        self._sorts = _sorts(sorted(holders), topics, racks)
        self._holders = _deal_near(members, holders, self._sorts)
        wants = {
            wanted: tuple(sorted({topics[t] for t in wanted if t in topics}))
            for wanted in {spec.topics for spec in members.values()}
        }
        # Dicts for sets, here and below: what comes first must not hang on hashes.
        self._held: dict[str, dict[_Lot, dict[TopicIdPartition, None]]] = {m: {} for m in members}
        for partition, sort in self._sorts.items():
            member_id = self._holders[partition]
            lot = _Lot(sort, partition in members[member_id].previous)
            self._held[member_id].setdefault(lot, {})[partition] = None
        self._alike: dict[_Class, dict[str, None]] = defaultdict(dict)
        self._stock: dict[_Class, dict[_Lot, dict[str, None]]] = defaultdict(dict)
        self._places: dict[str, _Class] = {}
        for member_id, spec in sorted(members.items()):
            place = _Class(spec.rack, wants[spec.topics], len(assignment[member_id]))
            self._enter(member_id, place)

    def run(self) -> Assignment:
        """Carry out every chain that there is. Each brings a partition nearer for good."""
        chains: dict[tuple[_Class, _Sort], list[_Stop]] = {}  # Empty where there is none.
        for partition, sort in self._sorts.items():
            home = self._places[self._holders[partition]]
            if home.is_near(sort):
                continue
            chain = chains.get((home, sort))
            if chain is None or not all(map(self._is_open, chain)):
                chain = chains[home, sort] = self._find(home, sort)
            if chain:
                self._carry_out(partition, chain)
        return {
            member_id: frozenset(p for parts in lots.values() for p in parts)
            for member_id, lots in self._held.items()
        }

    def _enter(self, member_id: str, place: _Class) -> None:
        self._places[member_id] = place
        self._alike[place][member_id] = None
        stock = self._stock[place]
        for lot in self._held[member_id]:
            stock.setdefault(lot, {})[member_id] = None

    def _withdraw(self, member_id: str) -> _Class:
        place = self._places.pop(member_id)
        del self._alike[place][member_id]
        stock = self._stock[place]
        for lot in self._held[member_id]:
            del stock[lot][member_id]
        return place

    def _in_stock(self, place: _Class) -> list[_Sort]:
        return sorted({lot.sort for lot, holders in self._stock[place].items() if holders})

    def _lot(self, place: _Class, sort: _Sort) -> _Lot | None:
        """What is given of a sort: rather what is new to its holder than what that one had."""
        stock = self._stock[place]
        for lot in (_Lot(sort, had=False), _Lot(sort, had=True)):
            if stock.get(lot):
                return lot
        return None

    def _is_open(self, stop: _Stop) -> bool:
        if stop.given is None:
            return bool(self._alike[stop.place])
        return self._lot(stop.place, stop.given) is not None

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
        moves: list[tuple[TopicIdPartition, str]] = []
        moving: TopicIdPartition | None = partition
        for stop in chain:
            if stop.given is None:
                if moving is not None:
                    moves.append((moving, next(iter(self._alike[stop.place]))))
                moving = None
                continue
            given = self._choose(stop.place, stop.given)
            if moving is not None:
                moves.append((moving, self._holders[given]))
            moving = given
        if moving is not None:
            moves.append((moving, first))
        changes: dict[str, int] = {}
        for moved, taker in moves:
            giver = self._holders[moved]
            changes[taker] = changes.get(taker, 0) + 1
            changes[giver] = changes.get(giver, 0) - 1
        # Who gives one and takes one stays where it is, and its other partitions are left alone.
        left = {m: self._withdraw(m) for m, change in changes.items() if change}
        for moved, taker in moves:
            self._move(moved, taker)
        for member_id, place in left.items():
            self._enter(member_id, place._replace(load=place.load + changes[member_id]))

    def _move(self, partition: TopicIdPartition, taker: str) -> None:
        sort, giver = self._sorts[partition], self._holders[partition]
        lot = _Lot(sort, partition in self._members[giver].previous)
        parts = self._held[giver][lot]
        del parts[partition]
        if not parts:
            del self._held[giver][lot]
            if giver in self._places:
                del self._stock[self._places[giver]][lot][giver]
        lot = _Lot(sort, partition in self._members[taker].previous)
        self._held[taker].setdefault(lot, {})[partition] = None
        if taker in self._places:
            self._stock[self._places[taker]].setdefault(lot, {})[taker] = None
        self._holders[partition] = taker

    def _choose(self, place: _Class, sort: _Sort) -> TopicIdPartition:
        lot = self._lot(place, sort)
        assert lot is not None, "a chain is followed while it is open"
        holder = next(iter(self._stock[place][lot]))
        return next(iter(self._held[holder][lot]))


def _sorts(
    partitions: Iterable[TopicIdPartition], topics: Mapping[TopicId, int], racks: Racks
) -> dict[TopicIdPartition, _Sort]:
    """The sort of each partition, in the order given; those that are alike share one."""
    found: dict[tuple[int, frozenset[str]], _Sort] = {}
    sorts = {}
    for partition in partitions:
        key = topics[partition.topic_id], racks(partition)
        sort = found.get(key)
        if sort is None:
            sort = found[key] = _Sort(key[0], tuple(sorted(key[1])))
        sorts[partition] = sort
    return sorts


def _deal_near(
    members: Mapping[str, MemberSpec],
    holders: Mapping[TopicIdPartition, str],
    sorts: Mapping[TopicIdPartition, _Sort],
) -> dict[TopicIdPartition, str]:
    """Deal out once more what is new to its holder, to somebody nearby where that is easy.

    Everybody gets as many as before, of topics with the same subscribers. What chains do better is
    left to them; this spares most of them where a group begins.
    """
    dealt = dict(holders)
    new: list[TopicIdPartition] = []
    rooms: dict[
        int, dict[str, list[str]]
    ] = {}  # By topics and rack: each as often as it takes one.
    for partition, sort in sorts.items():
        holder = holders[partition]
        spec = members[holder]
        if partition not in spec.previous:
            new.append(partition)
            rooms.setdefault(sort.topics, {}).setdefault(spec.rack, []).append(holder)
    nearby: dict[_Sort, list[list[str]]] = {}
    far: list[TopicIdPartition] = []
    for partition in new:
        sort = sorts[partition]
        choice = nearby.get(sort)
        if choice is None:
            by_rack = rooms[sort.topics]
            choice = nearby[sort] = [by_rack[rack] for rack in sort.racks if rack in by_rack]
        widest = max(choice, key=len, default=None)
        if widest:
            dealt[partition] = widest.pop()
        else:
            far.append(partition)
    for partition in far:
        by_rack = rooms[sorts[partition].topics]
        dealt[partition] = next(those for those in by_rack.values() if those).pop()
    return dealt


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
