"""What the commands about brokers do: registration, fencing, shutdown, producer id blocks."""

from __future__ import annotations

from itertools import islice
from typing import Final

from penstock.raft_meta.core import election
from penstock.raft_meta.core.model import Broker
from penstock.raft_meta.core.tables import Draft
from penstock.raft_meta.core.versions import (
    EXTERNAL_ADDRESSES_SINCE,
    REGISTRATIONS_FOLLOW_SINCE,
)
from penstock.v1 import cluster_pb2
from penstock.wire.errors import (
    BrokerIdNotRegisteredError,
    InconsistentClusterIdError,
    InvalidRequestError,
    InvalidUpdateVersionError,
    StaleBrokerEpochError,
    UnsupportedMetadataVersionError,
)
from penstock.wire.wording import SHOWN, counted, some

PRODUCER_ID_BLOCK: Final = 1000
"""How many producer ids a broker takes at a time."""

_MAX_HOST_CHARS: Final = 255  # A DNS name has no more.
_MAX_RACK_CHARS: Final = 249
_MAX_PORT: Final = 65_535


def require_registration(draft: Draft, node_id: int, broker_epoch: int) -> Broker:
    """The registration meant.

    Raises BrokerIdNotRegisteredError, or StaleBrokerEpochError when it is another one.
    """
    broker = draft.broker(node_id)
    if broker is None:
        raise BrokerIdNotRegisteredError(
            f"broker {node_id} is not registered; it must register first"
        )
    if broker.broker_epoch != broker_epoch:
        raise StaleBrokerEpochError(
            f"broker {node_id} is registered with broker epoch {broker.broker_epoch}, not "
            f"{broker_epoch}: this process must register anew"
        )
    return broker


def register(
    draft: Draft, command: cluster_pb2.RegisterBrokerCommand, result: cluster_pb2.CommandResult
) -> None:
    """Register a process, fencing whichever process had the node id before.

    The broker epoch is the index of the command. KIP-966: a process whose forerunner did not
    shut down cleanly may have lost the end of its logs, so it is no eligible leader any more.
    Raises InvalidUpdateVersionError when another process registered than the one that it follows
    on: it may be the request that comes late. The same process is answered as the first time; what
    clients from outside are told is taken from it even so, since it may have said that while the
    metadata.version did not know it yet.
    """
    _check_registration(command)
    oldest, newest = _checked_versions(command, draft.metadata_version)
    external_host, external_port = _checked_external(command, draft.metadata_version)
    old = draft.broker(command.node_id)
    if old is not None and old.incarnation_id == command.incarnation_id:
        if (old.external_host, old.external_port) != (external_host, external_port):
            draft.put_broker(old._replace(external_host=external_host, external_port=external_port))
        result.register_broker.broker_epoch = old.broker_epoch
        return
    _require_newest(command, old, draft.metadata_version)
    whole_since = _whole_since(command, old)
    follows = draft.metadata_version >= REGISTRATIONS_FOLLOW_SINCE
    broker = Broker(
        node_id=command.node_id,
        broker_epoch=draft.index,
        incarnation_id=command.incarnation_id,
        host=command.host,
        port=command.port,
        rack=command.rack,
        fenced=True,
        in_controlled_shutdown=False,
        min_version=oldest,
        max_version=newest,
        whole_since_epoch=whole_since if follows else 0,
        external_host=external_host,
        external_port=external_port,
    )
    draft.put_broker(broker)
    _withdraw(draft, broker.node_id, unclean=not whole_since, anew=True)
    result.register_broker.broker_epoch = broker.broker_epoch


def _require_newest(
    command: cluster_pb2.RegisterBrokerCommand, old: Broker | None, in_force: int
) -> None:
    """Raise InvalidUpdateVersionError unless the request knew of the newest registration."""
    newest = 0 if old is None else old.broker_epoch
    if in_force < REGISTRATIONS_FOLLOW_SINCE or not command.HasField("follows_broker_epoch"):
        return
    if command.follows_broker_epoch != newest:
        raise InvalidUpdateVersionError(
            f"broker {command.node_id} registers as the one after broker epoch "
            f"{command.follows_broker_epoch}, and the newest is {newest}: this request came late, "
            f"or its sender has not heard of that one yet; it must ask again when it has"
        )


