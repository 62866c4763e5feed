"""One consumer group: who its members are and what each may read (KIP-848), and its offsets.

A member's life, by the messages that it sends (epoch) and what happens to it:

    ============== ============================ ==============================================
    state          stimulus                     becomes
    ============== ============================ ==============================================
    unknown        0 with a subscription        member; the group epoch rises
    unknown        any other epoch              refused: UNKNOWN_MEMBER_ID
    member         its epoch, or an older one   member; its session goes on
                   not yet answered with its own
    member         its epoch with ``owned``     what it no longer owns is free for others
    member         an epoch from the future,    refused: FENCED_MEMBER_EPOCH
                   or older than one it used
    member         0                            member that holds nothing, in the group's epoch
    member         -1                           unknown; the group epoch rises
    static member  -2                           away; it keeps its assignment
    away           0 with its instance id       member with that assignment, under the new id
    member, away   session timeout              unknown; the group epoch rises
    member         rebalance timeout            unknown; the group epoch rises
    ============== ============================ ==============================================

When the group epoch rises, a target assignment is made; every member enters its epoch, is asked
to give back what others shall have, and gets what others gave back. Answers are pushed to every
member concerned at once. As a member may have sent messages before it saw the newest push, older
epochs are borne, but only a message in the newest epoch acknowledges anything.
"""

from __future__ import annotations

from collections.abc import Iterable

from penstock.broker.core import group_describe, group_member, group_offsets, group_reconcile
from penstock.broker.core.group_events import (
    CommitOffsets,
    CommitTransactionOffsets,
    DeleteGroup,
    DeleteOffsets,
    DescribeGroup,
    Effect,
    ExpireOffsets,
    FetchOffsets,
    GroupEvent,
    GroupSettings,
    Happening,
    Heartbeat,
    Loaded,
    Marked,
    Persist,
    Request,
    Respond,
    Send,
    Tick,
    TopicsChanged,
)
from penstock.broker.core.group_pending import WriteOrder
from penstock.broker.core.group_sessions import NO_STREAM, Sessions
from penstock.broker.core.group_state import Change, GroupState
from penstock.broker.core.group_topics import Subscriptions, TopicView
from penstock.broker.core.group_values import (
    JOIN_EPOCH,
    LEAVE_EPOCH,
    LEFT_EPOCH,
    Member,
    Partitions,
)
from penstock.v1 import groups_pb2
from penstock.wire.errors import (
    FencedInstanceIdError,
    FencedMemberEpochError,
    InvalidRequestError,
    NonEmptyGroupError,
    PenstockError,
    UnknownMemberIdError,
    UnreleasedInstanceIdError,
)
from penstock.wire.wording import counted


