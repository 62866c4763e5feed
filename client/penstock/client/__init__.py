"""The client SDK: producers, consumers and administration, sync and asyncio.

::

    with Producer("localhost:9092") as producer:
        producer.send("orders", value=b"...", key=b"42")

    with Consumer("localhost:9092", group_id="billing", topics=["orders"]) as consumer:
        for record in consumer:
            ...

Clients do not survive ``fork``, and none can be made in a forked child of a process that has used
one: both raise ForkedProcessError. Use multiprocessing's ``spawn`` start method, or fork first.
"""

import os as _os

# gRPC's own handlers of fork() crash children at random while asyncio channels are in use, even
# children that never touch gRPC. Ours refuse use in a child instead. Read when gRPC loads.
_os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")


from penstock.client.admin import AdminClient
from penstock.client.aio_admin import AsyncAdminClient, OffsetSpec
from penstock.client.aio_consumer import AsyncConsumer
from penstock.client.aio_group_commits import AsyncAttemptWriter, AsyncGroupCommits
from penstock.client.aio_producer import AsyncProducer
from penstock.client.bulk import AsyncBulkDeliveryFuture, BulkDeliveryFuture
from penstock.client.consumer import Consumer
from penstock.client.descriptions import (
    BrokerDescription,
    ClusterDescription,
    ConfigEntry,
    CreatedTopic,
    DirectoryDescription,
    GroupDescription,
    GroupListing,
    HangingSearch,
    HangingTransaction,
    MemberDescription,
    NodeDescription,
    OutOfSyncReplica,
    PartitionDescription,
    PartitionProducers,
    PartitionReassignment,
    ProducerState,
    QuorumDescription,
    QuorumVoter,
    ReplicaProgress,
    TopicDescription,
    TransactionDescription,
    TransactionListing,
)
from penstock.client.errors import *  # noqa: F403 - errors.__all__ is the list
from penstock.client.errors import __all__ as _error_names
from penstock.client.group_commits import AttemptWriter, GroupCommits
from penstock.client.model import (
    ConsumerMetrics,
    ConsumerRecord,
    GroupCommit,
    GroupMetadata,
    Header,
    OffsetAndMetadata,
    OffsetAndTimestamp,
    RebalanceListener,
    RecordMetadata,
)
from penstock.client.producer import Producer
from penstock.wire.ids import TopicPartition
from penstock.wire.stalls import StallReason
from penstock.wire.transport import tune_malloc

__all__ = [  # noqa: PLE0604 - the names of errors are strings
    "AdminClient",
    "AsyncAdminClient",
    "AsyncAttemptWriter",
    "AsyncBulkDeliveryFuture",
    "AsyncConsumer",
    "AsyncGroupCommits",
    "AsyncProducer",
    "AttemptWriter",
    "BrokerDescription",
    "BulkDeliveryFuture",
    "ClusterDescription",
    "ConfigEntry",
    "Consumer",
    "ConsumerMetrics",
    "ConsumerRecord",
    "CreatedTopic",
    "DirectoryDescription",
    "GroupCommit",
    "GroupCommits",
    "GroupDescription",
    "GroupListing",
    "GroupMetadata",
    "HangingSearch",
    "HangingTransaction",
    "Header",
    "MemberDescription",
    "NodeDescription",
    "OffsetAndMetadata",
    "OffsetAndTimestamp",
    "OffsetSpec",
    "OutOfSyncReplica",
    "PartitionDescription",
    "PartitionProducers",
    "PartitionReassignment",
    "Producer",
    "ProducerState",
    "QuorumDescription",
    "QuorumVoter",
    "RebalanceListener",
    "RecordMetadata",
    "ReplicaProgress",
    "StallReason",
    "TopicDescription",
    "TopicPartition",
    "TransactionDescription",
    "TransactionListing",
    "tune_malloc",
    *_error_names,
]
