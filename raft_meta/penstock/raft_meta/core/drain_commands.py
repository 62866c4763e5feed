"""What draining a broker does: it keeps its replicas, and gives its leaderships away."""

from __future__ import annotations

from typing import Final

from penstock.raft_meta.core import election
from penstock.raft_meta.core.tables import Draft
from penstock.v1 import cluster_pb2
from penstock.wire.errors import BrokerIdNotRegisteredError, InvalidRequestError

_LATEST_MS: Final = 2**53
"""No clock shows it, and there is room above for one millisecond more for each drain."""


def drain(
    draft: Draft, command: cluster_pb2.DrainBrokerCommand, result: cluster_pb2.CommandResult
) -> None:
    """Hand a live broker's leaderships to others in sync, or let it lead again.

    What nobody else in sync can lead stays with it, and goes to the first that comes in sync. The
    mark ends with the registration: a process that starts anew is not drained. Once it may lead
    again the rounds of the active controller give it back what it leads by preference; at once it
    gets only what another drained broker leads for want of it.

    No two are drained since the same time, and the later command has the later one, whatever the
    clocks say: of those that are drained at once the first may leave, and the others know it.
    """
    broker = draft.broker(command.node_id)
    if broker is None:
        raise BrokerIdNotRegisteredError(f"broker {command.node_id} is not registered")
    if not 0 <= command.since_ms < _LATEST_MS:
        raise InvalidRequestError(
            f"broker {command.node_id} can not be drained since {command.since_ms} ms after 1970"
        )
    if command.since_ms and not broker.usable:
        state = "fenced" if broker.fenced else "shutting down"
        raise InvalidRequestError(
            f"broker {command.node_id} is {state}, and leads nothing that it could hand over; "
            "next: nothing, it can be stopped; `penstock cluster describe` shows it"
        )
    if bool(command.since_ms) == bool(broker.drained_since_ms):
        result.drain_broker.remaining_leaderships = draft.tables.leaders[broker.node_id]
        return
    since_ms = command.since_ms and max(command.since_ms, _latest_ms(draft) + 1)
    draft.put_broker(broker._replace(drained_since_ms=since_ms))
    result.drain_broker.remaining_leaderships = _reconsider(draft, broker.node_id)


def _latest_ms(draft: Draft) -> int:
    return max(broker.drained_since_ms for broker in draft.tables.brokers.values())


def _reconsider(draft: Draft, node_id: int) -> int:
    """Elect anew where the broker leads, or a drained one does; how many it leads then."""
    led = 0
    for key, partition in draft.tables.all_partitions():
        if partition.leader == node_id or draft.drained(partition.leader):
            rules = draft.rules_of(key, partition.replication_factor)
            revised = election.revise(partition, rules, isr=partition.isr)
            if revised is not partition:
                draft.put_partition(key, revised)
            led += revised.leader == node_id
        # What it does not lead, and nobody drained does, stays as it is.
    return led
