"""What administration answers with. Plain frozen values; ``dataclasses.asdict`` makes JSON."""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock.client.model import OffsetAndMetadata
from penstock.wire.ids import TopicPartition


@dataclass(frozen=True, slots=True)
class BrokerDescription:
    """A registered broker. A fenced one leads nothing.

    Its software works at feature levels from ``min_metadata_version`` to ``max_metadata_version``.
    ``offline_replicas`` counts those that it can't serve though it lives. ``drained_since_ms`` is
    since when it is drained (milliseconds since 1970), or 0; ``leaderships`` how many partitions it
    leads, -1 where that is not told. ``host`` and ``port`` are for who asked; ``external_host`` is
    empty, and ``external_port`` 0, where it has no address of their own for clients from outside.
    """

    node_id: int
    host: str
    port: int
    rack: str
    fenced: bool
    in_controlled_shutdown: bool
    broker_epoch: int
    min_metadata_version: int = 1
    max_metadata_version: int = 1
    offline_replicas: int = 0
    drained_since_ms: int = 0
    leaderships: int = -1
    external_host: str = ""
    external_port: int = 0

    @property
    def is_usable(self) -> bool:
        """Whether it may be given replicas and leaderships."""
        return not self.fenced and not self.in_controlled_shutdown


@dataclass(frozen=True, slots=True)
class ClusterDescription:
    """The cluster as the broker ``answered_by`` saw it at ``metadata_index``.

    ``controller_id`` is -1 while no controller is active; ``metadata_version`` is the feature level
    that the cluster works at.
    """

    cluster_id: str
    controller_id: int
    controller_epoch: int
    metadata_index: int
    brokers: tuple[BrokerDescription, ...]
    answered_by: int
    metadata_version: int = 1


@dataclass(frozen=True, slots=True)
class OutOfSyncReplica:
    """A replica that is not in sync.

    ``reason`` is slow (it acknowledges, and never has all), stuck (it acknowledges nothing new),
    bootstrapping (it copies what it lacks), offline (its broker is down or stopping, or its disk
    failed), damaged (its log is, and is to be mended) or unknown: the leader could not be asked.
    """

    node_id: int
    reason: str


@dataclass(frozen=True, slots=True)
class PartitionDescription:
    """A partition: ``leader`` is -1 while there is none; the first replica is preferred.

    ``offline`` are replicas that their live brokers can't serve: a disk failed, a log is damaged.
    ``out_of_sync`` has every replica that is not in ``isr``; it is None where that was not asked.
    ``min_insync_replicas`` is what is in force for it, 0 where older software does not tell.
    """

    partition: int
    leader: int
    leader_epoch: int
    replicas: tuple[int, ...]
    isr: tuple[int, ...]
    elr: tuple[int, ...]
    partition_epoch: int
    offline: tuple[int, ...] = ()
    out_of_sync: tuple[OutOfSyncReplica, ...] | None = None
    min_insync_replicas: int = 0


@dataclass(frozen=True, slots=True)
class TopicDescription:
    """A topic. ``configs`` holds what is set on it, not the defaults; ``topic_id`` is a UUID."""

    name: str
    topic_id: str
    internal: bool
    configs: dict[str, str]
    partitions: tuple[PartitionDescription, ...]

    @property
    def partition_count(self) -> int:
        """How many partitions it has."""
        return len(self.partitions)

    @property
    def replication_factor(self) -> int:
        """How many replicas its partitions have (the largest number, if they differ)."""
        return max((len(entry.replicas) for entry in self.partitions), default=0)


@dataclass(frozen=True, slots=True)
class CreatedTopic:
    """What ``create_topic`` did. ``created`` is False when the topic was there already."""

    name: str
    topic_id: str
    created: bool
    replicas: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class ConfigEntry:
    """A config: its value in force and who says so.

    ``source`` is topic, cluster, node file, environment, command line or default. A ``dynamic`` one
    can be changed without a restart.
    """

    key: str
    value: str
    source: str
    documentation: str
    dynamic: bool = True


