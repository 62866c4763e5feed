"""`penstock doctor`: looks at everything, and says what to act on."""

from __future__ import annotations

import socket
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import TYPE_CHECKING, Final

import typer

from penstock.cli.connections import admin_client
from penstock.cli.doctor_findings import (
    Answer,
    ControllerAnswer,
    Finding,
    PartitionFacts,
    Picture,
    findings,
)
from penstock.cli.errors import EXIT_FAILED
from penstock.cli.output import format_bytes, print_json, print_table
from penstock.cli.settings import Bootstrap, Output, resolve
from penstock.wire.errors import PenstockError
from penstock.wire.topic_config import effective_min_isr

if TYPE_CHECKING:
    from penstock.client import AdminClient
    from penstock.client.descriptions import (
        BrokerDescription,
        NodeDescription,
        QuorumDescription,
        QuorumVoter,
        TopicDescription,
    )

_AT_ONCE: Final = 16
_MS_AN_HOUR: Final = 3_600_000


def doctor(ctx: typer.Context, *, bootstrap: Bootstrap = None, output: Output = None) -> None:
    """Look at all brokers, controllers and partitions, and say what to act on, and how.

    Every broker is asked at its advertised address, as a client would, and controllers without a
    broker through one. The exit status is 0 when
    there is nothing to act on, else 1.
    """
    settings = resolve(ctx, bootstrap, output)
    with admin_client(settings) as admin:
        picture = look(admin)
    found = findings(picture)
    if settings.as_json:
        print_json(
            {
                "healthy": not found,
                "findings": [asdict(finding) for finding in found],
                "nodes": [_as_json(answer) for answer in picture.everybody],
            }
        )
    else:
        _print_nodes(picture)
        _print_findings(found)
    if found:
        raise typer.Exit(EXIT_FAILED)


def look(admin: AdminClient) -> Picture:
    """Ask everybody. Raises only where no broker answers at all."""
    cluster = admin.describe_cluster()
    quorum: QuorumDescription | None = None
    quorum_error = ""
    try:
        quorum = admin.describe_quorum()
    except PenstockError as error:
        quorum_error = error.message
    brokers = {broker.node_id for broker in cluster.brokers}
    alone = [] if quorum is None else [v for v in quorum.voters if v.node_id not in brokers]
    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="doctor") as pool:
        asked = pool.map(lambda broker: ask(admin, broker), cluster.brokers)
        controllers = list(pool.map(lambda voter: ask_controller(admin, voter), alone))
        answers = list(asked)
    return Picture(
        cluster,
        answers,
        quorum,
        quorum_error,
        _partitions(admin),
        now_ms=time.time_ns() // 1_000_000,
        controllers=controllers,
    )


def ask(admin: AdminClient, broker: BrokerDescription) -> Answer:
    """What a broker says of itself at its advertised address, or why it does not."""
    resolved: tuple[str, ...] = ()
    resolve_error = ""
    try:
        places = socket.getaddrinfo(broker.host, broker.port, type=socket.SOCK_STREAM)
        resolved = tuple(dict.fromkeys(str(place[4][0]) for place in places))
    except OSError as error:
        resolve_error = error.strerror or str(error)
    sent_ms = time.time_ns() // 1_000_000
    node, problem = None, ""
    try:
        node = admin.describe_node(broker.node_id)
    except PenstockError as error:
        problem = error.message
    received_ms = time.time_ns() // 1_000_000
    return Answer(broker, resolved, resolve_error, node, problem, sent_ms, received_ms)


def ask_controller(admin: AdminClient, voter: QuorumVoter) -> ControllerAnswer:
    """What a controller that is no broker says of itself to one, or why it does not."""
    sent_ms = time.time_ns() // 1_000_000
    node, problem = None, ""
    try:
        node = admin.describe_node(voter.node_id)
    except PenstockError as error:
        problem = error.message
    return ControllerAnswer(voter, node, problem, sent_ms, time.time_ns() // 1_000_000)


def _partitions(admin: AdminClient) -> list[PartitionFacts]:
    """Those with trouble; only of these is it asked why."""
    troubled = [
        topic.name
        for topic in admin.list_topics(include_internal=True)
        if any(one.leader < 0 or len(one.isr) < len(one.replicas) for one in topic.partitions)
    ]
    topics = admin.describe_topics(troubled, out_of_sync=True) if troubled else []
    return [facts for topic in topics for facts in partition_facts(topic)]


def partition_facts(topic: TopicDescription) -> list[PartitionFacts]:
    """The partitions of a topic that lack something."""
    return [
        PartitionFacts(
            f"{topic.name}-{one.partition}",
            one.leader,
            one.replicas,
            one.isr,
            one.min_insync_replicas or effective_min_isr(topic.configs, len(one.replicas)),
            [(replica.node_id, replica.reason) for replica in one.out_of_sync or ()],
        )
        for one in topic.partitions
        if one.leader < 0 or len(one.isr) < len(one.replicas)
    ]


def _as_json(answer: Answer | ControllerAnswer) -> dict[str, object]:
    # A controller is asked through a broker, which looks its name up itself.
    resolved, unresolved = (
        (answer.resolved, answer.resolve_error) if isinstance(answer, Answer) else ((), "")
    )
    return {
        "node_id": answer.node_id,
        "address": answer.address,
        "resolved": list(resolved),
        "error": unresolved or answer.error,
        "node": asdict(answer.node) if answer.node is not None else None,
    }


def _print_nodes(picture: Picture) -> None:
    print_table(
        ("Node", "Address", "Version", "UpHours", "Fsync", "Free", "Descriptors", "Memory"),
        [(answer.node_id, answer.address, *_of_node(answer.node)) for answer in picture.everybody],
        right=("Node", "UpHours", "Fsync", "Free", "Descriptors", "Memory"),
    )


def _of_node(node: NodeDescription | None) -> tuple[object, ...]:
    if node is None:
        return (None,) * 6
    slowest_us = max((one.fsync_us for one in node.directories), default=-1)
    free = [one.free_bytes for one in node.directories if one.free_bytes >= 0]
    return (
        node.version,
        f"{(node.clock_ms - node.started_ms) / _MS_AN_HOUR:.1f}",
        f"{slowest_us / 1000:.1f} ms" if slowest_us >= 0 else None,
        format_bytes(min(free)) if free else None,
        f"{node.open_descriptors}/{node.max_descriptors}" if node.open_descriptors >= 0 else None,
        format_bytes(node.resident_bytes) if node.resident_bytes >= 0 else None,
    )


def _print_findings(found: list[Finding]) -> None:
    for finding in found:
        print(f"{finding.severity}: {finding.about}: {finding.what}\n  next: {finding.next}")
    if not found:
        print("nothing to act on")
