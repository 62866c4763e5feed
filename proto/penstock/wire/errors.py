"""The one error table of Penstock: every typed refusal, its exception and what a client does.

The codes, and which ranges of them mean what, are in ``penstock.wire.error_codes``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, Self

from penstock.v1 import common_pb2
from penstock.wire.error_codes import ErrorCode as ErrorCode  # noqa: PLC0414 - imported from here.
from penstock.wire.stalls import StallReason


@dataclass(frozen=True, slots=True)
class LeaderHint:
    """Where the authority asked for is now: a leader or a coordinator, with its address."""

    node_id: int
    leader_epoch: int
    host: str
    port: int


class PenstockError(Exception):
    """The base of every error that Penstock raises on purpose.

    The message says what went wrong, where, and what to do next. ``retriable`` promises that
    the same request may succeed later with no harm done; ``refresh_metadata`` that the caller's
    picture of the cluster is out of date. ``leader`` is set when the answerer knew who to ask.
    """

    code: ClassVar[ErrorCode]
    retriable: ClassVar[bool] = False
    refresh_metadata: ClassVar[bool] = False

    reason: StallReason | None = None  # What a consumer's trouble is; None elsewhere.

    def __init_subclass__(
        cls, *, code: ErrorCode, retriable: bool = False, refresh_metadata: bool = False
    ) -> None:
        super().__init_subclass__()
        cls.code = code
        cls.retriable = retriable
        cls.refresh_metadata = refresh_metadata

    def __init__(self, message: str = "", *, leader: LeaderHint | None = None) -> None:
        super().__init__(message or self.__doc__ or self.code.name)
        self.leader = leader

    @property
    def message(self) -> str:
        """The text for a person, without the class name."""
        return str(self.args[0])

    def to_proto(self) -> common_pb2.Error:
        """The error as it crosses the wire."""
        proto = common_pb2.Error(code=int(self.code), message=self.message)
        if self.leader is not None:
            proto.current_leader.node_id = self.leader.node_id
            proto.current_leader.leader_epoch = self.leader.leader_epoch
            proto.current_leader.host = self.leader.host
            proto.current_leader.port = self.leader.port
        return proto


class UnknownServerError(PenstockError, code=ErrorCode.UNKNOWN_SERVER_ERROR, retriable=True):
    """The server failed in a way that it did not expect."""


class OffsetOutOfRangeError(PenstockError, code=ErrorCode.OFFSET_OUT_OF_RANGE):
    """The offset is outside of the partition's log."""


class CorruptRecordError(PenstockError, code=ErrorCode.CORRUPT_MESSAGE, retriable=True):
    """A record batch fails its checksum or is malformed."""


class UnknownTopicOrPartitionError(
    PenstockError, code=ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, retriable=True, refresh_metadata=True
):
    """The topic or partition does not exist."""


class LeaderNotAvailableError(
    PenstockError, code=ErrorCode.LEADER_NOT_AVAILABLE, retriable=True, refresh_metadata=True
):
    """The partition has no leader now."""


class NotLeaderError(
    PenstockError, code=ErrorCode.NOT_LEADER, retriable=True, refresh_metadata=True
):
    """This broker does not lead the partition."""


class RequestTimedOutError(PenstockError, code=ErrorCode.REQUEST_TIMED_OUT, retriable=True):
    """The request was not completed in its time."""


class RecordTooLargeError(PenstockError, code=ErrorCode.MESSAGE_TOO_LARGE):
    """A record batch is larger than the topic allows."""


class OffsetMetadataTooLargeError(PenstockError, code=ErrorCode.OFFSET_METADATA_TOO_LARGE):
    """The metadata of an offset commit is too large."""


class NetworkError(
    PenstockError, code=ErrorCode.NETWORK_EXCEPTION, retriable=True, refresh_metadata=True
):
    """The connection broke before an answer came."""


