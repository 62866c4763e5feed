"""The clients of a run, as a whole: who there is, when they stop, and when they are done."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import count
from random import Random
from typing import Protocol

from penstock.chaos.simulator.partition import SimulatedPartition
from penstock.chaos.simulator.serving import ACKS_ALL
from penstock.chaos.simulator.workload import (
    Client,
    ClientPlace,
    HastyProducer,
    Producer,
    Reader,
)
from penstock.wire.ids import TopicIdPartition


class Workload(Protocol):
    """All clients of a run."""

    def partitions_changed(self) -> None:
        """The controllers may know other partitions now."""
        ...

    def end_one(self, rng: Random) -> None:
        """A producer's process ends, and another takes its place.

        What it has sent may still arrive, after its successor has written even.
        """
        ...

    def hold_up_one(self, rng: Random, for_ms: int) -> None:
        """A process stands still for a while, and then goes on as if nothing had been."""
        ...

    def stop(self) -> None:
        """Nobody begins anything new."""
        ...

    def is_done(self) -> bool:
        """All that was begun is at an end."""
        ...

    def is_at(self, ends: Mapping[TopicIdPartition, int]) -> bool:
        """The readers are at the ends of their logs."""
        ...

    def state(self) -> str:
        """Where everybody is, for people."""
        ...

    def after_step(self, touched: Iterable[SimulatedPartition]) -> None:
        """Something happened to these replicas, which was found to be in order."""
        ...

    def judge(self) -> None:
        """Raise Violation where clients were promised what is not so."""
        ...

    def overdue(self) -> None:
        """As ``judge``, when all should be in order since long, and is not."""
        ...

    def at_rest(self) -> None:
        """As ``judge``, when all is done and the readers are at the ends."""
        ...


class EachPartition:
    """Producers of every kind and a reader of each partition, as partitions come and go."""

    def __init__(self, place: ClientPlace) -> None:
        self._place = place
        self._clients: dict[TopicIdPartition, list[Client]] = {}
        self._addresses = count(100)
        self._stopped = False

    def partitions_changed(self) -> None:
        """The controllers may know other partitions now."""
        partitions = self._place.checkers.partitions
        for key in partitions:
            if key not in self._clients:
                self._clients[key] = self._new_clients(key)
        for key, clients in self._clients.items():
            if key not in partitions:
                for client in clients:
                    client.retire()

    def _new_clients(self, key: TopicIdPartition) -> list[Client]:
        place, addresses = self._place, self._addresses
        clients = [
            Producer(next(addresses), key, place, acks=ACKS_ALL),
            Producer(next(addresses), key, place, acks=ACKS_ALL),
            Producer(next(addresses), key, place, acks=1),
            HastyProducer(next(addresses), key, place),
            Reader(next(addresses), key, place),
        ]
        if self._stopped:
            for client in clients:
                client.stop()
        return clients

    def end_one(self, rng: Random) -> None:
        """See Workload."""
        producers = [
            client for client in self._alive() if isinstance(client, Producer | HastyProducer)
        ]
        if producers:
            ended = rng.choice(producers)
            ended.end()
            successor = ended.successor(next(self._addresses))
            self._clients[ended.key].append(successor)
            self._place.scheduler.note(f"producer {ended.address} ends, {successor.address} begins")

    def hold_up_one(self, rng: Random, for_ms: int) -> None:
        """Nobody is held up here."""

    def after_step(self, touched: Iterable[SimulatedPartition]) -> None:
        """What the checkers of replicas see is all there is to see."""

    def judge(self) -> None:
        """As above."""

    def overdue(self) -> None:
        """As above."""

    def at_rest(self) -> None:
        """As above."""

    def stop(self) -> None:
        """Nobody begins anything new."""
        self._stopped = True
        for client in self._alive():
            client.stop()

    def is_done(self) -> bool:
        """All that was begun is at an end."""
        return all(client.is_done for client in self._alive() if isinstance(client, Producer))

    def is_at(self, ends: Mapping[TopicIdPartition, int]) -> bool:
        """The readers are at the ends of their logs."""
        return all(reader.offset == ends[reader.key] for reader in self._readers())

    def state(self) -> str:
        """Where everybody is, for people."""
        unfinished = [
            client.address
            for client in self._alive()
            if isinstance(client, Producer) and not client.is_done
        ]
        readers = [(reader.key.partition, reader.offset) for reader in self._readers()]
        return f"producers at work: {unfinished}; readers at {readers}"

    def _alive(self) -> list[Client]:
        return [client for clients in self._clients.values() for client in clients if client.alive]

    def _readers(self) -> list[Reader]:
        return [client for client in self._alive() if isinstance(client, Reader)]
