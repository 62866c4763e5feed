"""What clients do, and what is to be judged of it: the contract that every workload fulfils.

A workload's clients run in workers, processes of their own that may be killed. A worker makes
a ``Client`` for each logical client that it was given and awaits its ``run``; after everything was
healed a fresh worker awaits ``finish`` of the clients that have one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from penstock.chaos.checkers import Checker
    from penstock.chaos.checkers.registry import Settings
    from penstock.chaos.recorder import Recorder
    from penstock.client import AdminClient


@dataclass(frozen=True, slots=True)
class Plan:
    """What a run is made of, as far as workloads are concerned. It is JSON when it travels."""

    seed: int
    nodes: int
    duration_s: float
    rate: float
    """Operations a second that all clients together aim at."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """The workload's own, by name."""


@dataclass(frozen=True, slots=True)
class ClientSpec:
    """One logical client. ``kind`` and ``parameters`` are the workload's; they are JSON."""

    process: str
    kind: str
    worker: int
    """Clients with one number share a worker, and are killed together."""
    parameters: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a client is given."""

    bootstrap: str
    plan: Plan
    spec: ClientSpec
    random: Random
    """Made of the seed and the process: what is drawn from it in order is the same in each run."""
    recorder: Recorder
    """Writes the client's events."""


class Client(Protocol):
    """One logical client, in a worker's event loop."""

    async def run(self) -> None:
        """Do operations until cancelled; errors of operations are events and not raised."""
        ...

    async def finish(self) -> None:
        """After everything was healed: the final reads. Returns when they are complete."""
        ...


class Workload(Protocol):
    """``name`` is what the command line knows it by, and ``summary`` what its list says of it."""

    name: str
    summary: str

    def prepare(self, admin: AdminClient, plan: Plan) -> None:
        """Make the topics, before any client runs."""
        ...

    def clients(self, plan: Plan) -> Sequence[ClientSpec]:
        """The clients of a run; the same for the same plan."""
        ...

    def client(self, surroundings: Surroundings) -> Client:
        """One of them, in its worker."""
        ...

    def checkers(self, plan: Plan) -> Sequence[Checker]:
        """What is judged of its history; besides, every run is judged by the common checkers."""
        ...


@runtime_checkable
class TunesNodes(Protocol):
    """A workload that needs nodes with settings of their own."""

    def node_settings(self, plan: Plan) -> Mapping[str, str | int]:
        """Settings of every node, by the keys of its file."""
        ...


@runtime_checkable
class TunesCheckers(Protocol):
    """A workload of which the common checkers must know what no evidence tells them."""

    def settings(self, plan: Plan) -> Settings:
        """Such as which topics have retention, or are compacted."""
        ...
