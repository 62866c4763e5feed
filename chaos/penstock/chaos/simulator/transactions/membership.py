"""A member of a consumer group, led by the client's own core."""

from __future__ import annotations

from typing import Final

from penstock.chaos.simulator.history import check
from penstock.chaos.simulator.network import End
from penstock.chaos.simulator.scheduler import Timer
from penstock.chaos.simulator.transactions.positions import keeper_of
from penstock.chaos.simulator.transactions.scripts import ScriptedProcess
from penstock.client.core.backoff import Backoff
from penstock.client.core.member import (
    Closed,
    DropStream,
    Effect,
    Event,
    Failed,
    Leaving,
    Member,
    MemberSettings,
    Opened,
    OpenStream,
    Polled,
    Received,
    Reconciled,
    Send,
    SendAnew,
    Subscribed,
    Ticked,
)
from penstock.client.core.subscription import Rebalance, Subscription
from penstock.v1 import groups_pb2
from penstock.wire.errors import CoordinatorNotAvailableError
from penstock.wire.ids import TopicPartition

_MAX_POLL_MS: Final = 4000


class GroupMember:
    """One membership of a process. ``epoch`` is what its requests are to carry."""

    def __init__(
        self, process: ScriptedProcess, group: str, topic: str, session_timeout_ms: int
    ) -> None:
        rng = process.place.rng
        self.group = group
        self.member_id = rng.randbytes(8).hex()
        self._process = process
        self._topic = topic
        self._keeper = keeper_of(group)
        self._core = Member(
            MemberSettings(
                group_id=group,
                member_id=self.member_id,
                client_id="simulated",
                group_instance_id="",
                assignor="",
                rack_id="",
                session_timeout_ms=session_timeout_ms,
                max_poll_interval_ms=_MAX_POLL_MS,
            ),
            Backoff(20, 200, rng.random),
        )
        self._end: End | None = None
        self._timer: Timer | None = None
        self._over = False

    @property
    def epoch(self) -> int:
        """The newest that the group has told."""
        return self._core.epoch

    @property
    def owned(self) -> frozenset[TopicPartition]:
        """What it may read, once ``changes`` is empty."""
        return self._core.owned

    def join(self) -> None:
        """Become a member, as soon as the coordinator is found."""
        self._handle(Subscribed(Subscription((self._topic,))))

    def changes(self) -> list[Rebalance]:
        """The application polls: what it has to give back and has lost, and may take over. It has
        done so by the time that it goes on.
        """
        self._handle(Polled())
        found: list[Rebalance] = []
        told = self._process.place.told
        while (change := self._core.pending_rebalance) is not None:
            found.append(change)
            told.rebalanced(self.group, self.member_id, self.epoch, change)
            self._handle(Reconciled(change))
        return found

    def leave(self) -> None:
        """Say goodbye."""
        self._handle(Leaving())
        self.abandon()

    def abandon(self) -> None:
        """Say nothing any more."""
        self._over = True
        self._drop()

    # The core.

    def _handle(self, event: Event) -> None:
        if self._over or not self._process.alive:
            return
        effects = self._core.handle(event, self._process.place.scheduler.now_ms)
        self._core.validate()
        for effect in effects:
            self._carry_out(effect)
        self._arm()

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case OpenStream():
                self._open()
            case DropStream():
                self._drop()
            case Send(request):
                if self._end is not None:
                    self._end.send(request)
            case SendAnew():
                pass  # Nobody hears of it: the session times out.
            case Failed(error):
                check(False, f"group {self.group}: a member is refused for good: {error!r}")

    def _open(self) -> None:
        process = self._process
        process.run(process.find_leader(self._keeper))
        end = process.place.network.connect(
            process, process.leader(self._keeper), "group heartbeat"
        )
        end.on_message = lambda response: self._received(end, response)
        end.on_broken = lambda: self._broken(end)
        self._end = end
        process.later(0, lambda: self._handle(Opened()) if end is self._end else None)

    def _drop(self) -> None:
        end, self._end = self._end, None
        if end is not None:
            end.close()

    def _received(self, end: End, response: groups_pb2.GroupHeartbeatResponse) -> None:
        if end is self._end:
            self._handle(Received(response))

    def _broken(self, end: End) -> None:
        if end is self._end:
            self._end = None
            self._handle(Closed(CoordinatorNotAvailableError("the stream broke")))

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        due_ms = self._core.next_deadline_ms()
        if due_ms != float("inf"):
            delay_ms = max(int(due_ms) + 1 - self._process.place.scheduler.now_ms, 0)
            self._timer = self._process.later(delay_ms, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self._handle(Ticked())