class CoordinatorLoadInProgressError(
    PenstockError, code=ErrorCode.COORDINATOR_LOAD_IN_PROGRESS, retriable=True
):
    """The coordinator is still reading its log."""


class CoordinatorNotAvailableError(
    PenstockError, code=ErrorCode.COORDINATOR_NOT_AVAILABLE, retriable=True, refresh_metadata=True
):
    """The coordinator is not available now."""


class NotCoordinatorError(
    PenstockError, code=ErrorCode.NOT_COORDINATOR, retriable=True, refresh_metadata=True
):
    """This broker does not coordinate the group."""


class InvalidTopicError(PenstockError, code=ErrorCode.INVALID_TOPIC):
    """The topic's name is not allowed."""


class NotEnoughReplicasError(PenstockError, code=ErrorCode.NOT_ENOUGH_REPLICAS, retriable=True):
    """Fewer replicas are in sync than min.insync.replicas."""


class NotEnoughReplicasAfterAppendError(
    PenstockError, code=ErrorCode.NOT_ENOUGH_REPLICAS_AFTER_APPEND, retriable=True
):
    """The batch is in the leader's log, but too few replicas are in sync."""


class InvalidRequiredAcksError(PenstockError, code=ErrorCode.INVALID_REQUIRED_ACKS):
    """Acks must be 0, 1 or all."""


class InvalidGroupIdError(PenstockError, code=ErrorCode.INVALID_GROUP_ID):
    """The group id is not allowed."""


class UnknownMemberIdError(PenstockError, code=ErrorCode.UNKNOWN_MEMBER_ID):
    """The coordinator does not know the member."""


class UnsupportedVersionError(PenstockError, code=ErrorCode.UNSUPPORTED_VERSION):
    """This version does not answer the request."""


class TopicAlreadyExistsError(PenstockError, code=ErrorCode.TOPIC_ALREADY_EXISTS):
    """A topic of this name exists."""


class InvalidPartitionsError(PenstockError, code=ErrorCode.INVALID_PARTITIONS):
    """The number of partitions is not allowed."""


class InvalidReplicationFactorError(PenstockError, code=ErrorCode.INVALID_REPLICATION_FACTOR):
    """The replication factor is not allowed."""


class InvalidReplicaAssignmentError(PenstockError, code=ErrorCode.INVALID_REPLICA_ASSIGNMENT):
    """The replica assignment is not allowed."""


class InvalidConfigError(PenstockError, code=ErrorCode.INVALID_CONFIG):
    """A config key or value is not allowed."""


class NotControllerError(PenstockError, code=ErrorCode.NOT_CONTROLLER, retriable=True):
    """This node is not the active controller."""


class InvalidRequestError(PenstockError, code=ErrorCode.INVALID_REQUEST):
    """The request is malformed."""


class OutOfOrderSequenceError(PenstockError, code=ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER):
    """A producer's batch does not follow its last one."""


class DuplicateSequenceError(PenstockError, code=ErrorCode.DUPLICATE_SEQUENCE_NUMBER):
    """The batch is older than the last five of its producer."""


class InvalidProducerEpochError(PenstockError, code=ErrorCode.INVALID_PRODUCER_EPOCH):
    """A newer epoch of the producer id exists."""


class InvalidTxnStateError(PenstockError, code=ErrorCode.INVALID_TXN_STATE):
    """The transaction is not in a state that allows it."""


class InvalidProducerIdMappingError(PenstockError, code=ErrorCode.INVALID_PRODUCER_ID_MAPPING):
    """The transactional id has another producer id now, or none: it was not used for long."""


class InvalidTransactionTimeoutError(PenstockError, code=ErrorCode.INVALID_TRANSACTION_TIMEOUT):
    """The transaction timeout is not allowed."""


class ConcurrentTransactionsError(
    PenstockError, code=ErrorCode.CONCURRENT_TRANSACTIONS, retriable=True
):
    """The transaction before is decided, and not all of its marks are there yet."""


