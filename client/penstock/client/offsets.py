"""Committed positions: storing and reading them at the group's coordinator."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc

from penstock.client import admin_values
from penstock.client.cluster import Cluster, now_ms
from penstock.client.coordinator import Coordinators
from penstock.client.core.member import Member
from penstock.client.group_link import GroupLink
from penstock.client.model import OffsetAndMetadata
from penstock.v1 import groups_pb2, groups_pb2_grpc
from penstock.wire.errors import (
    FencedMemberEpochError,
    PenstockError,
    RequestTimedOutError,
    StaleMemberEpochError,
    error_from_proto,
)
from penstock.wire.ids import TopicPartition


class GroupOffsets:
    """Belongs to one event loop. Commits happen one after the other, in the order asked for."""

    def __init__(
        self, cluster: Cluster, coordinators: Coordinators, group_id: str, group: GroupLink
    ) -> None:
        self._cluster = cluster
        self._coordinators = coordinators
        self._group_id = group_id
        self._group = group
        self._turn = asyncio.Lock()

    async def commit(
        self,
        offsets: Mapping[TopicPartition, OffsetAndMetadata],
        timeout_ms: float,
        *,
        leave_out_lost: bool = False,
    ) -> Mapping[TopicPartition, OffsetAndMetadata]:
        """Store positions: as the member while it is one, else from outside of an empty group.

        Each is one of the topic that its ``topic_id`` says; where that is empty, of the one that
        has the name now. Raises the first refusal; UnknownTopicIdError for a topic that was deleted
        and made anew; the client's own where another may have the partitions by now. What was the
        member's and is another's when the commit's turn has come is left out, if that is wanted,
        and a refusal otherwise. Returns what was stored.
        """
        self._group.check_commit(offsets)
        if not offsets:
            return offsets
        deadline = now_ms() + timeout_ms
        held = {p: n for p, n in self._group.member.held_since.items() if p in offsets}
        async with self._in_turn(timeout_ms):
            if leave_out_lost:
                lost = self._gone(held)
                held = {p: n for p, n in held.items() if p not in lost}
                offsets = {name: entry for name, entry in offsets.items() if name not in lost}
            attempt = 0
            while offsets:
                try:
                    self._check_still_held(held)
                    await self._commit_once(offsets, max(1.0, deadline - now_ms()))
                    break
                except StaleMemberEpochError:
                    # The answer with our newer epoch is on its way.
                    pause = self._cluster.backoff.delay_ms(attempt)
                    attempt += 1
                    if attempt > 3 or now_ms() + pause >= deadline:
                        raise
                    await asyncio.sleep(pause / 1000)
        return offsets

    @asynccontextmanager
    async def _in_turn(self, timeout_ms: float) -> AsyncIterator[None]:
        """Wait for the commits asked for before, but no longer than this."""
        try:
            async with asyncio.timeout(timeout_ms / 1000 if timeout_ms < float("inf") else None):
                await self._turn.acquire()
        except TimeoutError:
            raise RequestTimedOutError(
                f"group {self._group_id!r}: an earlier commit of this consumer was not answered "
                f"within {timeout_ms:.0f} ms, and this one was not sent"
            ) from None
        try:
            yield
        finally:
            self._turn.release()

    async def fetch(
        self,
        partitions: Iterable[TopicPartition],
        timeout_ms: float,
        member: Member | None = None,
        topic_ids: Mapping[TopicPartition, bytes] | None = None,
    ) -> dict[TopicPartition, OffsetAndMetadata]:
        """Committed positions; partitions without one are left out.

        With ``member`` the answer waits for what an earlier holder may still commit. With
        ``topic_ids`` only positions of these very topics are found. Where an open transaction has
        a position for one of them its end is waited for (UnstableOffsetCommitError in the end): who
        read on from the position before would process what the transaction has processed.
        """
        request = groups_pb2.FetchOffsetsRequest(
            group_id=self._group_id,
            partitions=[self._cluster.metadata.to_proto(entry) for entry in partitions],
            member_epoch=-1,
            require_stable=True,
        )
        if topic_ids is not None:
            for wanted in request.partitions:
                wanted.topic_id = topic_ids[admin_values.partition(wanted)]
        if not request.partitions:
            return {}
        if member is not None and member.in_group:
            request.member_id = self._group.member_id
            request.member_epoch = member.epoch
        response = await self._call("FetchOffsets", request, _checked, timeout_ms)
        found = [
            entry
            for entry in response.offsets
            if topic_ids is None
            or topic_ids[admin_values.partition(entry.partition)] == entry.partition.topic_id
        ]
        ids = {admin_values.partition(entry.partition): entry.partition.topic_id for entry in found}
        return {
            partition: replace(position, topic_id=ids[partition])
            for partition, position in admin_values.offsets(found).items()
        }

    def _gone(self, held: Mapping[TopicPartition, int]) -> set[TopicPartition]:
        """What was taken from this member since it was ``held``, maybe given to it again."""
        since = self._group.member.held_since
        return {partition for partition, number in held.items() if since.get(partition) != number}

    def _check_still_held(self, held: Mapping[TopicPartition, int]) -> None:
        """Of what was this member's when the commit was asked for: waiting may outlast it."""
        self._group.check_commit(held)
        gone = sorted(self._gone(held))
        if gone:
            raise FencedMemberEpochError(
                f"group {self._group_id!r} took {', '.join(map(str, gone))} from this member "
                "before the commit was sent"
            )

    async def _commit_once(
        self,
        offsets: Mapping[TopicPartition, OffsetAndMetadata],
        timeout_ms: float,
    ) -> None:
        member = self._group.member
        request = groups_pb2.CommitOffsetsRequest(group_id=self._group_id, member_epoch=-1)
        if member.in_group:
            request.member_id = self._group.member_id
            request.member_epoch = member.epoch
        for partition, position in offsets.items():
            topic_id = position.topic_id or self._cluster.metadata.topic_id(partition.topic)
            request.offsets.append(admin_values.offset_proto(partition, position, topic_id))
        await self._call("CommitOffsets", request, judge_commit, timeout_ms)

    async def _call(self, method: str, request: Any, judge: Any, timeout_ms: float) -> Any:
        def bind(channel: grpc.aio.Channel) -> Any:
            return getattr(groups_pb2_grpc.GroupsStub(channel), method)

        return await self._coordinators.call(
            self._group_id, bind, request, judge, what=f"Groups.{method}", timeout_ms=timeout_ms
        )


def _checked(response: groups_pb2.FetchOffsetsResponse) -> groups_pb2.FetchOffsetsResponse:
    if response.HasField("error"):
        raise error_from_proto(response.error)
    return response


def judge_commit(response: groups_pb2.CommitOffsetsResponse) -> None:
    """Raise what was refused of a commit, if anything was."""
    if response.HasField("error"):
        raise error_from_proto(response.error)
    first: PenstockError | None = None
    for result in response.results:
        if result.HasField("error"):
            error = error_from_proto(result.error)
            # A retriable one has the whole commit repeated, which does no harm; one that is not
            # goes before it.
            if first is None or (first.retriable and not error.retriable):
                first = error
    if first is not None:
        raise first
