"""`penstock can-roll`: whether a node may be stopped now, and why not."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Final

import typer

from penstock.broker.core.rolling import (
    BrokerStanding,
    PartitionStanding,
    QuorumStanding,
    VoterStanding,
    why_not_roll,
)
from penstock.cli.connections import admin_client
from penstock.cli.errors import EXIT_FAILED, OWN_STEP, report
from penstock.cli.output import print_json
from penstock.cli.quorum_table import leader_doubt
from penstock.cli.settings import Bootstrap, Output, resolve
from penstock.wire.config_keys import MAX_INT32
from penstock.wire.errors import BrokerIdNotRegisteredError, PenstockError
from penstock.wire.topic_config import effective_min_isr

if TYPE_CHECKING:
    from penstock.client import AdminClient
    from penstock.client.descriptions import QuorumDescription, TopicDescription

LOOK_SECONDS: Final = 1.0


def can_roll(
    ctx: typer.Context,
    node: Annotated[
        int, typer.Argument(help="The node to be stopped.", metavar="NODE", min=0, max=MAX_INT32)
    ],
    *,
    wait: Annotated[
        float,
        typer.Option(
            "--wait", min=0, metavar="SECONDS", help="Ask again until it may be, for so long."
        ),
    ] = 0,
    bootstrap: Bootstrap = None,
    output: Output = None,
) -> None:
    """Say whether a node may be stopped now: nothing would be refused, and nothing at risk.

    That is so if no partition falls under min.insync.replicas or loses its only replica in sync,
    and a majority of the controllers that is caught up stays. Brokers that are down, stopping or
    drained count as absent. The exit status is 0 if it may be stopped, else 1.
    """
    settings = resolve(ctx, bootstrap, output)
    with admin_client(settings) as admin:
        reasons = _ask_until(admin, node, time.monotonic() + wait)
    if settings.as_json:
        print_json({"node_id": node, "can_roll": not reasons, "reasons": reasons})
    else:
        _print(node, reasons)
    if reasons:
        raise typer.Exit(EXIT_FAILED)


def _ask_until(admin: AdminClient, node: int, deadline_s: float) -> list[str]:
    """The reasons that are left at the end; meanwhile standard error says what is waited for."""
    said: list[str] = []
    while True:
        left_s = deadline_s - time.monotonic()
        try:
            reasons = reasons_now(admin, node)
        except PenstockError as error:
            # While nodes are restarted, who is asked may be just the one.
            if left_s <= 0 or not error.retriable or _names_nobody(error):
                raise
            reasons = [error.message]
        if not reasons or left_s <= 0:
            return reasons
        if reasons != said:
            said = reasons
            for reason in reasons:
                report(f"waiting: {reason.partition(OWN_STEP)[0]}")
        time.sleep(min(LOOK_SECONDS, left_s))


def _names_nobody(error: PenstockError) -> bool:
    return isinstance(error, BrokerIdNotRegisteredError)


def reasons_now(admin: AdminClient, node: int) -> list[str]:
    """Why the node should not be stopped now; see penstock.broker.core.rolling.

    Raises BrokerIdNotRegisteredError for a node that is neither a broker nor a controller that
    votes.
    """
    # First, and the rest of brokers that know all that was decided until then: by an older picture,
    # of before a drain or a death, two nodes could both be told that they may stop.
    quorum = admin.describe_quorum()
    cluster = admin.describe_cluster(since_index=quorum.metadata_index)
    known = {broker.node_id for broker in cluster.brokers}
    if node not in known | {voter.node_id for voter in quorum.voters}:
        raise BrokerIdNotRegisteredError.among(node, known)
    if quorum.confirmed and cluster.controller_epoch < quorum.term:
        behind = (
            f"broker {cluster.answered_by} knows of the metadata of controller epoch "
            f"{cluster.controller_epoch}, and the present one is {quorum.term}; next: ask again; "
            "if it stays behind, see its log"
        )
        return [behind]
    topics = admin.list_topics(include_internal=True, since_index=cluster.metadata_index)
    return why_not_roll(
        node,
        [standing for topic in topics for standing in partition_standings(topic)],
        [
            BrokerStanding(broker.node_id, broker.is_usable, broker.drained_since_ms)
            for broker in cluster.brokers
        ],
        quorum_standing(quorum),
    )


def partition_standings(topic: TopicDescription) -> list[PartitionStanding]:
    """The partitions of a topic, as the rule wants them."""
    return [
        PartitionStanding(
            f"{topic.name}-{one.partition}",
            one.replicas,
            one.isr,
            one.min_insync_replicas or effective_min_isr(topic.configs, len(one.replicas)),
            one.leader,
        )
        for one in topic.partitions
    ]


def quorum_standing(quorum: QuorumDescription) -> QuorumStanding:
    """The controllers, as the rule wants them."""
    return QuorumStanding(
        [
            VoterStanding(
                voter.node_id,
                behind=_behind(quorum, voter.node_id, voter.match_index),
                answers=not voter.is_unreachable and not voter.is_wiped,
            )
            for voter in quorum.voters
        ],
        leader_doubt(quorum).partition("\n")[0],
    )


def _behind(quorum: QuorumDescription, node_id: int, match_index: int) -> int:
    if node_id == quorum.leader_id:
        return 0
    return max(0, quorum.commit_index - match_index) if match_index >= 0 else -1


def _print(node: int, reasons: list[str]) -> None:
    if not reasons:
        print(
            f"node {node} can be stopped: no partition falls under min.insync.replicas, and a "
            "majority of the controllers stays"
        )
        return
    print(f"node {node} should not be stopped now")
    for reason in reasons:
        what, _, step = reason.partition(OWN_STEP)
        print(f"- {what}\n  next: {step}")
