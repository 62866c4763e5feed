"""Who a broker says that it is when it registers."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.broker.core.metadata_image import MetadataImage
from penstock.raft_meta.core.versions import EXTERNAL_ADDRESSES_SINCE, METADATA_VERSION
from penstock.v1 import cluster_pb2


@dataclass(frozen=True, slots=True)
class BrokerIdentity:
    """What a broker registers with.

    ``previous_broker_epoch`` is that of the last run if all that it acknowledged is here, else -1.
    ``external`` is the host and port that clients from outside are told, if there are such.
    """

    cluster_id: str
    node_id: int
    host: str
    port: int
    rack: str
    previous_broker_epoch: int
    external: tuple[str, int] | None = None

    def registration(
        self, incarnation_id: bytes, follows_broker_epoch: int
    ) -> cluster_pb2.RegisterBrokerCommand:
        """The request of a process of this broker that follows on that registration; 0: none."""
        external_host, external_port = self.external or ("", 0)
        return cluster_pb2.RegisterBrokerCommand(
            node_id=self.node_id,
            incarnation_id=incarnation_id,
            cluster_id=self.cluster_id,
            host=self.host,
            port=self.port,
            rack=self.rack,
            previous_broker_epoch=self.previous_broker_epoch,
            follows_broker_epoch=follows_broker_epoch,
            min_metadata_version=1,
            supported_metadata_version=METADATA_VERSION,
            external_host=external_host,
            external_port=external_port,
        )

    def is_external_known(self, image: MetadataImage) -> bool:
        """Whether the metadata.version has external addresses told, or there is none to tell."""
        return self.external is None or image.metadata_version >= EXTERNAL_ADDRESSES_SINCE

    def is_untold(self, image: MetadataImage, broker_epoch: int) -> bool:
        """Whether this registration lacks the external address that it would have now.

        It came while the metadata.version did not know such addresses, and that was raised since.
        """
        record = image.brokers.get(self.node_id)
        return (
            self.external is not None
            and record is not None
            and record.broker_epoch == broker_epoch
            and image.metadata_version >= EXTERNAL_ADDRESSES_SINCE
            and (record.external_host, record.external_port) != self.external
        )