class Group:
    """One group. ``handle`` is the only mutator but for ``replay`` and ``revert``."""

    def __init__(
        self,
        group_id: str,
        topics: TopicView,
        subscriptions: Subscriptions,
        settings: GroupSettings,
        order: WriteOrder | None = None,
    ) -> None:
        self.state = GroupState(group_id, order)
        self._topics = topics
        self._subscriptions = subscriptions
        self._settings = settings
        self._sessions = Sessions()
        self._assigned_ms: int | None = None  # When the target was last made, if since loaded.
        self._farewells: list[Effect] = []
        # What was given was taken back unwritten, and nothing else will have it given again.
        self._gives_to_all = False

    @property
    def next_deadline_ms(self) -> int | None:
        """When to handle a Tick, at the latest; None for never."""
        return self._sessions.next_deadline_ms

    def handle(self, event: GroupEvent, now_ms: int) -> list[Effect]:
        """Take one event at a time of the monotonic clock. See Effect for what holds of answers."""
        match event:
            case Heartbeat():
                return self._on_heartbeat(event, now_ms)
            case TopicsChanged() | ExpireOffsets() | Marked() | Loaded() | Tick():
                return self._on_happening(event, now_ms)
            case _:
                return self._on_request(event, now_ms)

    def _on_happening(self, event: Happening, now_ms: int) -> list[Effect]:
        """What nobody waits for."""
        match event:
            case TopicsChanged():
                self._on_topics_changed(event)
            case ExpireOffsets():
                group_offsets.expire(self.state, self._subscriptions, self._settings, event.wall_ms)
            case Marked():
                self.state.end_transaction(event.ended, commit=event.commit, up_to=event.up_to)
            case Loaded():
                self._on_loaded(now_ms)
            case Tick():
                self._on_tick(now_ms)
        self._settle(now_ms)
        effects = self._finish(now_ms, None)
        if isinstance(event, Tick):
            self._sessions.find_deadline()
        return effects

    def _on_request(self, event: Request, now_ms: int) -> list[Effect]:
        match event:
            case CommitOffsets():
                answer = group_offsets.commit(self.state, self._topics, self._settings, event)
                return self._respond(event.request_id, answer)
            case CommitTransactionOffsets():
                return self._commit_in_transaction(event)
            case FetchOffsets():
                fetched = group_offsets.fetch(self.state, self._topics, event.request)
                return self._respond(event.request_id, fetched)
            case DescribeGroup():
                described = group_describe.describe(self.state, self._topics)
                return self._respond(event.request_id, described)
            case DeleteGroup():
                return self._respond(event.request_id, self._delete())
            case DeleteOffsets():
                deleted = group_offsets.delete(
                    self.state, self._topics, self._subscriptions, event.request
                )
                # The last offset may have been all that there was of the group.
                self._settle(now_ms)
                return self._respond(event.request_id, deleted)

    def revert(self, changes: Iterable[Change], now_ms: int) -> None:
        """Take back changes that could not be written, the newest first; try again soon.

        Their answers must become errors, and what was to be sent must not be.
        """
        self.state.undo(changes)
        members = self.state.members
        touched = [(member_id, members.get(member_id)) for member_id in self.state.take_touched()]
        self._sessions.postpone(touched, now_ms, now_ms + self._settings.retry_ms)
        self.state.take_movable()  # It is all given again at the recheck.

    def validate(self) -> None:
        """Assert what must hold between events."""
        self.state.validate()
        self._sessions.validate(self.state.members.values())
        if self._sessions.recheck_at_ms is None:
            for member in self.state.members.values():
                assert not group_reconcile.grantable(self.state, member)
            epoch = self.state.epochs.assignment_epoch
            assert all(m.is_away or m.epoch == epoch for m in self.state.members.values())
            assert not group_reconcile.needs_assignment(self.state, self._subscriptions)

    # ------------------------------------------------------------------ members' messages

    def _on_heartbeat(self, event: Heartbeat, now_ms: int) -> list[Effect]:
        try:
            member_id = self._take_message(event, now_ms)
        except PenstockError as error:
            response = groups_pb2.GroupHeartbeatResponse(
                error=error.to_proto(), member_id=event.request.member_id
            )
            return [Send(event.group_id, event.stream_id, response, is_reply=True)]
        self._settle(now_ms)
        if member_id is None:
            response = groups_pb2.GroupHeartbeatResponse(
                member_id=event.request.member_id, member_epoch=event.request.member_epoch
            )
        else:
            response = self._tell(member_id)
        reply = Send(event.group_id, event.stream_id, response, is_reply=True)
        return self._finish(now_ms, reply)

    def _take_message(self, event: Heartbeat, now_ms: int) -> str | None:
        """Take over what a message says; the member's id, or None when it has left.

        Raises PenstockError with nothing changed.
        """
        request = event.request
        group_member.check_request(request, self._settings)
        member = self._identify(event)
        if request.member_epoch == JOIN_EPOCH:
            return self._join(event, member, now_ms)
        assert member is not None
        if request.member_epoch == LEAVE_EPOCH:
            self._remove(member)
            return None
        if request.member_epoch == LEFT_EPOCH:
            self._go_away(member, now_ms)
            return None
        return self._go_on(event, member, now_ms)

    def _identify(self, event: Heartbeat) -> Member | None:
        """The member that speaks, or whose place the one that joins takes; None for a new one."""
        request = event.request
        group_id, member_id = event.group_id, request.member_id
        member = self.state.members.get(member_id)
        joining = request.member_epoch == JOIN_EPOCH
        if member is not None:
            self._check_stream(event)
            if request.group_instance_id not in ("", member.instance_id):
                raise InvalidRequestError(
                    f"group {group_id!r}: member {member_id!r} joined with the instance id "
                    f"{member.instance_id!r} and cannot change it to {request.group_instance_id!r}"
                )
            return member
        holder = self.state.instance(request.group_instance_id)
        if holder is not None:
            return self._check_instance(holder, joining=joining)
        if not joining:
            raise UnknownMemberIdError(
                f"group {group_id!r} has no member {member_id!r} (any more: it left, or was not "
                "heard in time); give up all partitions and join anew"
            )
        return None

    def _check_stream(self, event: Heartbeat) -> None:
        session = self._sessions[event.request.member_id]
        if event.stream_id < session.stream_id:
            raise FencedMemberEpochError(
                f"group {event.group_id!r}: member {event.request.member_id!r} speaks on a newer "
                "stream; this one is over"
            )

    def _check_instance(self, holder: Member, *, joining: bool) -> Member:
        where = f"group {self.state.group_id!r}: the instance id {holder.instance_id!r}"
        if not joining:
            raise FencedInstanceIdError(
                f"{where} is now that of member {holder.member_id!r}; two processes use it"
            )
        if not holder.is_away:
            raise UnreleasedInstanceIdError(
                f"{where} is still held by member {holder.member_id!r} of "
                f"{holder.client_host or 'an unknown host'}; it is released when that one leaves, "
                f"or was silent for {holder.session_timeout_ms} ms"
            )
        return holder

    def _join(self, event: Heartbeat, before: Member | None, now_ms: int) -> str:
        epoch = self.state.epochs.assignment_epoch
        member = group_member.joined(before, event, self._settings, epoch)
        if before is not None and before.member_id != member.member_id:
            self.state.remove_member(before.member_id)
            self._sessions.drop(before.member_id)
        self._put_speaker(event, before, member, now_ms)
        return member.member_id

    def _go_on(self, event: Heartbeat, before: Member, now_ms: int) -> str:
        session = self._sessions[before.member_id]
        epoch = event.request.member_epoch
        where = f"group {event.group_id!r}, member {before.member_id!r}: epoch {epoch}"
        if epoch > before.epoch:
            raise FencedMemberEpochError(
                f"{where} was never given out, the member is in {before.epoch}; give up all "
                "partitions and join anew"
            )
        if epoch < session.used_epoch:
            raise FencedMemberEpochError(
                f"{where} is older than {session.used_epoch}, which the member has named before; "
                "give up all partitions and join anew"
            )
        member = group_member.updated(before, event)
        if event.request.HasField("owned") and epoch == before.epoch:
            owned = group_member.owned_partitions(event.request, self._topics)
            member = group_reconcile.acknowledge(member, owned)
            if not owned <= member.assigned | member.revoking:
                session.told = None  # It holds what is not its own: tell it again what is.
        self._put_speaker(event, before, member, now_ms)
        return member.member_id

    def _put_speaker(
        self, event: Heartbeat, before: Member | None, member: Member, now_ms: int
    ) -> None:
        """Store the member that spoke, and note that and where it was heard."""
        if before is None or (before.topics, before.pattern) != (member.topics, member.pattern):
            # First: of a crash in between nothing would be seen but a member that wants no more.
            group_reconcile.bump(self.state)
            self.state.put_member(member)
        else:
            self.state.put_member(member)
            if self._votes_otherwise(before, member):
                group_reconcile.bump(self.state)
        self._sessions.heard(member, event.stream_id, event.request.member_epoch, now_ms)

    def _votes_otherwise(self, before: Member, member: Member) -> bool:
        """Whether a member's new wish for an assignor changes the group's choice."""
        return (
            before.server_assignor != member.server_assignor
            and group_reconcile.chosen_assignor(self.state) != self.state.epochs.assignor
        )

    def _go_away(self, member: Member, now_ms: int) -> None:
        away = group_reconcile.go_away(member)
        self.state.put_member(away)
        self._sessions.start(away, now_ms)

    def _remove(self, member: Member, why: str = "") -> None:
        """Remove a member; ``why`` is told to it when it did not ask for it."""
        self.state.remove_member(member.member_id)
        session = self._sessions.drop(member.member_id)
        group_reconcile.bump(self.state)
        if why and session is not None and session.stream_id != NO_STREAM:
            error = UnknownMemberIdError(
                f"group {self.state.group_id!r}: member {member.member_id!r} was removed: {why}; "
                "give up all partitions and join anew"
            )
            response = groups_pb2.GroupHeartbeatResponse(
                error=error.to_proto(), member_id=member.member_id
            )
            farewell = Send(self.state.group_id, session.stream_id, response, is_reply=False)
            self._farewells.append(farewell)

    def _tell(self, member_id: str) -> groups_pb2.GroupHeartbeatResponse:
        """What a member is told now, with the assignment if it has not been told that yet."""
        member, session = self.state.members[member_id], self._sessions[member_id]
        response = groups_pb2.GroupHeartbeatResponse(
            member_id=member_id,
            member_epoch=member.epoch,
            heartbeat_interval_ms=min(
                self._settings.heartbeat_interval_ms, max(member.session_timeout_ms // 3, 1)
            ),
        )
        if self._must_tell_assignment(member, session.told):
            partitions = group_describe.partitions(self.state, member.assigned)
            response.assignment.CopyFrom(groups_pb2.GroupAssignment(partitions=partitions))
        session.told = (member.epoch, member.assigned)
        return response

    @staticmethod
    def _must_tell_assignment(member: Member, told: tuple[int, Partitions] | None) -> bool:
        if told is None or told[1] != member.assigned:
            return True
        # A member acknowledges assignments, and what it acknowledged in an epoch gone by does
        # not count: while it has something to give back, each epoch tells it the same again.
        return bool(member.revoking) and told[0] != member.epoch

    # ------------------------------------------------------------------ other events

    def _respond(
        self,
        request_id: int,
        response: (
            groups_pb2.CommitOffsetsResponse
            | groups_pb2.FetchOffsetsResponse
            | groups_pb2.GroupDescription
            | groups_pb2.DeleteGroupResult
            | groups_pb2.DeleteOffsetsResponse
        ),
    ) -> list[Effect]:
        return [*self._persist(), Respond(self.state.group_id, request_id, response)]

    def _commit_in_transaction(self, event: CommitTransactionOffsets) -> list[Effect]:
        answer = group_offsets.commit_in_transaction(
            self.state, self._topics, self._settings, event
        )
        changes = self.state.take_changes()
        group_id = self.state.group_id
        if not changes:
            return [Respond(group_id, event.request_id, answer)]
        return [
            Persist(group_id, changes, event.producer),
            Respond(group_id, event.request_id, answer, in_transaction=True),
        ]

    def _delete(self) -> groups_pb2.DeleteGroupResult:
        result = groups_pb2.DeleteGroupResult(group_id=self.state.group_id)
        if self.state.is_bare:
            result.error.CopyFrom(group_offsets.not_found(self.state.group_id).to_proto())
        elif self.state.members:
            error = NonEmptyGroupError(
                f"group {self.state.group_id!r} has {counted(len(self.state.members), 'member')}; "
                "stop all of its members first"
            )
            result.error.CopyFrom(error.to_proto())
        else:
            for partition in sorted({*self.state.offsets, *self.state.pending}):
                self.state.put_offset(partition, None)
            self.state.put_epochs(None)
        return result

    def _on_topics_changed(self, event: TopicsChanged) -> None:
        group_offsets.forget_topics(self.state, event.removed)
        concern = self._subscriptions.concern
        members = self.state.members.values()
        if any(concern(member, event.names) for member in members):
            self._check_target()
        if (
            event.moved
            and group_reconcile.uses_racks(self.state)
            and any(concern(member, event.moved) for member in members)
            and not group_reconcile.is_due(self.state)
        ):
            group_reconcile.bump(self.state)

    def _on_loaded(self, now_ms: int) -> None:
        """Timeouts start anew: members could not be heard meanwhile."""
        for member in self.state.members.values():
            self._sessions.start(member, now_ms)
        self._recheck()
        # Replicas may have moved to other racks while nobody coordinated the group.
        if group_reconcile.uses_racks(self.state) and group_reconcile.is_outdated(
            self.state, self._subscriptions
        ):
            group_reconcile.bump(self.state)

    def _on_tick(self, now_ms: int) -> None:
        recheck_at_ms = self._sessions.recheck_at_ms
        if recheck_at_ms is not None and recheck_at_ms <= now_ms:
            self._sessions.recheck_at_ms = None
            self._gives_to_all = True
            self._recheck()
        for member_id in self._sessions.ids():
            session, member = self._sessions[member_id], self.state.members[member_id]
            if session.deadline_ms <= now_ms:
                self._remove(member, f"it was not heard for {member.session_timeout_ms} ms")
            elif session.revoke_by_ms is not None and session.revoke_by_ms <= now_ms:
                self._remove(
                    member,
                    f"it did not give back partitions within {member.rebalance_timeout_ms} ms",
                )

    def _recheck(self) -> None:
        group_offsets.forget_missing_topics(self.state, self._topics)
        self._check_target()

    def _check_target(self) -> None:
        if group_reconcile.needs_assignment(self.state, self._subscriptions):
            group_reconcile.bump(self.state)

    # ------------------------------------------------------------------ after every change

    def _settle(self, now_ms: int) -> None:
        """Make the target assignment when it is due, and move towards it as far as possible."""
        epochs = self.state.epochs
        self._sessions.assign_at_ms = None
        if group_reconcile.is_due(self.state):
            at_ms = now_ms
            # The first assignment is always made at once: member epoch 0 means joining.
            if self._assigned_ms is not None and epochs.assignment_epoch:
                at_ms = self._assigned_ms + self._settings.assignment_interval_ms
            if at_ms <= now_ms:
                self._assigned_ms = now_ms
                group_reconcile.assign(self.state, self._subscriptions)
            else:
                self._sessions.assign_at_ms = at_ms
                self._sessions.arm(at_ms)
        movable = self.state.take_movable()
        if self._gives_to_all:
            self._gives_to_all = False
            movable = set(self.state.members)
        group_reconcile.grant(self.state, movable)
        state = self.state
        if not (state.members or state.offsets or state.pending):
            self.state.put_epochs(None)  # Nothing is left of the group.

    def _finish(self, now_ms: int, reply: Send | None) -> list[Effect]:
        """The effects of an event: records, the answer, and what other members must know."""
        touched = sorted(self.state.take_touched())
        effects = self._persist()
        if reply is not None:
            effects.append(reply)
        effects += self._farewells
        self._farewells = []
        for member_id in touched:
            member = self.state.members.get(member_id)
            if member is None:
                continue
            self._sessions.watch_revocation(member, now_ms)
            session = self._sessions[member_id]
            if session.stream_id != NO_STREAM and session.told != (member.epoch, member.assigned):
                push = self._tell(member_id)
                group_id = self.state.group_id
                effects.append(Send(group_id, session.stream_id, push, is_reply=False))
        return effects

    def _persist(self) -> list[Effect]:
        changes = self.state.take_changes()
        return [Persist(self.state.group_id, changes)] if changes else []