class StorageError(
    PenstockError, code=ErrorCode.STORAGE_ERROR, retriable=True, refresh_metadata=True
):
    """The broker's disk failed."""


class UnknownProducerIdError(PenstockError, code=ErrorCode.UNKNOWN_PRODUCER_ID):
    """The broker has no state for the producer id."""


class NonEmptyGroupError(PenstockError, code=ErrorCode.NON_EMPTY_GROUP):
    """The group has members."""


class GroupIdNotFoundError(PenstockError, code=ErrorCode.GROUP_ID_NOT_FOUND):
    """The group does not exist."""


class GroupSubscribedToTopicError(PenstockError, code=ErrorCode.GROUP_SUBSCRIBED_TO_TOPIC):
    """Members of the group read the topic whose positions were to be forgotten."""


class FencedLeaderEpochError(
    PenstockError, code=ErrorCode.FENCED_LEADER_EPOCH, retriable=True, refresh_metadata=True
):
    """The request's leader epoch is older than the broker's."""


class UnknownLeaderEpochError(PenstockError, code=ErrorCode.UNKNOWN_LEADER_EPOCH, retriable=True):
    """The request's leader epoch is newer than the broker's."""


class UnsupportedCompressionError(PenstockError, code=ErrorCode.UNSUPPORTED_COMPRESSION_TYPE):
    """The compression type is not supported."""


class StaleBrokerEpochError(PenstockError, code=ErrorCode.STALE_BROKER_EPOCH):
    """The broker registered anew since."""


class PreferredLeaderNotAvailableError(
    PenstockError, code=ErrorCode.PREFERRED_LEADER_NOT_AVAILABLE
):
    """The preferred leader is not in sync."""


class FencedInstanceIdError(PenstockError, code=ErrorCode.FENCED_INSTANCE_ID):
    """Another member uses the same group_instance_id."""


class EligibleLeadersNotAvailableError(
    PenstockError, code=ErrorCode.ELIGIBLE_LEADERS_NOT_AVAILABLE, refresh_metadata=True
):
    """No replica that may lead is alive."""


class ElectionNotNeededError(
    PenstockError, code=ErrorCode.ELECTION_NOT_NEEDED, refresh_metadata=True
):
    """The partition has the leader asked for already."""


class InvalidRecordError(PenstockError, code=ErrorCode.INVALID_RECORD):
    """A record breaks a rule of the topic."""


class UnstableOffsetCommitError(
    PenstockError, code=ErrorCode.UNSTABLE_OFFSET_COMMIT, retriable=True
):
    """An open transaction has a position for the partition, and has not ended yet."""


class ProducerFencedError(PenstockError, code=ErrorCode.PRODUCER_FENCED):
    """A newer instance of the transactional producer exists."""


class InvalidUpdateVersionError(PenstockError, code=ErrorCode.INVALID_UPDATE_VERSION):
    """The change is based on an older version of it: a partition epoch, or a registration."""


class UnknownTopicIdError(
    PenstockError, code=ErrorCode.UNKNOWN_TOPIC_ID, retriable=True, refresh_metadata=True
):
    """No topic has this id; the topic may have been deleted and made anew."""


class DuplicateBrokerRegistrationError(PenstockError, code=ErrorCode.DUPLICATE_BROKER_REGISTRATION):
    """Another live process has registered this node id."""


class BrokerIdNotRegisteredError(
    PenstockError, code=ErrorCode.BROKER_ID_NOT_REGISTERED, retriable=True
):
    """The broker is not registered."""

    @classmethod
    def among(cls, node_id: int, registered: Iterable[int]) -> Self:
        """The error for a broker that a person named, with those that there are."""
        known = ", ".join(str(node) for node in sorted(registered))
        return cls(
            f"broker {node_id} is not registered; the brokers are {known}; next: name one of these"
        )


class InconsistentClusterIdError(PenstockError, code=ErrorCode.INCONSISTENT_CLUSTER_ID):
    """The cluster id is another one."""


