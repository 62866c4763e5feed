"""Tells the controllers which replicas of this broker can't be served."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

import structlog

from penstock.broker.core.metadata_image import MetadataImage
from penstock.broker.core.replica_reports import ReplicaReports
from penstock.broker.replication.ports import ReportReplicas
from penstock.broker.replication.sending import SendLoop
from penstock.v1 import cluster_pb2
from penstock.wire.errors import PenstockError, error_from_proto
from penstock.wire.ids import TopicIdPartition

logger = structlog.get_logger()

REPORTS_SINCE: Final = 3
"""The metadata.version from which on the controllers take reports."""


class ReplicaReporter:
    """Sends what ReplicaReports finds due, one report at a time. Used on one event loop.

    A report that was lost, or taken after a later one, or that the metadata overtook, shows as a
    difference between the metadata and what is so here, and another one is made.
    """

    def __init__(
        self,
        node_id: int,
        image: MetadataImage,
        broker_epoch: Callable[[], int],
        report: ReportReplicas,
    ) -> None:
        self._image = image
        self._broker_epoch = broker_epoch
        self._report = report
        self._reports = ReplicaReports(node_id, image)
        self._sending = SendLoop(self._next, self._send)
        self._stopped = False

    @property
    def is_settled(self) -> bool:
        """Whether the controllers know how every replica is, or can't be told."""
        return self._reports.is_settled or not self._can_report

    @property
    def _can_report(self) -> bool:
        return self._image.metadata_version >= REPORTS_SINCE and self._broker_epoch() >= 0

    @property
    def offline_count(self) -> int:
        """How many replicas can't be served. Safe on any thread."""
        return self._reports.offline_count

    def offline(self) -> Iterator[TopicIdPartition]:
        """The replicas that can't be served."""
        return self._reports.offline()

    def why_offline(self, key: TopicIdPartition) -> PenstockError | None:
        """Why a replica can't be served; None when it can, or is none of this broker's."""
        return self._reports.why_offline(key)

    def is_damaged(self, key: TopicIdPartition) -> bool:
        """Whether a replica can be served in part only."""
        return self._reports.is_damaged(key)

    def set_offline(self, key: TopicIdPartition, reason: PenstockError) -> None:
        """The replica can't be served, for as long as this process lives."""
        self._reports.set_offline(key, reason)
        self.resume()

    def set_copying(self, key: TopicIdPartition, reason: PenstockError) -> None:
        """The replica has a log again, with a part of what it had, until ``set_copied``."""
        self._reports.set_copying(key, reason)
        self.resume()

    def set_copied(self, key: TopicIdPartition) -> None:
        """The log that was begun anew has gone as far as it has to."""
        self._reports.set_copied(key)
        self.resume()

    def set_damaged(self, key: TopicIdPartition, reason: PenstockError) -> None:
        """The replica can be served in part only, until ``set_sound``."""
        self._reports.set_damaged(key, reason)
        self.resume()

    def set_sound(self, key: TopicIdPartition) -> None:
        """The replica's log was mended, or is here no more."""
        self._reports.set_sound(key)
        self.resume()

    def forget(self, key: TopicIdPartition) -> None:
        """The replica is no longer this broker's."""
        self._reports.forget(key)

    def compare(self, key: TopicIdPartition) -> None:
        """The metadata of a partition with a replica here are others."""
        self._reports.compare(key)
        self.resume()

    def compare_all(self) -> None:
        """This process registered anew, which the controllers take for a mended disk."""
        self._reports.compare_all()
        self.resume()

    def resume(self) -> None:
        """Report what there is, if reports are taken now."""
        if self._reports.has_due and self._can_report and not self._stopped:
            self._sending.wake()

    async def stop(self) -> None:
        """Report nothing more."""
        self._stopped = True
        await self._sending.stop()

    def _next(self) -> cluster_pb2.ReportReplicasCommand | None:
        return self._reports.next_report(self._broker_epoch()) if self._can_report else None

    async def _send(self, command: cluster_pb2.ReportReplicasCommand) -> bool:
        """Send one report; whether it was taken."""
        taken = await self._is_taken(command)
        self._reports.answered(taken=taken)
        return taken

    async def _is_taken(self, command: cluster_pb2.ReportReplicasCommand) -> bool:
        try:
            response = await self._report(command)
            if response.HasField("error"):
                raise error_from_proto(response.error)
        except PenstockError as error:
            logger.warning(
                "report of replicas not taken", replicas=len(command.replicas), error=error.message
            )
            return False
        except Exception:
            # Whatever it was, what is to be said must not be forgotten with it.
            logger.exception("report of replicas failed", replicas=len(command.replicas))
            return False
        logger.info("replicas reported", replicas=len(command.replicas))
        return True
