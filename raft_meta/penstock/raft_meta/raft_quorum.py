"""The quorum as the event loop sees it: proposals as futures, a state machine fed in order."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Final

import structlog

from penstock.raft_meta.authentication import PeerAuthentication
from penstock.raft_meta.config import ControllerConfig
from penstock.raft_meta.connecting import NodeConnector
from penstock.raft_meta.credentials import NodeTls
from penstock.raft_meta.directory_lock import lock
from penstock.raft_meta.driver import VoterThread
from penstock.raft_meta.elections import RaftTiming
from penstock.raft_meta.guard import MAX_COMMAND_BYTES
from penstock.raft_meta.journal import LmdbJournal
from penstock.raft_meta.link import Message, RaftLink
from penstock.raft_meta.metering import SyncObserver, nobody_observes
from penstock.raft_meta.punctuality import Punctuality
from penstock.raft_meta.quorum import (
    FeatureLevels,
    Leadership,
    LeadershipListener,
    MachineState,
    QuorumStatus,
    Role,
    StateMachine,
)
from penstock.raft_meta.reminders import Reminders, reminder_of
from penstock.raft_meta.room import told_by_name
from penstock.raft_meta.rules.changing import Refusal
from penstock.raft_meta.snapshots import SnapshotStore
from penstock.raft_meta.taking import SnapshotTaking
from penstock.raft_meta.voter import (
    ChangeRefused,
    Committed,
    Event,
    HandOverFailed,
    Installed,
    LevelRefused,
    ReadReady,
    Refused,
    Undecided,
    Voter,
    VotersChanged,
    VotersCommitted,
)
from penstock.raft_meta.voter_refusals import change_refused, level_refused, voter_is_elsewhere
from penstock.raft_meta.voters import Address, VoterSet
from penstock.wire.errors import (
    InvalidRequestError,
    LeaderHint,
    NotControllerError,
    RequestTimedOutError,
)

log = structlog.get_logger()

_NOBODY: Final = -1
_REMINDER_S: Final = 5.0
_PATIENCE: Final = 0.8
"""The part of a request's time in which a new voter must have caught up."""
_SLICE_S: Final = 0.02
"""The state machine is fed for so long at a time."""