@dataclass(frozen=True, slots=True)
class DirectoryDescription:
    """A directory of a node; -1 stands for what could not be found out in time.

    ``fsync_us`` is how long a small fsync took just now, in microseconds; ``failure`` why the
    directory is not used any more, or empty.
    """

    path: str
    total_bytes: int
    free_bytes: int
    failure: str
    fsync_us: int


@dataclass(frozen=True, slots=True)
class NodeDescription:
    """What a node says of itself; -1 stands for what its system does not tell.

    ``clock_ms`` is its clock when it answered and ``started_ms`` when it started, in milliseconds
    since 1970. ``http_address`` is ``metrics.listen``, or empty.
    """

    node_id: int
    version: str
    min_metadata_version: int
    max_metadata_version: int
    codec_compiled: bool
    roles: tuple[str, ...]
    clock_ms: int
    started_ms: int
    directories: tuple[DirectoryDescription, ...]
    open_descriptors: int
    max_descriptors: int
    resident_bytes: int
    http_address: str


@dataclass(frozen=True, slots=True)
class ReplicaProgress:
    """A replica of a partition that moves.

    ``log_end_offset`` and ``lag`` (offsets that it lacks of the leader's log) are -1 while the
    leader does not know them.
    """

    node_id: int
    in_sync: bool
    log_end_offset: int
    lag: int


@dataclass(frozen=True, slots=True)
class PartitionReassignment:
    """A partition on its way to the replicas ``target``, the preferred leader first.

    It is there when every one of ``adding`` is in sync, and then ``removing`` leave.
    """

    partition: TopicPartition
    target: tuple[int, ...]
    adding: tuple[int, ...]
    removing: tuple[int, ...]
    leader: int
    replicas: tuple[ReplicaProgress, ...]


@dataclass(frozen=True, slots=True)
class GroupListing:
    """A group in brief. ``state`` is empty, assigning, reconciling or stable."""

    group_id: str
    state: str
    member_count: int
    coordinator: int


@dataclass(frozen=True, slots=True)
class MemberDescription:
    """A member: what it may hold now (``assigned``) and what it shall hold (``target``).

    ``state`` is "stable", "revoking" (it has yet to give partitions back), "waiting" (others have
    yet to give back what it shall hold), "standby" (nothing is left for it, and it takes over when
    another leaves) or "away" (a static member that left for a while); empty where the coordinator
    is of a version that does not say.
    """

    member_id: str
    group_instance_id: str
    client_id: str
    client_host: str
    member_epoch: int
    assigned: tuple[TopicPartition, ...]
    target: tuple[TopicPartition, ...]
    topics: tuple[str, ...]
    topic_pattern: str
    state: str = ""
    rack_id: str = ""


@dataclass(frozen=True, slots=True)
class GroupDescription:
    """A group whole. ``offsets`` has the partitions with a committed position and no others."""

    group_id: str
    state: str
    group_epoch: int
    assignment_epoch: int
    assignor: str
    coordinator: int
    members: tuple[MemberDescription, ...]
    offsets: dict[TopicPartition, OffsetAndMetadata] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class QuorumVoter:
    """A controller that votes.

    ``match_index`` is the log end that the leader knows of it, or -1; ``silent_ms`` how long ago it
    last answered the leader (or since when that one leads, if it never did), or -1 of the leader
    itself and without one; one ``is_unreachable`` that is silent for an election timeout.
    ``directory_id`` is that of the metadata directory that keeps its votes, in hexadecimal digits.
    A voter ``is_wiped`` that answers the leader out of another directory: it does not count until
    it is removed and added.
    """

    node_id: int
    host: str
    port: int
    match_index: int
    directory_id: str = ""
    is_wiped: bool = False
    silent_ms: int = -1
    is_unreachable: bool = False


