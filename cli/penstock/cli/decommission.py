"""`penstock decommission`: what a node has goes elsewhere, so that it can be taken away."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from penstock.cli.connections import admin_client
from penstock.cli.errors import report
from penstock.cli.interrupts import handled
from penstock.cli.output import format_count, print_json, print_table
from penstock.cli.partitions import Plan, node_ids, plan_drain
from penstock.cli.quorum_table import warn_of_no_tolerance
from penstock.cli.settings import Bootstrap, Output, Settings, resolve
from penstock.wire.config_keys import MAX_INT32
from penstock.wire.errors import BrokerIdNotRegisteredError, LastVoterError
from penstock.wire.ids import TopicPartition
from penstock.wire.wording import SHOWN, counted, some

if TYPE_CHECKING:
    from penstock.client import AdminClient
    from penstock.client.descriptions import PartitionDescription, PartitionReassignment

LOOK_SECONDS: Final = 1.0


def decommission(
    ctx: typer.Context,
    node: Annotated[
        int, typer.Argument(help="The node's id.", metavar="NODE", min=0, max=MAX_INT32)
    ],
    *,
    to: Annotated[
        str | None,
        typer.Option(
            "--to",
            metavar="NODE,NODE,...",
            help="The brokers that may take its replicas.",
            show_default="all other live ones",
        ),
    ] = None,
    execute: Annotated[
        bool, typer.Option("--execute", help="Do it. Without it the plan is only shown.")
    ] = False,
    bootstrap: Bootstrap = None,
    output: Output = None,
) -> None:
    """Move all that a node has elsewhere, and take it out of the cluster.

    Its replicas go to other brokers, and it votes no more among the controllers. A node that is
    stopped is unregistered then; of one that runs you are told what is left. Ctrl-C ends the
    waiting and not the moves: the same command goes on.
    """
    settings = resolve(ctx, bootstrap, output)
    takers = node_ids(to, "--to") if to is not None else None
    if takers is not None and node in takers:
        raise typer.BadParameter(f"node {node} is to lose its replicas", param_hint="--to")
    with admin_client(settings) as admin:
        work = Decommission(settings, admin, node, takers)
        if not settings.as_json:
            work.show()
        if execute:
            work.execute()
        elif not settings.as_json:
            print("nothing was changed; add --execute to do it")
        if settings.as_json:
            print_json(work.as_json(executed=execute))


@dataclass(frozen=True, slots=True)
class Standing:
    """What a node is at this moment."""

    is_registered: bool
    is_live: bool
    votes: bool


class Decommission:
    """One run of the command. Made, it knows what is to be done, and has changed nothing.

    Raises BrokerIdNotRegisteredError for a node that is neither broker nor controller,
    LastVoterError for the only controller, and InvalidReplicaAssignmentError where replicas have
    nowhere to go.
    """

    def __init__(
        self, settings: Settings, admin: AdminClient, node: int, takers: list[int] | None
    ) -> None:
        self._settings = settings
        self._admin = admin
        self._node = node
        self._takers = takers
        self._standing = self._look()
        self._replicas = self._held()
        self._plan = self._planned()

    def _look(self) -> Standing:
        node = self._node
        brokers = {broker.node_id: broker for broker in self._admin.describe_cluster().brokers}
        voters = {voter.node_id for voter in self._admin.describe_quorum().voters}
        if node not in brokers and node not in voters:
            raise BrokerIdNotRegisteredError.among(node, brokers)
        if voters == {node}:
            raise LastVoterError(
                f"node {node} is the only controller: without it there is no metadata; next: add "
                "another with `penstock quorum add`"
            )
        live = node in brokers and not brokers[node].fenced
        return Standing(node in brokers, live, node in voters)

    def _planned(self) -> Plan:
        """What has to begin to move; what is on its way already is not in it."""
        if not self._standing.is_registered:
            return {}
        return plan_drain(self._admin, [], self._node, self._takers)

    def _held(self) -> dict[TopicPartition, PartitionDescription]:
        """The partitions that the node has a replica of, those that move away among them."""
        return {
            TopicPartition(topic.name, one.partition): one
            for topic in self._admin.list_topics(include_internal=True)
            for one in topic.partitions
            if self._node in one.replicas
        }

    def show(self) -> None:
        """Print what is to be done."""
        if self._plan:
            print_table(
                ("Partition", "From", "To"),
                [
                    (str(where), self._replicas[where].replicas, nodes)
                    for where, nodes in self._plan.items()
                ],
            )
        for number, step in enumerate(self._steps(), 1):
            print(f"{number}. {step}")

    def _steps(self) -> list[str]:
        node, standing = self._node, self._standing
        steps = []
        if self._replicas:
            under_way = len(self._replicas) - len(self._plan)
            going = f" ({under_way} on the way already)" if under_way else ""
            count = counted(len(self._replicas), "replica")
            steps.append(f"move {count} of node {node} to other brokers{going}")
        if standing.votes:
            steps.append(f"make controller {node} no voter")
        if standing.is_registered and not standing.is_live:
            steps.append(f"unregister broker {node}, which is down")
        return steps + self._by_hand()

    def _by_hand(self) -> list[str]:
        """What this command does not do."""
        node, standing = self._node, self._standing
        if standing.is_live:
            return [f"stop node {node}, then `penstock cluster unregister {node}`"]
        return [] if standing.is_registered else [f"stop node {node}"]

    def execute(self) -> None:
        """Do it all, in an order in which it may be left at any point and gone on with."""
        try:
            with handled(_interrupt):
                self._move()
        except KeyboardInterrupt:
            report(
                "stopped waiting: moves that have begun go on by themselves\n"
                f"next: `penstock decommission {self._node} --execute` goes on, and `penstock "
                "partitions reassign --list` shows how far they are"
            )
            raise
        # That may have taken hours, in which the node was stopped, or came back.
        self._standing = self._look()
        node = self._node
        if self._standing.votes:
            quorum = self._admin.remove_voter(node)
            self._say(f"controller {node} votes no more")
            warn_of_no_tolerance(quorum)
        if self._standing.is_registered and not self._standing.is_live:
            self._admin.unregister_broker(node)
            self._say(f"unregistered broker {node}")
        for step in self._by_hand():
            self._say(f"node {node} has nothing any more\nnext: {step}")

    def _say(self, line: str) -> None:
        if not self._settings.as_json:
            print(line)

    def _move(self) -> None:
        """Begin the moves and wait until they are over, those of new topics too."""
        everything = set(self._replicas)
        plan, said = self._plan, ""
        while self._replicas:
            if plan:
                self._admin.alter_partition_reassignments(plan)
            moves = self._admin.list_partition_reassignments()
            self._replicas = self._held()
            everything |= self._replicas.keys()
            line = progress(self._node, len(everything), self._replicas, moves)
            if line != said:
                said = line
                report(line)
            if self._replicas:
                time.sleep(LOOK_SECONDS)
                plan = self._planned()
        if everything:
            self._say(f"moved {counted(len(everything), 'replica')} of node {self._node}")

    def as_json(self, *, executed: bool) -> dict[str, Any]:
        """What programs are told."""
        return {
            "node_id": self._node,
            "executed": executed,
            "moves": [
                {"topic": where.topic, "partition": where.partition, "to": nodes}
                for where, nodes in self._plan.items()
            ],
            "remaining_replicas": len(self._replicas),
            "steps": self._by_hand() if executed else self._steps(),
        }


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def progress(
    node: int,
    everything: int,
    left: Mapping[TopicPartition, PartitionDescription],
    moves: Iterable[PartitionReassignment],
) -> str:
    """How far the moves are, in a line."""
    behind = sum(
        replica.lag
        for move in moves
        if move.partition in left
        for replica in move.replicas
        if replica.node_id in move.adding and replica.lag > 0
    )
    line = f"moved {everything - len(left)} of {counted(everything, 'replica')} of node {node}"
    if behind:
        line += f"; {format_count(behind)} records are still to be copied"
    leaderless = [str(where) for where, one in left.items() if one.leader < 0]
    if leaderless:
        named = some(leaderless[:SHOWN], len(leaderless))
        line += f"; {named} can't move while nobody leads: start the brokers of its replicas"
    return line
