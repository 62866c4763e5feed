"""The clients of a run with transactions, as a whole."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import count
from random import Random
from typing import Final

from penstock.chaos.simulator.partition import SimulatedPartition
from penstock.chaos.simulator.serving import ACKS_ALL, stable_offset
from penstock.chaos.simulator.transactions import anomalies
from penstock.chaos.simulator.transactions.actors import (
    Actor,
    Driver,
    Person,
    Processor,
    Stage,
    Transfers,
)
from penstock.chaos.simulator.transactions.careful import CarefulTransfers
from penstock.chaos.simulator.transactions.group_actors import Onlooker, Worker
from penstock.chaos.simulator.transactions.history import Deleted
from penstock.chaos.simulator.transactions.observer import Observer
from penstock.chaos.simulator.transactions.positions import OFFSETS_TOPIC_ID
from penstock.chaos.simulator.transactions.reading import CommittedReader
from penstock.chaos.simulator.transactions.scripts import ScriptPlace
from penstock.chaos.simulator.workload import ClientPlace, Producer
from penstock.wire.ids import TopicIdPartition

_CAST: Final[tuple[tuple[type[Actor], str], ...]] = (
    (Transfers, "transfers-0"),
    (Transfers, "transfers-1"),
    (CarefulTransfers, "careful-0"),
    (Processor, "processor-0"),
    (Processor, "processor-1"),
    (Driver, "group-0"),
    (Worker, "worker-0"),
    (Worker, "worker-1"),
    (Worker, "worker-2"),
    (Onlooker, "onlooker"),
    (Person, "somebody"),
)
_SUCCESSIONS: Final = 0.7  # Of the producers that are held up: another one takes their place.


class TransactionalClients:
    """Programs of every kind (or of the roles in ``cast``), readers of committed records, and
    producers without transactions.
    """

    def __init__(
        self,
        place: ClientPlace,
        scripts: ScriptPlace,
        observer: Observer,
        topic: str,
        *,
        timeout_ms: int,
        cast: Collection[str] = (),
    ) -> None:
        self._place = place
        self._timeout_ms = timeout_ms
        self._scripts = scripts
        self._observer = observer
        self._addresses = count(100)
        self._actors: list[Actor] = []
        self._readers: dict[TopicIdPartition, CommittedReader] = {}
        self._producers: list[Producer] = []
        self._stopped = False
        self._cast = [
            (kind, name) for kind, name in _CAST if not cast or name.split("-")[0] in cast
        ]
        names = tuple(
            name for kind, name in self._cast if issubclass(kind, Transfers | Processor | Worker)
        )
        self._stage = Stage(
            scripts, topic, self._lasting, self._fleeting, count(1), count(1), names
        )
        self._first: TopicIdPartition | None = None

    def _lasting(self) -> Sequence[TopicIdPartition]:
        """The partitions of the topic that was there first, which is not deleted."""
        topic_id = None if self._first is None else self._first.topic_id
        return sorted(key for key in self._readers if key.topic_id == topic_id)

    def _fleeting(self) -> Sequence[TopicIdPartition]:
        return sorted(self._readers.keys() - set(self._lasting()))

    def partitions_changed(self) -> None:
        """The controllers may know other partitions now."""
        known = self._place.checkers.partitions
        for key in sorted(self._readers.keys() - known.keys()):
            self._scripts.history.note(Deleted(key))
            self._readers.pop(key).end()
            for producer in self._producers:
                if producer.key == key:
                    producer.retire()
        for key in sorted(known):
            if self._is_internal(key) or key in self._readers:
                continue
            self._first = self._first or key
            self._readers[key] = CommittedReader(
                next(self._addresses), key, self._scripts, self._observer
            )
            producer = Producer(next(self._addresses), key, self._place, acks=ACKS_ALL)
            self._producers.append(producer)
            if self._stopped:
                producer.stop()
        if self._readers and not self._actors and len(list(filter(self._is_internal, known))) > 3:
            self._begin()

    def _is_internal(self, key: TopicIdPartition) -> bool:
        """Whether only coordinators write to a partition."""
        return self._observer.is_coordinators(key) or key.topic_id == OFFSETS_TOPIC_ID

    def _begin(self) -> None:
        for kind, name in self._cast:
            self._actors.append(kind(next(self._addresses), self._stage, name, self._timeout_ms))

    def end_one(self, rng: Random) -> None:
        """A process ends, and another takes its place, while what it has sent still travels."""
        actors = self._alive()
        if actors:
            ended = rng.choice(actors)
            ended.end()
            self._succeed(ended)

    def hold_up_one(self, rng: Random, for_ms: int) -> None:
        """A process stands still for a while; another one may have taken its place by then."""
        actors = self._alive()
        if actors:
            held = rng.choice(actors)
            held.pause(for_ms)
            self._scripts.scheduler.note(f"{held.name} at {held.address} stands still")
            if rng.random() < _SUCCESSIONS:
                self._succeed(held)

    def _succeed(self, actor: Actor) -> None:
        if not actor.replaced:
            successor = actor.successor(next(self._addresses))
            self._actors.append(successor)
            self._scripts.scheduler.note(
                f"{actor.name} at {actor.address} is replaced by {successor.address}"
            )

    def after_step(self, touched: Iterable[SimulatedPartition]) -> None:
        """See what was committed since, and what leaders would tell readers."""
        for partition in touched:
            key, replica = partition.key, partition.replica
            self._observer.look(key)
            if partition.is_leader and not partition.closed and partition.broker.alive:
                high_watermark = replica.high_watermark
                stable = stable_offset(partition.log, high_watermark)
                self._observer.check_leader(key, replica.leader_epoch, high_watermark, stable)

    def judge(self) -> None:
        """Raise Violation where there is an anomaly."""
        self._observer.judge(anomalies.AT_ALL_TIMES)

    def overdue(self) -> None:
        """As ``judge``, when all should be in order since long, and is not."""
        self._observer.judge((*anomalies.AT_ALL_TIMES, anomalies.open_at_rest))

    def at_rest(self) -> None:
        """As ``judge``, when all is done and the readers are at the ends."""
        self._observer.judge((*anomalies.AT_ALL_TIMES, *anomalies.AT_REST))

    def stop(self) -> None:
        """Nobody begins anything new."""
        self._stopped = True
        for actor in self._actors:
            actor.stop()
        for producer in self._producers:
            producer.stop()

    def is_done(self) -> bool:
        """All that was begun is at an end."""
        return all(actor.is_done for actor in self._actors) and all(
            producer.is_done for producer in self._producers if producer.alive
        )

    def is_at(self, ends: Mapping[TopicIdPartition, int]) -> bool:
        """The readers are at the ends of their logs: no transaction is open there."""
        return all(reader.offset == ends[key] for key, reader in self._readers.items())

    def state(self) -> str:
        """Where everybody is, for people."""
        busy = [f"{actor.name} at {actor.address}" for actor in self._actors if not actor.is_done]
        readers = [(key.partition, reader.offset) for key, reader in self._readers.items()]
        return f"at work: {busy}; readers of committed records at {readers}"

    def _alive(self) -> list[Actor]:
        return [actor for actor in self._actors if actor.alive and not actor.is_done]
