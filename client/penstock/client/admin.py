"""Administration, synchronously."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, ParamSpec, Self, TypeVar, Unpack

from penstock.client.aio_admin import AsyncAdminClient, OffsetSpec
from penstock.client.aio_cluster_admin import ConfigValue
from penstock.client.background import ForkGuard, LoopThread
from penstock.client.config import AdminSettings
from penstock.client.descriptions import (
    ClusterDescription,
    ConfigEntry,
    CreatedTopic,
    GroupDescription,
    GroupListing,
    HangingSearch,
    NodeDescription,
    PartitionProducers,
    PartitionReassignment,
    QuorumDescription,
    TopicDescription,
    TransactionDescription,
    TransactionListing,
)
from penstock.client.model import OffsetAndMetadata, OffsetAndTimestamp
from penstock.wire.ids import TopicPartition

T = TypeVar("T")
P = ParamSpec("P")


class AdminClient:
    """Manages topics and groups. Thread-safe.

    Every method retries what is retriable for ``default_api_timeout_ms`` and then raises the last
    reason. A change without a majority of the controllers is not waited for so long: some seconds
    later it raises NotEnoughVotersError, and nothing was done; ClusterNotFoundedError where their
    first start is not over. Errors are the typed ones of ``penstock.client.errors``; an argument
    of a wrong type or value raises InvalidRequestError, which names it, before anything is asked.
    """

    def __init__(
        self,
        bootstrap_servers: str | Iterable[str] = "localhost:9092",
        **settings: Unpack[AdminSettings],
    ) -> None:
        self._client = AsyncAdminClient(bootstrap_servers, **settings)
        self.config = self._client.config
        self._guard = ForkGuard("AdminClient")
        self._thread = LoopThread.shared()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Free the connections. Idempotent."""
        if not self._guard.foreign:
            self._thread.run(self._client.close)

    def create_topic(
        self,
        name: str,
        partitions: int = 1,
        replication_factor: int = 3,
        configs: Mapping[str, ConfigValue] | None = None,
        *,
        if_not_exists: bool = False,
        replica_assignments: Sequence[Sequence[int]] = (),
        validate_only: bool = False,
    ) -> CreatedTopic:
        """Make a topic and wait until every live broker that was asked knows its leaders.

        With ``if_not_exists`` a topic of this name is left as it is (``created`` is False);
        otherwise it raises TopicAlreadyExistsError. ``replica_assignments`` lists node ids by
        partition instead of counts. Values of ``configs`` may be numbers and booleans as well as
        text. Raises InvalidTopicError, InvalidPartitionsError,
        InvalidReplicationFactorError, InvalidConfigError.
        """
        return self._run(
            self._client.create_topic,
            name,
            partitions,
            replication_factor,
            configs,
            if_not_exists=if_not_exists,
            replica_assignments=replica_assignments,
            validate_only=validate_only,
        )

    def delete_topic(self, name: str, *, topic_id: str | None = None) -> None:
        """Delete a topic with its records. Raises UnknownTopicOrPartitionError.

        The topic that has the name now, by its id: one that is made under the name meanwhile is
        left alone, even where the request has to be repeated. With ``topic_id``, as
        ``create_topic`` and ``describe_topics`` tell it, only the topic of that id.
        """
        self._run(self._client.delete_topic, name, topic_id=topic_id)

    def list_topics(
        self, *, include_internal: bool = False, since_index: int = 0
    ) -> list[TopicDescription]:
        """Every topic, by name; ``since_index`` is as for ``describe_cluster``."""
        return self._run(
            self._client.list_topics, include_internal=include_internal, since_index=since_index
        )

    def describe_topics(
        self, names: Iterable[str], *, out_of_sync: bool = False
    ) -> list[TopicDescription]:
        """The topics named, in that order. Raises UnknownTopicOrPartitionError for the first
        that does not exist.

        With ``out_of_sync`` the partitions say why replicas are not in sync. Leaders alone know, so
        that those of partitions with such replicas are asked as well, for a second at most.
        """
        return self._run(self._client.describe_topics, names, out_of_sync=out_of_sync)

    def create_partitions(
        self,
        topic: str,
        total_count: int,
        *,
        replica_assignments: Sequence[Sequence[int]] = (),
        validate_only: bool = False,
    ) -> None:
        """Raise the partition count to ``total_count``. Keys then map to other partitions.

        Raises InvalidPartitionsError when it is not more than the topic has.
        """
        self._run(
            self._client.create_partitions,
            topic,
            total_count,
            replica_assignments=replica_assignments,
            validate_only=validate_only,
        )

    def describe_configs(self, topic: str) -> list[ConfigEntry]:
        """Every config of a topic with its value in force, by key."""
        return self._run(self._client.describe_configs, topic)

    def alter_configs(
        self,
        topic: str,
        set_configs: Mapping[str, ConfigValue] | None = None,
        remove: Iterable[str] = (),
        *,
        validate_only: bool = False,
    ) -> None:
        """Set some configs of a topic and reset others to the default, together or not at all.

        Raises InvalidConfigError, which suggests the near key.
        """
        self._run(
            self._client.alter_configs, topic, set_configs, remove, validate_only=validate_only
        )

    def elect_leaders(
        self, partitions: Iterable[TopicPartition] = (), *, unclean: bool = False
    ) -> dict[TopicPartition, int]:
        """Give partitions (none: all) their preferred leader; the leaders elected.

        ``unclean`` lets a replica that may lack acknowledged records lead where no in-sync one
        lives. Partitions that needed no election are left out.
        """
        return self._run(self._client.elect_leaders, partitions, unclean=unclean)

    def alter_partition_reassignments(
        self,
        reassignments: Mapping[TopicPartition, Sequence[int] | None],
        *,
        validate_only: bool = False,
    ) -> None:
        """Begin to move partitions to other replicas (node ids, the preferred leader first).

        Returns when the controllers have taken it down; ``list_partition_reassignments`` shows how
        far it is. The old replicas stay until the new ones are in sync, so that nothing is lost if
        a broker dies meanwhile. None cancels a move and restores the replicas from before. The
        same again changes nothing. Raises InvalidReplicaAssignmentError,
        NoReassignmentInProgressError or UnknownTopicOrPartitionError for the first partition that
        was refused; the others move.
        """
        self._run(
            self._client.alter_partition_reassignments, reassignments, validate_only=validate_only
        )

    def list_partition_reassignments(
        self, partitions: Iterable[TopicPartition] = ()
    ) -> list[PartitionReassignment]:
        """Of these partitions (none: all) those that move, with how far each replica is."""
        return self._run(self._client.list_partition_reassignments, partitions)

    def describe_cluster(self, *, since_index: int = 0) -> ClusterDescription:
        """Brokers and the active controller.

        Whichever broker answers may lag a moment behind what was decided. With ``since_index``, as
        ``QuorumDescription.metadata_index`` has it, only one that knows of the metadata up to there
        is believed: others are asked again, for ``default_api_timeout_ms`` at most, and then
        NetworkError is raised.
        """
        return self._run(self._client.describe_cluster, since_index=since_index)

    def describe_quorum(self) -> QuorumDescription:
        """How the controllers stand."""
        return self._run(self._client.describe_quorum)

    def add_voter(self, node_id: int, address: str) -> QuorumDescription:
        """Make a running controller a voter, reached at ``host:port``; the quorum after it.

        It gets the whole log first, which may take as long as ``default_api_timeout_ms``. Safe to
        repeat. Raises VoterNotCaughtUpError, VoterChangeInProgressError, NotEnoughVotersError, or
        DuplicateVoterError for a voter that lost its directory: remove it first.
        """
        return self._run(self._client.add_voter, node_id, address)

    def remove_voter(self, node_id: int) -> QuorumDescription:
        """Make a controller no voter; the quorum after it. The active one hands over first.

        Raises UnknownVoterError, LastVoterError, VoterChangeInProgressError, or
        NotEnoughVotersError when too few of the others are alive.
        """
        return self._run(self._client.remove_voter, node_id)

    def describe_node_configs(self, node_id: int | None = None) -> list[ConfigEntry]:
        """Every setting of a node (None: of some broker) with its value in force and its source.

        Those that the whole cluster shares, as ``alter_cluster_configs`` set them, go before what
        the node's own file says. Raises BrokerIdNotRegisteredError for a node that is no broker.
        """
        return self._run(self._client.describe_node_configs, node_id)

    def alter_cluster_configs(
        self,
        set_configs: Mapping[str, ConfigValue] | None = None,
        remove: Iterable[str] = (),
        *,
        validate_only: bool = False,
    ) -> None:
        """Set and reset settings of all nodes, together or not at all, without a restart.

        Raises InvalidConfigError, which suggests the near key.
        """
        self._run(
            self._client.alter_cluster_configs, set_configs, remove, validate_only=validate_only
        )

    def unregister_broker(self, node_id: int) -> None:
        """Forget a broker that is gone for good. Raises InvalidRequestError while it is alive or
        has replicas (``alter_partition_reassignments`` moves them), BrokerIdNotRegisteredError.
        """
        self._run(self._client.unregister_broker, node_id)

    def raise_metadata_version(self, version: int | None = None) -> int:
        """Raise the feature level to ``version`` (None: the newest that all nodes support).

        There is no way back. Returns the level in force. Raises UnsupportedMetadataVersionError
        while a controller or a registered broker does not support it.
        """
        return self._run(self._client.raise_metadata_version, version)

    def drain_broker(self, node_id: int, *, undo: bool = False) -> int:
        """Hand a live broker's leaderships to others in sync, and keep it from being chosen while
        another in sync lives, until it is started anew or ``undo``; how many it leads then.

        What nobody else in sync can lead stays, and goes to the first that comes in sync. Raises
        BrokerIdNotRegisteredError, InvalidRequestError for one that is fenced or stops, and
        UnsupportedMetadataVersionError where ``raise_metadata_version`` has to come first.
        """
        return self._run(self._client.drain_broker, node_id, undo=undo)

    def describe_node(self, node_id: int | None = None) -> NodeDescription:
        """What a node (None: some broker) says of itself: software, clock, disks, process.

        A broker is asked at its advertised address, a controller without a broker through one of
        these; it measures its disks anew. Raises NetworkError where it does not answer,
        UnsupportedVersionError for a controller of software that does not tell, and
        BrokerIdNotRegisteredError for a node that is neither.
        """
        return self._run(self._client.describe_node, node_id)

    def read_metrics(self, node_id: int | None = None) -> str:
        """The metrics of a node (None: of some broker), in the text format of Prometheus.

        They need no ``metrics.listen``. Raises as ``describe_node``.
        """
        return self._run(self._client.read_metrics, node_id)

    def list_groups(self) -> list[GroupListing]:
        """Every consumer group, by id."""
        return self._run(self._client.list_groups)

    def describe_groups(self, group_ids: Iterable[str]) -> list[GroupDescription]:
        """The groups named, in that order. Raises GroupIdNotFoundError for the first that does
        not exist.
        """
        return self._run(self._client.describe_groups, group_ids)

    def delete_groups(self, group_ids: Iterable[str]) -> None:
        """Delete empty groups with their offsets.

        Raises NonEmptyGroupError or GroupIdNotFoundError for the first that cannot be deleted;
        the others are deleted.
        """
        self._run(self._client.delete_groups, group_ids)

    def list_group_offsets(
        self, group_id: str, partitions: Iterable[TopicPartition] = ()
    ) -> dict[TopicPartition, OffsetAndMetadata]:
        """The committed offsets of a group; none named means all that it has."""
        return self._run(self._client.list_group_offsets, group_id, partitions)

    def alter_group_offsets(
        self,
        group_id: str,
        offsets: Mapping[TopicPartition, int | OffsetAndMetadata],
        *,
        only_forward: bool = False,
    ) -> None:
        """Set committed offsets of a group without members. With ``only_forward`` those stay as
        they are that are further on already, unless of a topic that is no more. Raises
        UnknownMemberIdError (or NonEmptyGroupError) while it has some.
        """
        self._run(self._client.alter_group_offsets, group_id, offsets, only_forward=only_forward)

    def delete_group_offsets(self, group_id: str, partitions: Iterable[TopicPartition]) -> None:
        """Forget the committed offsets of partitions whose topic no member of the group reads.

        Raises GroupSubscribedToTopicError, UnknownTopicOrPartitionError or GroupIdNotFoundError
        for the first that cannot be forgotten; the others are.
        """
        self._run(self._client.delete_group_offsets, group_id, partitions)

    def list_transactions(
        self, states: Iterable[str] = (), *, min_duration_ms: int = 0
    ) -> list[TransactionListing]:
        """Every transactional id, by id, attempts of engines among them.

        Only those in ``states`` (empty, ongoing, prepare_commit, prepare_abort, kept), and only
        transactions that have gone on for so long, if either is given; of what was kept just now
        nobody knows whether it goes on. Brokers are asked for a page at a time, and each id is told
        as it was then; one whose coordinator moves meanwhile may be missing. Raises NetworkError
        when a living broker does not answer, for its ids would be missing.
        """
        return self._run(self._client.list_transactions, states, min_duration_ms=min_duration_ms)

    def describe_transactions(
        self, transactional_ids: Iterable[str]
    ) -> list[TransactionDescription]:
        """The ids named, in that order. Raises TransactionalIdNotFoundError for the first that no
        coordinator knows.
        """
        return self._run(self._client.describe_transactions, transactional_ids)

    def abort_transaction(self, transactional_id: str) -> None:
        """Abort the open transaction of an id, whatever its producer does; that hears of it as of a
        timeout, and may begin another one.

        Returns when that is decided. Raises TransactionalIdNotFoundError, InvalidTxnStateError when
        none is open, or it is decided already.
        """
        self._run(self._client.abort_transaction, transactional_id)

    def describe_producers(
        self, partitions: Iterable[TopicPartition]
    ) -> dict[TopicPartition, PartitionProducers]:
        """What the leaders' logs of these partitions know of producers, and which of them have a
        transaction open. Raises UnknownTopicOrPartitionError.
        """
        return self._run(self._client.describe_producers, partitions)

    def find_hanging(
        self, partitions: Iterable[TopicPartition], *, older_than_ms: int
    ) -> HangingSearch:
        """Transactions that are open in the logs of these partitions, whose last batch is so old,
        and that no coordinator knows as open there (KIP-664).

        There are none unless data were lost. Leaders have every coordinator asked, and say that a
        transaction hangs when they have looked at it for a few of ``broker.session.timeout.ms``;
        with one in sight, this waits for that, for ``default_api_timeout_ms`` at most, and half a
        minute for who does not answer. What can't be told by then is ``in_doubt``, and partitions
        whose leader did not answer at all are ``not_searched``.
        """
        return self._run(self._client.find_hanging, partitions, older_than_ms=older_than_ms)

    def abort_hanging(
        self,
        partition: TopicPartition,
        producer_id: int,
        start_offset: int | None = None,
        *,
        force: bool = False,
    ) -> int:
        """End a transaction in one partition's log without its coordinator; where it begins.

        With ``start_offset`` no other one of the producer is touched. Raises InvalidTxnStateError
        when none is open there, or a coordinator will end it, and CoordinatorNotAvailableError when
        that can't be told. ``force`` asks no coordinator: of a transaction that one commits later
        this partition then has nothing, which brokers log as an error, and nobody else is told.
        """
        return self._run(
            self._client.abort_hanging, partition, producer_id, start_offset, force=force
        )

    def list_offsets(
        self, partitions: Mapping[TopicPartition, OffsetSpec]
    ) -> dict[TopicPartition, OffsetAndTimestamp]:
        """Offsets by "earliest", "latest", "max_timestamp" or a time in milliseconds."""
        return self._run(self._client.list_offsets, partitions)

    def delete_records(
        self, before_offsets: Mapping[TopicPartition, int]
    ) -> dict[TopicPartition, int]:
        """Delete the records before each offset (-1: all); the new log start offsets."""
        return self._run(self._client.delete_records, before_offsets)

    def _run(
        self, work: Callable[P, Coroutine[Any, Any, T]], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        self._guard.check()
        return self._thread.run(work, *args, **kwargs)