class TransactionalIdNotFoundError(PenstockError, code=ErrorCode.TRANSACTIONAL_ID_NOT_FOUND):
    """The coordinator does not know the transactional id."""


class IneligibleReplicaError(PenstockError, code=ErrorCode.INELIGIBLE_REPLICA):
    """A fenced or re-registered replica may not join the in-sync set."""


class NewLeaderElectedError(
    PenstockError, code=ErrorCode.NEW_LEADER_ELECTED, refresh_metadata=True
):
    """The change took effect and elected another leader."""


class NoReassignmentInProgressError(PenstockError, code=ErrorCode.NO_REASSIGNMENT_IN_PROGRESS):
    """There is no reassignment of the partition to cancel."""


class FencedMemberEpochError(PenstockError, code=ErrorCode.FENCED_MEMBER_EPOCH):
    """The member's epoch is not the coordinator's."""


class UnreleasedInstanceIdError(PenstockError, code=ErrorCode.UNRELEASED_INSTANCE_ID):
    """The group_instance_id is still held by another member."""


class UnsupportedAssignorError(PenstockError, code=ErrorCode.UNSUPPORTED_ASSIGNOR):
    """The coordinator does not know the assignor."""


class StaleMemberEpochError(PenstockError, code=ErrorCode.STALE_MEMBER_EPOCH):
    """The member must heartbeat and take the newer epoch first."""


class TransactionAbortableError(PenstockError, code=ErrorCode.TRANSACTION_ABORTABLE):
    """The transaction can't be committed any more: abort it, and begin anew."""


class StaleControllerEpochError(
    PenstockError, code=ErrorCode.STALE_CONTROLLER_EPOCH, retriable=True
):
    """A newer controller is active."""


class DuplicateProposalError(PenstockError, code=ErrorCode.DUPLICATE_PROPOSAL):
    """The command took effect before."""


class BrokerFencedError(
    PenstockError, code=ErrorCode.BROKER_FENCED, retriable=True, refresh_metadata=True
):
    """The broker has lost contact with the controllers and serves nothing until it is back."""


class DiskFullError(PenstockError, code=ErrorCode.DISK_FULL):
    """The broker's disk is full."""


class UnsupportedMetadataVersionError(PenstockError, code=ErrorCode.UNSUPPORTED_METADATA_VERSION):
    """The command needs a newer metadata.version."""


class AccessForbiddenError(PenstockError, code=ErrorCode.ACCESS_FORBIDDEN):
    """The operation is not allowed on an internal topic."""


class DuplicateVoterError(PenstockError, code=ErrorCode.DUPLICATE_VOTER):
    """The controller is a voter with another directory; remove that one first."""


class UnknownVoterError(PenstockError, code=ErrorCode.UNKNOWN_VOTER):
    """The controller is no voter."""


class VoterChangeInProgressError(
    PenstockError, code=ErrorCode.VOTER_CHANGE_IN_PROGRESS, retriable=True
):
    """Voters change one at a time, and another change is not committed yet."""


class VoterNotCaughtUpError(PenstockError, code=ErrorCode.VOTER_NOT_CAUGHT_UP):
    """The new controller is not reached, or has too little of the log to vote."""


class LastVoterError(PenstockError, code=ErrorCode.LAST_VOTER):
    """The only voter can not be removed."""


class NotEnoughVotersError(PenstockError, code=ErrorCode.NOT_ENOUGH_VOTERS):
    """Too few of the voters that there would be are alive."""


class ClusterNotFoundedError(PenstockError, code=ErrorCode.CLUSTER_NOT_FOUNDED):
    """The controllers have never begun: the first start of the cluster is not over."""


class MetadataDivergedError(PenstockError, code=ErrorCode.METADATA_DIVERGED):
    """The broker acted on metadata that were given up since; it must begin anew."""


class InvalidTransactionalIdError(PenstockError, code=ErrorCode.INVALID_TRANSACTIONAL_ID):
    """The transactional id is not allowed."""