def _whole_since(command: cluster_pb2.RegisterBrokerCommand, old: Broker | None) -> int:
    """The epoch up to which a process must have everything to lack nothing; 0 if this one may.

    Under a registration that was never let in nothing was acknowledged: it may be one of a process
    that ended before it heard of it, and what its forerunner had is all that there is.
    """
    if old is None:
        return 0
    whole_since = old.whole_since_epoch or old.broker_epoch
    return whole_since if command.previous_broker_epoch in (old.broker_epoch, whole_since) else 0


def check_cluster_id(known: str, claimed: str, who: str) -> None:
    """Raise InconsistentClusterIdError unless the ids agree."""
    if known != claimed:
        raise InconsistentClusterIdError(
            f"{who} belongs to cluster {claimed!r}, but this is cluster {known!r}: point it at "
            f"its own cluster, or give it an empty data directory"
        )


def _check_registration(command: cluster_pb2.RegisterBrokerCommand) -> None:
    if command.node_id < 0:
        raise InvalidRequestError(f"node id {command.node_id} is negative")
    if len(command.incarnation_id) != 16:
        raise InvalidRequestError(
            f"broker {command.node_id} registers with an incarnation id of "
            f"{len(command.incarnation_id)} bytes; 16 are wanted"
        )
    if not command.host or len(command.host) > _MAX_HOST_CHARS:
        raise InvalidRequestError(
            f"broker {command.node_id} advertises a host of {len(command.host)} characters; "
            f"1 to {_MAX_HOST_CHARS} are wanted: set broker.advertised"
        )
    if not 0 < command.port <= _MAX_PORT:
        raise InvalidRequestError(
            f"broker {command.node_id} advertises port {command.port}; 1 to {_MAX_PORT} is wanted"
        )
    if len(command.rack) > _MAX_RACK_CHARS:
        raise InvalidRequestError(
            f"broker {command.node_id} has a rack of more than {_MAX_RACK_CHARS} characters"
        )


def _checked_external(command: cluster_pb2.RegisterBrokerCommand, in_force: int) -> tuple[str, int]:
    """What clients from outside are told; nothing where the metadata.version does not know it.

    Below that nothing is refused either: older controllers apply the same entry without a look.
    """
    host, port = command.external_host, command.external_port
    if in_force < EXTERNAL_ADDRESSES_SINCE or not (host or port):
        return "", 0
    if not host or len(host) > _MAX_HOST_CHARS or not 0 < port <= _MAX_PORT:
        raise InvalidRequestError(
            f"broker {command.node_id} advertises a host of {len(host)} characters and port {port} "
            f"to clients from outside; 1 to {_MAX_HOST_CHARS} characters and 1 to {_MAX_PORT} are "
            "wanted: set external.advertised"
        )
    return host, port


def _checked_versions(command: cluster_pb2.RegisterBrokerCommand, in_force: int) -> tuple[int, int]:
    """The feature levels that the broker supports.

    One that states none is taken to support the one in force, and to be no hindrance but for those
    above it.
    """
    oldest = max(command.min_metadata_version, 1)
    newest = command.supported_metadata_version or max(in_force, oldest)
    if in_force >= 2 and not oldest <= in_force <= newest:
        raise UnsupportedMetadataVersionError(
            f"broker {command.node_id} supports metadata.version {oldest} to {newest}, and the "
            f"cluster works at {in_force}: install a Penstock that supports it there"
        )
    return oldest, max(newest, 1)


def unregister(
    draft: Draft, command: cluster_pb2.UnregisterBrokerCommand, _: cluster_pb2.CommandResult
) -> None:
    """Forget a fenced broker, which must have no replicas any more (since metadata.version 2).

    Before that, where it was an eligible leader it is none any more.
    """
    broker = draft.broker(command.node_id)
    if broker is None:
        raise BrokerIdNotRegisteredError(f"broker {command.node_id} is not registered")
    if not broker.fenced:
        raise InvalidRequestError(
            f"broker {command.node_id} is alive; next: stop it, then unregister it"
        )
    held = draft.tables.replicas[command.node_id]
    if held and draft.metadata_version >= 2:
        raise InvalidRequestError(
            f"broker {command.node_id} has {counted(held, 'replica')} still "
            f"({_some_held(draft, command.node_id, held)}); next: move them to other brokers with "
            f"`penstock partitions reassign --from-broker {command.node_id}`"
        )
    draft.remove_broker(command.node_id)
    _withdraw(draft, command.node_id, unclean=True)


