"""Carries out what the Member decides: the stream to the coordinator and its timers."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable, Iterable
from typing import Any, Final

from penstock.client.cluster import Cluster, now_ms
from penstock.client.config import ConsumerConfig
from penstock.client.coordinator import Coordinators
from penstock.client.core.backoff import Backoff
from penstock.client.core.member import (
    Alive,
    Closed,
    DropStream,
    Effect,
    Event,
    Failed,
    Leaving,
    Member,
    MemberSettings,
    MemberState,
    Opened,
    OpenStream,
    RebalancePending,
    Received,
    Send,
    SendAnew,
    StoodStill,
    Ticked,
)
from penstock.client.model import GroupMetadata
from penstock.client.streams import BidiStream
from penstock.v1 import groups_pb2, groups_pb2_grpc
from penstock.wire.errors import (
    FencedMemberEpochError,
    LeaderHint,
    MaxPollExceededError,
    PenstockError,
    RequestTimedOutError,
    error_from_proto,
)
from penstock.wire.ids import TopicPartition
from penstock.wire.stalls import StallReason

_LOG: Final = logging.getLogger("penstock.client")
_FIRST_BACKOFF_MS: Final = 20.0


class GroupLink:
    """Belongs to one event loop. ``on_change`` is called when ``member`` has something to say
    to the application, with the error that ended the membership for good, if there is one;
    ``alive_ms`` says when the application last gave a sign of life.
    """

    def __init__(
        self,
        cluster: Cluster,
        coordinators: Coordinators,
        config: ConsumerConfig,
        *,
        alive_ms: Callable[[], float],
        on_change: Callable[[PenstockError | None], object],
    ) -> None:
        assert config.group_id is not None
        self._cluster = cluster
        self._coordinators = coordinators
        self._config = config
        self._group_id = config.group_id
        self._alive_ms = alive_ms
        self._on_change = on_change
        backoff = cluster.backoff
        first = min(_FIRST_BACKOFF_MS, config.retry_backoff_ms)
        self.member_id = str(uuid.uuid4())
        self.member = Member(
            MemberSettings(
                group_id=config.group_id,
                member_id=self.member_id,
                client_id=config.client_id,
                group_instance_id=config.group_instance_id or "",
                assignor=config.group_assignor,
                rack_id=config.client_rack,
                session_timeout_ms=config.session_timeout_ms,
                max_poll_interval_ms=config.max_poll_interval_ms,
            ),
            Backoff(first, backoff.most_ms, backoff.chance),
        )
        self.trouble: PenstockError | None = None  # Why the coordinator cannot be spoken to.
        self._refusal: PenstockError | None = None  # Why the group will not have this member.
        self._answer: PenstockError | None = None  # The coordinator's last, if a refusal.
        self._stream: BidiStream | None = None
        self._opening: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    @property
    def waiting(self) -> PenstockError | None:
        """That the group has not told this member yet what it has; None when it has."""
        if self.member.state is not MemberState.JOINING:
            return None
        waiting = RequestTimedOutError(
            f"group {self._group_id!r} has not told this member yet which partitions it has; next: "
            f"give it time, and see `penstock groups describe {self._group_id}`"
        )
        waiting.reason = StallReason.WAITING_FOR_REBALANCE
        return waiting

    def handle(self, event: Event) -> None:
        """Feed the member and carry out what it wants."""
        if self._closed:
            return
        if isinstance(event, Closed):
            self.trouble = event.error
        elif isinstance(event, Received):
            refused = event.response.HasField("error")
            self.trouble = error_from_proto(event.response.error) if refused else None
            self._answer = self.trouble
        before = self.member.state
        # Before any event: each may find that the application was silent for too long.
        self.member.handle(Alive(self._alive_ms()), now_ms())
        for effect in self.member.handle(event, now_ms()):
            self._carry_out(effect)
        if self.member.state is MemberState.STALE and before is not MemberState.STALE:
            _LOG.warning(
                "group %s: this consumer did not poll for max_poll_interval_ms=%d and left; its "
                "partitions go to others. Process faster, take fewer records with "
                "max_poll_records, or raise max_poll_interval_ms",
                self._group_id,
                self._config.max_poll_interval_ms,
            )
        self._set_timer()

    def _carry_out(self, effect: Effect) -> None:
        if isinstance(effect, Send):
            if self._stream is not None:
                self._stream.send(effect.request)
        elif isinstance(effect, OpenStream):
            self._opening = asyncio.ensure_future(self._open(effect.hint))
        elif isinstance(effect, DropStream):
            self._drop_stream()
        elif isinstance(effect, StoodStill):
            _LOG.warning(
                "group %s: a heartbeat was %.0f ms late, of session_timeout_ms=%d: the event loop "
                "that it is sent on was blocked, or the process was stopped. While it is, nothing "
                "is sent, and the group gives this member's partitions to others when the session "
                "is over. Call what blocks or computes for long in a thread (asyncio.to_thread), "
                "or raise session_timeout_ms",
                self._group_id,
                effect.late_ms,
                self._config.session_timeout_ms,
            )
        elif isinstance(effect, RebalancePending):
            self._on_change(None)
        elif isinstance(effect, Failed):
            self._refusal = effect.error
            self._on_change(effect.error)

    def check_commit(self, partitions: Iterable[TopicPartition]) -> None:
        """Raise why this consumer must not commit positions of ``partitions``, if it must not.

        Not being a member is a reason only for one that was a member: another may have its
        partitions, and an empty group lets anyone commit.
        """
        state = self.member.state
        if state is MemberState.STALE:
            raise MaxPollExceededError(
                f"group {self._group_id!r}: this consumer did not poll for "
                f"max_poll_interval_ms={self._config.max_poll_interval_ms} and left; others may "
                "have its partitions. Poll to join again"
            )
        if state is MemberState.FAILED and self._refusal is not None:
            raise self._refusal
        lost = sorted(self.member.lost.intersection(partitions))
        if lost:
            names = ", ".join(map(str, lost))
            raise FencedMemberEpochError(
                f"group {self._group_id!r} gave this member up, and {names} may be another's by "
                "now. Poll to hear what this member has"
            )

    def metadata(self) -> GroupMetadata:
        """Who this is now. Raises as ``check_commit`` while it has not heard what it lost."""
        self.check_commit(self.member.lost)
        if not self.member.in_group:
            return GroupMetadata(self._group_id)
        return GroupMetadata(self._group_id, self.member_id, self.member.epoch)

    async def leave(self, timeout_ms: float) -> None:
        """Leave the group, looking no longer than this for a coordinator that hears of it."""
        if self._closed:
            return
        self._answer = goodbye = None
        for effect in self.member.handle(Leaving(), now_ms()):
            self._carry_out(effect)
            if isinstance(effect, Send | SendAnew):
                goodbye = effect.request
        self._set_timer()
        try:
            async with asyncio.timeout(max(0.0, timeout_ms) / 1000):
                heard = await self._finish_stream()
                if goodbye is not None and not heard:
                    await self._say_goodbye(goodbye)
        except TimeoutError:
            if goodbye is not None:
                _LOG.warning(
                    "group %s: the coordinator could not be told that this member left; it will "
                    "find out after session_timeout_ms",
                    self._group_id,
                )

    async def _finish_stream(self) -> bool:
        """Whether the coordinator read all that was sent over the open stream, if there is one."""
        stream = self._stream
        if stream is None:
            return False
        stream.finish()
        await stream.finished()  # The coordinator ends it when it has read all.
        return not stream.broken and not self._was_refused

    @property
    def _was_refused(self) -> bool:
        """Whether the coordinator answered that it is none, or not yet."""
        return self._answer is not None and self._answer.retriable

    async def _say_goodbye(self, goodbye: groups_pb2.GroupHeartbeatRequest) -> None:
        """Find the coordinator that hears it. An answer that is final is as good as any."""
        attempt = 0
        while True:
            try:
                node_id = await self._coordinators.find(
                    self._group_id, self._config.request_timeout_ms
                )
                await self._say_to(node_id, goodbye)
                return
            except PenstockError as error:
                if not error.retriable:
                    _LOG.info("group %s, when leaving: %s", self._group_id, error.message)
                    return
                self._coordinators.forget(self._group_id, error.leader)
            await asyncio.sleep(self._cluster.backoff.delay_ms(attempt) / 1000)
            attempt += 1

    async def _say_to(self, node_id: int, request: groups_pb2.GroupHeartbeatRequest) -> None:
        """Send one message over a stream of its own. Raises a refusal, or why it broke."""
        reasons: list[PenstockError] = []

        def on_message(response: groups_pb2.GroupHeartbeatResponse) -> None:
            if response.HasField("error"):
                reasons.append(error_from_proto(response.error))

        stream = self._stream_to(node_id, on_message, reasons.append)
        try:
            stream.send(request)
            stream.finish()
            await stream.finished()
        finally:
            stream.cancel()
        if stream.broken or len(reasons) > 1:
            raise reasons[0]

    async def close(self) -> None:
        """Free everything, without leaving."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        if self._opening is not None:
            self._opening.cancel()
            await asyncio.gather(self._opening, return_exceptions=True)
        if self._stream is not None:
            self._stream.cancel()
            await self._stream.finished()

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        deadline = self.member.next_deadline_ms()
        if deadline != float("inf"):
            delay_s = max(0.0, deadline - now_ms()) / 1000
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self.handle(Ticked())

    def _drop_stream(self) -> None:
        stream, self._stream = self._stream, None
        self._coordinators.forget(self._group_id)
        if stream is not None:
            stream.cancel()

    async def _open(self, hint: LeaderHint | None) -> None:
        if hint is not None:
            self._coordinators.forget(self._group_id, hint)
        try:
            node_id = await self._coordinators.find(self._group_id, self._config.request_timeout_ms)
            self._cluster.channel_to(node_id)
        except PenstockError as error:
            if not error.retriable:
                _LOG.error("group %s: %s", self._group_id, error.message)
            self.handle(Closed(error))
            return

        def on_message(response: groups_pb2.GroupHeartbeatResponse) -> None:
            if self._stream is stream:
                self.handle(Received(response))

        def on_end(error: PenstockError) -> None:
            if self._stream is stream:
                self._stream = None
                self._coordinators.forget(self._group_id)
                self.handle(Closed(error))

        stream = self._stream_to(node_id, on_message, on_end)
        self._stream = stream
        self.handle(Opened())

    def _stream_to(
        self,
        node_id: int,
        on_message: Callable[[groups_pb2.GroupHeartbeatResponse], object],
        on_end: Callable[[PenstockError], object],
    ) -> BidiStream:
        def open_call() -> Any:
            stub: Any = groups_pb2_grpc.GroupsStub(self._cluster.channel_to(node_id))
            return stub.Heartbeat()

        return BidiStream(
            open_call,
            where=self._cluster.name_of(node_id),
            what="Groups.Heartbeat",
            on_message=on_message,
            on_end=on_end,
        )