class RaftQuorum:
    """A Quorum (penstock.raft_meta.quorum) on pysyncobj. One event loop.

    ``link`` must be served on the controller port. The state machine is called on the loop, and
    is the loop's alone; ``levels`` are the feature levels that it has.
    """

    def __init__(
        self,
        config: ControllerConfig,
        machine: StateMachine,
        tls: NodeTls | None = None,
        *,
        levels: FeatureLevels = FeatureLevels(),  # noqa: B008 - it never changes.
        on_synced: SyncObserver = nobody_observes,
    ) -> None:
        self._config = config
        self._on_synced = on_synced
        self._machine = machine
        self._levels = levels
        self._machine_state = MachineState(0, 0)  # Replaced as a whole: the Raft thread reads it.
        self._tokens = itertools.count()
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._changing: dict[int, int] = {}  # Token to the node that is added or removed.
        self._listeners: list[LeadershipListener] = []
        self._successor: asyncio.Future[bool] | None = None  # While the office is handed over.
        self._lock = -1
        self._running = False
        self._applied_index = 0  # The state machine's.
        self._delivered_index = 0  # Up to here everything is applied or among the events below.
        self._events: deque[Event] = deque()  # What the state machine has yet to be fed.
        self._taking_later = False
        self._status = QuorumStatus(config.node_id, Role.FOLLOWER, 0, -1, 0, 0, 0)
        self._directory_id = b""
        self._voters: VoterSet | None = None
        self._voters_known = asyncio.Event()
        self._leadership: Leadership | None = None  # As it was told last.
        self._reminder: asyncio.TimerHandle | None = None
        self._reminders = Reminders()
        self._punctuality = Punctuality(self._loop_was_late)
        self.link = RaftLink(
            node_id=config.node_id,
            cluster_id=config.cluster_id,
            voters=config.voters,
            advertised=config.reached_at,
            connector=NodeConnector(tls),
            authentication=PeerAuthentication(config.cluster_id, tls=tls is not None),
            on_message=self._on_message,
            on_lost=self._on_peer_lost,
        )

    async def start(self) -> None:
        """Read the disk and take part. Raises DataDirectoryError for one that is not ours."""
        self._loop = asyncio.get_running_loop()
        self._failed: asyncio.Future[None] = self._loop.create_future()
        self._lock = lock(self._config.data_dir)
        self._snapshots = SnapshotStore(self._config.data_dir)
        self._thread = VoterThread(
            self._make_voter,
            on_output=self._from_thread,
            on_failed=self._failed_in_thread,
            on_room=self._room_changed_in_thread,
            loop_late_since_s=self._punctuality.late_since_s,
        )
        self._taking = SnapshotTaking(
            self._config,
            self._machine,
            self._snapshots,
            submit=self._thread.submit,
            on_failed=self._end,
        )
        # From here on, since a voter that is alone leads before this coroutine goes on.
        self._running = True
        try:
            await asyncio.wrap_future(self._thread.start())
        except BaseException as error:
            self._running = False
            self._thread.stop()
            if not isinstance(error, asyncio.CancelledError):  # Else it may be opening it still.
                os.close(self._lock)
            raise
        self.link.start(self._directory_id)
        self._thread.submit(lambda _voter, _now_s: None)  # What the disk held becomes events.
        self._reminder = self._loop.call_later(_REMINDER_S, self._remind)
        self._punctuality.start()

    def _make_voter(self, now_s: float) -> Voter:
        config = self._config
        journal = LmdbJournal(
            config.data_dir / "journal",
            cluster_id=config.cluster_id,
            node_id=config.node_id,
            await_room=self._thread.await_room,
            may_found=config.may_found,
            on_synced=self._on_synced,
        )
        self._directory_id = journal.directory_id
        try:
            return Voter(
                node_id=config.node_id,
                voters=config.voters,
                addresses=config.voters,
                journal=journal,
                snapshots=self._snapshots,
                timing=RaftTiming(
                    election_min_s=config.election_timeout_min_ms / 1000,
                    election_max_s=config.election_timeout_max_ms / 1000,
                    heartbeat_s=config.raft_heartbeat_ms / 1000,
                ),
                rng=random.Random(),
                retained_entries=max(config.snapshot_entries // 5, 2),
                now_s=now_s,
                await_room=self._thread.await_room,
                supported_level=self._levels.supported,
                machine=lambda: self._machine_state,
                why_unreadable=self._levels.why_unreadable,
            )
        except BaseException:
            journal.abandon()
            raise

    async def hand_over(self) -> bool:
        """Have another voter lead, if this one does; whether another one is known to.

        Takes no longer than an election timeout, and no time at all when no other voter answers.
        Until it is over proposals are refused with NotControllerError.
        """
        if not self._running or self._status.role is not Role.LEADER:
            return False
        successor = self._successor
        if successor is None:
            if not self._thread.offer(lambda voter, now_s: voter.hand_over(now_s), 0):
                return False  # It waits for its disk.
            successor = self._successor = self._loop.create_future()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._config.election_timeout_max_ms / 1000):
                return await asyncio.shield(successor)
        if self._successor is successor:
            self._successor = None  # Whoever asks again has the voter asked again.
        return False

    def renounce(self) -> None:
        """Lead no more in this term; see Quorum.renounce."""
        self._thread.submit(lambda voter, now_s: voter.resign(now_s, even_alone=True))

    async def stop(self) -> None:
        """Leave. Proposals under way end with RequestTimedOutError. Safe to call twice."""
        if not self._running:
            return
        self._running = False
        if self._reminder is not None:
            self._reminder.cancel()
        self._punctuality.stop()
        await self.link.stop()
        self._thread.stop()
        await self._loop.run_in_executor(None, self._thread.join)
        await self._taking.stop()
        os.close(self._lock)
        self._abandon("this controller stops; ask another")

    def _abandon(self, why: str) -> None:
        for future in list(self._waiting.values()):
            if not future.done():
                future.set_exception(RequestTimedOutError(f"{why}; the command may take effect"))

    def wait_failed(self) -> asyncio.Future[None]:
        """A future that fails with what ended the engine, and never ends otherwise."""
        return asyncio.shield(self._failed)

    def status(self) -> QuorumStatus:
        """The voter's view after its last step, and what the state machine has applied by now."""
        voters = self._status.voters or ()
        others = frozenset(member.node_id for member in voters) - {self._config.node_id}
        return replace(
            self._status,
            applied_index=self._applied_index,
            unconnected=others - self.link.connected(),
            founding_refusals={**self._status.founding_refusals, **self.link.refusals()},
        )

    def add_leadership_listener(self, listener: LeadershipListener) -> None:
        """Have every change of leadership told, in order, after what was applied before it."""
        self._listeners.append(listener)

    # Proposals.

    def submit(self, payload: bytes, *, level: int = 0) -> asyncio.Future[bytes]:
        """Replicate a command; the future has its result once it is applied here.

        ``level`` is as of Quorum.propose. Commands enter the log in the order of the calls. See
        Quorum.submit for what is raised.
        """
        if len(payload) > MAX_COMMAND_BYTES:
            raise InvalidRequestError(
                f"the command has {len(payload)} bytes, and {MAX_COMMAND_BYTES} are allowed; "
                "split the request"
            )
        return self._ask(
            lambda voter, token, _now_s: voter.propose(token, payload, level=level), len(payload)
        )

    async def propose(
        self, payload: bytes, *, timeout_ms: int | None = None, level: int = 0
    ) -> bytes:
        """Submit a command and wait for its result; see Quorum.propose for what is raised."""
        result: bytes = await self._wait(self.submit(payload, level=level), timeout_ms)
        return result

    async def read_index(self, *, timeout_ms: int | None = None) -> int:
        """Wait until everything committed before the call is applied here."""
        future = self._ask(lambda voter, token, _now_s: voter.read(token))
        index: int = await self._wait(future, timeout_ms)
        return index

    def _ask(
        self,
        operation: Callable[[Voter, int, float], None],
        size_bytes: int = 0,
        about: int = _NOBODY,
        token: int | None = None,
    ) -> asyncio.Future[Any]:
        if not self._running:
            raise NotControllerError("this controller is stopped; ask another")
        token = next(self._tokens) if token is None else token
        if not self._thread.offer(lambda voter, now_s: operation(voter, token, now_s), size_bytes):
            raise NotControllerError(
                f"controller {self._config.node_id} waits for its disk and takes nothing more; "
                "nothing was done: ask again soon, or another one"
            )
        future: asyncio.Future[Any] = self._loop.create_future()
        self._waiting[token] = future
        if about != _NOBODY:
            self._changing[token] = about
            future.add_done_callback(lambda _future: self._changing.pop(token, None))
        future.add_done_callback(lambda _future: self._waiting.pop(token, None))
        return future

    async def _wait(self, future: asyncio.Future[Any], timeout_ms: int | None) -> Any:
        wait_ms = self._config.propose_timeout_ms if timeout_ms is None else timeout_ms
        # A bare timer: asyncio.timeout would cost more than all else on the loop in a proposal.
        timer = self._loop.call_later(wait_ms / 1000, self._time_out, future, wait_ms)
        try:
            return await future
        finally:
            timer.cancel()

    def _time_out(self, future: asyncio.Future[Any], wait_ms: int) -> None:
        if not future.done():
            future.set_exception(
                RequestTimedOutError(
                    f"not committed within {wait_ms} ms: too few of the controllers "
                    f"{self._voter_ids()} answer; the command may still take effect"
                )
            )

    def _voter_ids(self) -> list[int]:
        return sorted(self._config.voters if self._voters is None else self._voters.node_ids)

    def address_of(self, node_id: int) -> Address | None:
        """Where a controller is reached; None for one that is not known."""
        if node_id == self._config.node_id:
            return self._config.reached_at
        return next(iter(self.link.addresses_of(node_id)), None)

    def leader_hint(self, leader_id: int, term: int) -> LeaderHint | None:
        """Where a leader is, if it is another node and known."""
        address = self.address_of(leader_id)
        if address is None or leader_id == self._config.node_id:
            return None
        return LeaderHint(leader_id, term, *address)

    # Who votes.

    async def add_voter(
        self, node_id: int, address: Address, *, timeout_ms: int | None = None
    ) -> VoterSet:
        """Make a controller a voter once it is caught up; see Quorum.add_voter."""
        self._check_address(node_id, address)
        wait_ms = self._config.propose_timeout_ms if timeout_ms is None else timeout_ms
        # The voter gives up first, and knows why.
        patience_s = wait_ms / 1000 * _PATIENCE
        token = next(self._tokens)
        try:
            voters: VoterSet = await self._wait(
                self._ask(
                    lambda voter, token, now_s: voter.add_voter(
                        token, node_id, address, now_s, timeout_s=patience_s
                    ),
                    about=node_id,
                    token=token,
                ),
                wait_ms,
            )
        except asyncio.CancelledError:
            # The client is gone, and its change would hold up all others.
            self._thread.submit(lambda voter, _now_s: voter.stop_adding(token))
            raise
        return voters

    def _check_address(self, node_id: int, address: Address) -> None:
        """Refuse to look for a voter where it is neither known nor heard."""
        known = None if self._voters is None else self._voters.get(node_id)
        is_self = node_id == self._config.node_id
        heard = self._config.reached_at if is_self else self.link.heard_at(node_id)
        if known is not None and heard is not None and address not in (known.address, heard):
            raise voter_is_elsewhere(node_id, address, known=known.address, heard=heard)

    async def remove_voter(self, node_id: int, *, timeout_ms: int | None = None) -> VoterSet:
        """Make a controller no voter; see Quorum.remove_voter."""
        voters: VoterSet = await self._wait(
            self._ask(
                lambda voter, token, now_s: voter.remove_voter(token, node_id, now_s),
                about=node_id,
            ),
            timeout_ms,
        )
        return voters

    async def wait_voters(self) -> None:
        """Return once a voter set is known here."""
        await self._voters_known.wait()

    def _voters_changed(self, voters: VoterSet | None, observers: Mapping[int, Address]) -> None:
        if voters is not None and voters != self._voters:
            log.info("voters", node_ids=sorted(voters.node_ids))
        self._voters = voters
        if voters is not None:
            self._voters_known.set()
        known = {} if voters is None else {member.node_id: member.address for member in voters}
        self.link.reach((known or dict(self._config.voters)) | dict(observers))
        if self._leadership is not None:  # Listeners tell others where controllers are.
            for listener in self._listeners:
                listener(self._leadership)

    def _remind(self) -> None:
        """Say what a controller that is no voter waits for."""
        self._reminder = self._loop.call_later(_REMINDER_S, self._remind)
        self._reminders.look(reminder_of(self.status(), self._voter_ids()), self._loop.time())

    # Between loop and thread.

    def _on_message(self, peer: int, message: Message) -> None:
        # Beyond what the thread takes messages are lost, as on the way; Raft sends them again.
        if self._running:
            self._thread.offer(
                lambda voter, now_s: voter.receive(peer, message, now_s), message.ByteSize()
            )

    def _on_peer_lost(self, peer: int) -> None:
        # Without it the election timeout tells.
        if self._running:
            self._thread.offer(lambda voter, now_s: voter.peer_lost(peer, now_s), 0)

    def _loop_was_late(self, since_s: float) -> None:
        # What the thread has not counted yet, as it slept; it looks by itself before it judges.
        self._thread.submit(lambda voter, now_s: voter.stood_still(since_s, now_s))

    def _from_thread(
        self, events: list[Event], messages: list[tuple[int, Message]], status: QuorumStatus
    ) -> None:
        applied = status.applied_index != self._status.applied_index
        self._status = status
        if events or messages or applied:
            self._to_loop(partial(self._on_output, events, messages, status.applied_index))

    def _room_changed_in_thread(self, error: Exception | None) -> bool:
        status = self._status
        # Decided once, and here: the loop may know of another voter set by now.
        resigns = error is not None and not (status.is_voter and len(status.voters or ()) == 1)
        if resigns:
            self._status = replace(
                status,
                role=Role.FOLLOWER,
                leader_id=-1,
                match_index={},
                hearings={},
                catching_up=None,
            )
        self._to_loop(partial(self._room_changed, error, status.term, resigns=resigns))
        return resigns

    def _room_changed(self, error: Exception | None, term: int, *, resigns: bool) -> None:
        if error is None:
            log.info("room on the disk again: this controller goes on")
            return
        log.error(
            "no room on the disk: this controller waits, and others decide without it",
            directory=str(self._config.data_dir),
            reason=str(error),
            next_step="free space on that disk; no restart is needed",
        )
        # Whoever acts on its leadership must not go on while another one may be elected.
        if resigns:
            self._leadership = Leadership(term, -1, leading=False)
            for listener in self._listeners:
                listener(self._leadership)

    def _failed_in_thread(self, error: BaseException) -> None:
        self._to_loop(partial(self._fail, error))

    def _to_loop(self, callback: partial[None]) -> None:
        with contextlib.suppress(RuntimeError):  # The loop is closed: nobody is left to tell.
            self._loop.call_soon_threadsafe(callback)

    def _fail(self, error: BaseException) -> None:
        if not self._failed.done():
            self._failed.set_exception(told_by_name(error, self._config.data_dir))
            self._failed.exception()  # Retrieved: a node that never waits logs no complaint.
            self._abandon("this controller failed")

    def _end(self, error: BaseException) -> None:
        self._fail(error)
        self._thread.stop()

    def _on_output(
        self, events: list[Event], messages: list[tuple[int, Message]], applied_index: int
    ) -> None:
        """Act on a step, after which the entries up to ``applied_index`` have become events."""
        try:
            # The events first: a message that is lost is sent again, and an event is not.
            self._events.extend(events)
            self._delivered_index = max(self._delivered_index, applied_index)
            for peer, message in messages:
                self.link.send(peer, message)
        except Exception as error:
            self._end(error)
            return
        if not self._taking_later:
            self._take_events()

    def _take_events(self) -> None:
        """Feed the state machine for a slice of time; the loop's next round goes on with the rest.

        The loop also carries Raft's messages: a voter that is busy must not pass for a dead one.
        """
        self._taking_later = False
        if self._failed.done():
            return
        until_s = time.monotonic() + _SLICE_S
        self._taking.feeding_begins()
        try:
            while self._events:
                self._take(self._events.popleft())
                if time.monotonic() >= until_s:
                    break
            if not self._events:  # What is no command, as a leader's first entry, counts too.
                self._applied_index = self._delivered_index
            self._machine_state = MachineState(self._applied_index, self._levels.in_force())
            self._taking.feeding_ends()
            self._taking.begin_if_due(self._applied_index)
            if self._events:
                self._taking_later = True
                self._loop.call_soon(self._take_events)
        except Exception as error:
            # A state machine that missed a command is another one than the other voters'.
            self._end(error)

    def _take(self, event: Event) -> None:
        match event:
            case Committed(index, term, payload, token):
                result = self._machine.apply(index, term, payload)
                self._taking.count(payload)
                self._applied_index = index
                self._answer(token, result)
            case Installed(snapshot):
                self._machine.install(snapshot.index, snapshot.data)
                self._applied_index = snapshot.index
                self._taking.count_anew()
            case ReadReady(token, index):
                self._answer(token, index)
            case Refused(token, leader_id):
                self._answer(token, self._not_controller(leader_id))
            case LevelRefused(token, level, lacking):
                self._answer(token, level_refused(level, lacking))
            case Undecided(token):
                message = "leadership was lost before the command was decided; it may take effect"
                self._answer(token, RequestTimedOutError(message))
            case HandOverFailed():
                self._hand_over_ended(succeeded=False)
            case Leadership(_, leader_id, _):
                if leader_id not in (self._config.node_id, _NOBODY):
                    self._hand_over_ended(succeeded=True)
                self._leadership = event
                for listener in self._listeners:
                    listener(event)
            case VotersChanged() | VotersCommitted() | ChangeRefused():
                self._take_change(event)

    def _take_change(self, event: VotersChanged | VotersCommitted | ChangeRefused) -> None:
        match event:
            case VotersChanged(voters, observers):
                self._voters_changed(voters, observers)
            case VotersCommitted(voters, token):
                self._answer(token, voters)
            case ChangeRefused():
                self._answer(event.token, self._refusal(event))

    def _not_controller(self, leader_id: int) -> NotControllerError:
        hint = self.leader_hint(leader_id, self._status.term)
        where = f"ask node {leader_id}" if hint else "ask again when one is elected"
        message = f"controller {self._config.node_id} is not the active one; {where}"
        return NotControllerError(message, leader=hint)

    def _refusal(self, refused: ChangeRefused) -> Exception:
        if refused.reason in (Refusal.NOT_LEADER, Refusal.HANDED_OVER):
            return self._not_controller(self._status.leader_id)
        node_id = self._changing.get(refused.token, _NOBODY)
        failure = self.link.failure_of(node_id)
        return change_refused(refused, node_id, self._status, failure=failure)

    def _hand_over_ended(self, *, succeeded: bool) -> None:
        successor, self._successor = self._successor, None
        if successor is not None and not successor.done():
            successor.set_result(succeeded)

    def _answer(self, token: int, result: bytes | int | VoterSet | Exception) -> None:
        future = self._waiting.get(token)
        if future is None or future.done():
            return
        if isinstance(result, Exception):
            future.set_exception(result)
        else:
            future.set_result(result)
