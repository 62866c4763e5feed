"""Which brokers are served: those of this cluster, and of each its newest process."""

from __future__ import annotations

from penstock.broker.core.metadata_image import MetadataImage
from penstock.v1 import replication_pb2
from penstock.wire.errors import (
    InconsistentClusterIdError,
    LeaderNotAvailableError,
    StaleBrokerEpochError,
)


def check_cluster(node_id: int, image: MetadataImage, cluster_id: str) -> None:
    """Raise InconsistentClusterIdError unless a request means the cluster of this broker.

    LeaderNotAvailableError while it does not know its cluster.
    """
    own = image.cluster_id
    if not own:
        raise LeaderNotAvailableError(f"broker {node_id} does not know its cluster yet")
    if cluster_id != own:
        raise InconsistentClusterIdError(
            f"the request is for cluster {cluster_id!r}, but broker {node_id} is of {own!r}; "
            "nothing was done: one of the two has the wrong peers"
        )


def check_follower(
    node_id: int, image: MetadataImage, hello: replication_pb2.FollowerHello
) -> None:
    """Raise a PenstockError unless broker ``node_id`` may serve this follower."""
    own = image.cluster_id
    if not own or not hello.cluster_id:
        # Right after a start the metadata have not told it; that is no wrong disk.
        unaware = hello.node_id if own else node_id
        raise LeaderNotAvailableError(f"broker {unaware} does not know its cluster yet")
    if hello.cluster_id != own:
        raise InconsistentClusterIdError(
            f"broker {hello.node_id} is of cluster {hello.cluster_id!r}, broker {node_id} "
            f"of {own!r}; one of them has the wrong disk or the wrong peers"
        )
    known = image.brokers.get(hello.node_id)
    if known is not None and hello.broker_epoch < known.broker_epoch:
        raise StaleBrokerEpochError(
            f"broker {hello.node_id} comes with epoch {hello.broker_epoch}, but has registered "
            f"anew with {known.broker_epoch}"
        )