class StaleGroupCommitError(PenstockError, code=ErrorCode.STALE_GROUP_COMMIT):
    """The group has committed a later epoch number: an old checkpoint was restored."""


class GroupCommitConflictError(PenstockError, code=ErrorCode.GROUP_COMMIT_CONFLICT):
    """The epoch number is committed with other winners."""


class UnknownAttemptError(PenstockError, code=ErrorCode.UNKNOWN_ATTEMPT):
    """No attempt of this id is open: it timed out, or is of another group or epoch number."""


class TransactionTornError(PenstockError, code=ErrorCode.TRANSACTION_TORN):
    """A partition ended its part of the transaction the other way than decided, for good."""


class ConfigurationError(PenstockError, code=ErrorCode.CONFIGURATION):
    """A setting is unknown, out of range or contradicts another."""


class BootstrapError(PenstockError, code=ErrorCode.BOOTSTRAP_FAILED):
    """No bootstrap address could be reached."""


class BufferExhaustedError(PenstockError, code=ErrorCode.BUFFER_EXHAUSTED):
    """Buffer_memory stayed full for max_block_ms."""


class DeliveryTimeoutError(PenstockError, code=ErrorCode.DELIVERY_TIMED_OUT):
    """The record was not acknowledged within delivery_timeout_ms."""


class DeliveryFailedError(PenstockError, code=ErrorCode.DELIVERY_FAILED):
    """Records could not be delivered."""


class ClientClosedError(PenstockError, code=ErrorCode.CLIENT_CLOSED):
    """The client is closed."""


class SerializationError(PenstockError, code=ErrorCode.SERIALIZATION):
    """A key or value has the wrong type for its serialiser."""


class ConsumerStalledError(PenstockError, code=ErrorCode.CONSUMER_STALLED):
    """The consumer makes no progress; ``reason`` says why."""


class NoOffsetError(PenstockError, code=ErrorCode.NO_OFFSET):
    """The partition has no committed offset and auto_offset_reset is none."""


class MaxPollExceededError(PenstockError, code=ErrorCode.MAX_POLL_EXCEEDED):
    """The application did not poll within max_poll_interval_ms."""


class DataDirectoryError(PenstockError, code=ErrorCode.DATA_DIRECTORY):
    """A data directory is not usable by this node."""


class AddressInUseError(PenstockError, code=ErrorCode.ADDRESS_IN_USE):
    """A port is in use already."""


class ForkedProcessError(PenstockError, code=ErrorCode.FORKED_PROCESS):
    """Clients do not work in a forked child of a process that used one."""


class ConcurrentUseError(PenstockError, code=ErrorCode.CONCURRENT_USE):
    """Two threads or tasks used at once what only one may use at a time."""


class UnknownErrorCodeError(PenstockError, code=ErrorCode.UNKNOWN_ERROR_CODE):
    """The other side refused with an error code that this version does not know."""


def _all_subclasses() -> dict[ErrorCode, type[PenstockError]]:
    return {cls.code: cls for cls in PenstockError.__subclasses__()}


ERRORS: dict[ErrorCode, type[PenstockError]] = _all_subclasses()
"""The table: each code and its exception class, one to one (a test holds it)."""


def error_from_proto(proto: common_pb2.Error) -> PenstockError:
    """The exception that an error on the wire stands for.

    A code that this version does not know becomes UnknownErrorCodeError with the number in its
    message: a newer broker's refusal is never taken for success, and never repeated, because it
    may be final.
    """
    leader: LeaderHint | None = None
    if proto.HasField("current_leader"):
        hint = proto.current_leader
        leader = LeaderHint(hint.node_id, hint.leader_epoch, hint.host, hint.port)
    try:
        cls = ERRORS[ErrorCode(proto.code)]
    except (ValueError, KeyError):
        return UnknownErrorCodeError(f"error code {proto.code}: {proto.message}", leader=leader)
    return cls(proto.message, leader=leader)