def _some_held(draft: Draft, node_id: int, held: int) -> str:
    """The first of the partitions that the node has a replica of, and how many more there are."""
    tables = draft.tables
    holding = (
        f"{tables.topics[topic_id].name}-{number}"
        for (topic_id, number), partition in tables.all_partitions()
        if node_id in partition.replicas
    )
    return some(list(islice(holding, SHOWN)), held)


def fence(
    draft: Draft, command: cluster_pb2.FenceBrokerCommand, _: cluster_pb2.CommandResult
) -> None:
    """Take all leadership and in-sync membership from a broker."""
    broker = require_registration(draft, command.node_id, command.broker_epoch)
    if broker.fenced:
        return
    draft.put_broker(broker._replace(fenced=True))
    _withdraw(draft, broker.node_id, unclean=False)


def unfence(
    draft: Draft, command: cluster_pb2.UnfenceBrokerCommand, _: cluster_pb2.CommandResult
) -> None:
    """Let a broker lead, and give it what has no leader and may be led by it."""
    broker = require_registration(draft, command.node_id, command.broker_epoch)
    if broker.in_controlled_shutdown:
        raise InvalidRequestError(
            f"broker {broker.node_id} shuts down; it must register anew to lead again"
        )
    if not broker.fenced:
        return
    draft.put_broker(broker._replace(fenced=False, whole_since_epoch=0))
    for key, partition in draft.tables.all_partitions():
        if partition.leader < 0 and broker.node_id in partition.replicas:
            rules = draft.rules_of(key, partition.replication_factor)
            revised = election.revise(partition, rules, isr=partition.isr)
            if revised is not partition:
                draft.put_partition(key, revised)


def controlled_shutdown(
    draft: Draft,
    command: cluster_pb2.ControlledShutdownCommand,
    result: cluster_pb2.CommandResult,
) -> None:
    """Move leaderships and in-sync memberships away from a broker that is about to stop.

    A partition that no other in-sync replica can lead stays with it until it is gone.
    """
    broker = require_registration(draft, command.node_id, command.broker_epoch)
    remaining = draft.tables.leaders[broker.node_id]
    if not broker.in_controlled_shutdown:
        draft.put_broker(broker._replace(in_controlled_shutdown=True))
        remaining = _withdraw(draft, broker.node_id, unclean=False)
    result.controlled_shutdown.remaining_leaderships = remaining


def _withdraw(draft: Draft, node_id: int, *, unclean: bool, anew: bool = False) -> int:
    """Take the node out of in-sync sets and leaderships, and if unclean out of eligibility.

    Says how many partitions it still leads.
    """
    withdrawal = election.Withdrawal(node_id, unclean=unclean, share=draft.tables.share, anew=anew)
    still_led = 0
    for key, partition in draft.tables.all_partitions():
        if not withdrawal.concerns(partition):
            continue
        rules = draft.rules_of(key, partition.replication_factor)
        revised = withdrawal.revise(partition, rules)
        if revised is not partition:
            draft.put_partition(key, revised)
        still_led += revised.leader == node_id
    return still_led


def allocate_producer_ids(
    draft: Draft,
    command: cluster_pb2.AllocateProducerIdsCommand,
    result: cluster_pb2.CommandResult,
) -> None:
    """Hand out the next block of producer ids; no id is ever handed out twice."""
    require_registration(draft, command.node_id, command.broker_epoch)
    result.allocate_producer_ids.first_producer_id = draft.next_producer_id
    result.allocate_producer_ids.count = PRODUCER_ID_BLOCK
    draft.next_producer_id += PRODUCER_ID_BLOCK