@dataclass(frozen=True, slots=True)
class QuorumDescription:
    """The controllers as the one that answered sees them; ``leader_id`` is -1 without one.

    ``confirmed``: the one that answered leads, and a majority said so after the question
    (ReadIndex); else it may be cut off from the others, who may have decided more. ``role``
    (follower, candidate or leader; empty if not told) and ``last_index`` (-1 if not told) are those
    of whoever answered. ``catching_up`` is on its way to become a voter; no other change of the
    voters is taken meanwhile.
    """

    leader_id: int
    term: int
    commit_index: int
    applied_index: int
    voters: tuple[QuorumVoter, ...]
    answered_by: int
    voters_index: int = 0
    """The index of the log entry that holds the voters; 0 while it is in no log."""
    confirmed: bool = False
    role: str = ""
    last_index: int = -1
    catching_up: QuorumVoter | None = None
    metadata_index: int = 0
    """The last change of the metadata that brokers are told of; 0 of what is not ``confirmed``."""

    @property
    def tolerated_losses(self) -> int:
        """How many of the voters may be down while the others go on deciding."""
        return max(0, len(self.voters) - 1) // 2


@dataclass(frozen=True, slots=True)
class TransactionListing:
    """A transactional id in brief.

    ``state`` is empty, ongoing, prepare_commit, prepare_abort or kept: the partitions of the
    transaction before are the next one's too, which its producer may have begun or not.
    ``since_ms`` is since when it is in that state, in milliseconds since 1970; of what is empty it
    may be when its last transaction was decided.
    """

    transactional_id: str
    producer_id: int
    state: str
    coordinator: int
    since_ms: int


@dataclass(frozen=True, slots=True)
class TransactionDescription:
    """A transactional id whole.

    ``start_ms`` is when its open transaction began, in milliseconds since 1970, or -1; of what is
    kept, since when it is. Once a transaction is decided (prepare_commit, prepare_abort),
    ``producer_epoch`` is the next one's already, and ``partitions`` are those whose mark is not
    there yet, and those that are kept.

    ``last_ended_by`` says who decided about the last transaction that has ended since the present
    producer was given the id: producer, timeout_or_person, other_producer, group (a group's commit
    that decided about an attempt), or nobody where none has; ``last_committed`` how.
    """

    transactional_id: str
    state: str
    producer_id: int
    producer_epoch: int
    transaction_timeout_ms: int
    start_ms: int
    partitions: tuple[TopicPartition, ...]
    last_committed: bool
    last_ended_by: str


@dataclass(frozen=True, slots=True)
class ProducerState:
    """What a partition's log knows of a producer; -1 stands for what it does not know.

    ``transaction_start_offset`` is where its open transaction begins, -1 where none is open.
    """

    producer_id: int
    producer_epoch: int
    last_sequence: int
    last_timestamp_ms: int
    transaction_start_offset: int

    @property
    def is_open(self) -> bool:
        """Whether a transaction of it is open in the log."""
        return self.transaction_start_offset >= 0


@dataclass(frozen=True, slots=True)
class PartitionProducers:
    """The producers of a partition's log, by id, and where its committed records end."""

    last_stable_offset: int
    producers: tuple[ProducerState, ...]


@dataclass(frozen=True, slots=True)
class HangingTransaction:
    """A transaction that is open in a log, and that no coordinator knows of.

    ``last_timestamp_ms`` is the time of its last batch.
    """

    partition: TopicPartition
    producer_id: int
    producer_epoch: int
    start_offset: int
    last_timestamp_ms: int


@dataclass(frozen=True, slots=True)
class HangingSearch:
    """What was found out of transactions that are open in logs.

    ``hanging``: no coordinator knows of them, and nobody will end them. ``in_doubt``: of which that
    can't be told, with the reason: a coordinator that might know of them did not answer. Those are
    not to be aborted by hand. ``not_searched``: partitions whose leader did not say what is open in
    them, with the reason.
    """

    hanging: tuple[HangingTransaction, ...] = ()
    in_doubt: tuple[tuple[HangingTransaction, str], ...] = ()
    not_searched: tuple[tuple[TopicPartition, str], ...] = ()
