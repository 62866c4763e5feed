"""Answers that clients have not taken yet: bounded, for each connection and for all.

An answer is in memory until the client's flow control has let all of it go. Of one that asks and
never reads they would grow without end; so who has too much unsent waits before more is read.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Protocol

import structlog

from penstock.wire.errors import RequestTimedOutError

log = structlog.get_logger()

_WAIT_S: Final = 15.0
"""So long an answer waits for room; its client asks again then."""

_HURRY: Final = 6
"""While the node is full, who takes nothing has this part of the time until it is closed."""

_CHECK_S: Final = 1.0
_TELL_EVERY_S: Final = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class UnsentLimits:
    """The settings of this name, see docs/operating/limits.md."""

    max_bytes: int
    connection_max_bytes: int
    stalled_ms: int


class UnsentObserver(Protocol):
    """What is measured."""

    def answer_refused(self) -> None:
        """An answer found no room in time."""
        ...

    def client_stalled(self) -> None:
        """A connection was closed."""
        ...


class _Account:
    """What one connection has yet to take."""

    __slots__ = ("bytes", "moved_s", "peer", "shares", "waiting")

    def __init__(self, peer: str, now_s: float) -> None:
        self.peer = peer
        self.bytes = 0
        self.shares = 0
        self.moved_s = now_s  # When something was last taken, or there was nothing to take.
        self.waiting: deque[asyncio.Future[None]] = deque()


class Share:
    """The part of one call; until ``release``."""

    __slots__ = ("_account", "_bytes", "_unsent", "starved")

    def __init__(self, unsent: Unsent, account: _Account) -> None:
        self._unsent = unsent
        self._account = account
        self._bytes = 0
        self.starved = False

    def left(self) -> int:
        """What may be read for this answer now; at 0 nothing may, and it is ``starved``."""
        left = max(self._unsent.room(self._account), 0)
        self.starved = not left
        return left

    def take(self, size_bytes: int) -> None:
        """So much more is kept for it."""
        self._bytes += size_bytes
        self._unsent.taken(self._account, size_bytes)

    async def room(self, until_s: float) -> None:
        """Wait until something may be read. Raises RequestTimedOutError."""
        await self._unsent.wait_for_room(self._account, until_s)

    def release(self, *_: Any) -> None:
        """The client has the answer, or is gone."""
        self._unsent.released(self._account, self._bytes)
        self._bytes = 0


class Unsent:
    """All of them. Used on one event loop; ``close`` ends a connection, on another thread.

    Three quarters of ``max_bytes`` are for whoever asks, the last one for connections that have
    nothing to take yet: who reads what it asked for is served while others do not.
    """

    def __init__(
        self, limits: UnsentLimits, close: Callable[[str], bool], observer: UnsentObserver
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._limits = limits
        self._close = close
        self._observer = observer
        self._accounts: dict[str, _Account] = {}
        self._waiting: OrderedDict[_Account, None] = OrderedDict()  # Whose turn it is next.
        self._total = 0
        self._check: asyncio.TimerHandle | None = None
        self._told_s = -_TELL_EVERY_S
        self._closing: set[asyncio.Future[Any]] = set()

    @property
    def total_bytes(self) -> int:
        """What all clients have yet to take. On any thread."""
        return self._total

    def share(self, peer: str) -> Share:
        """The part of a call of this connection."""
        account = self._accounts.get(peer)
        if account is None:
            account = self._accounts[peer] = _Account(peer, self._loop.time())
        account.shares += 1
        return Share(self, account)

    def until_s(self) -> float:
        """When an answer that begins to be made now has waited long enough."""
        return self._loop.time() + _WAIT_S

    async def stop(self) -> None:
        """Look no more at who takes nothing."""
        if self._check is not None:
            self._check.cancel()
            self._check = None
        if self._closing:
            await asyncio.wait(self._closing)

    # What shares ask.

    def room(self, account: _Account) -> int:
        """What may be kept for it beside what there is; not above 0 when nothing may."""
        limits = self._limits
        whole = limits.max_bytes if not account.bytes else limits.max_bytes * 3 // 4
        return min(limits.connection_max_bytes - account.bytes, whole - self._total)

    def taken(self, account: _Account, size_bytes: int) -> None:
        """An answer of the connection has grown."""
        if not account.bytes:
            account.moved_s = self._loop.time()
        account.bytes += size_bytes
        self._total += size_bytes
        if self._check is None:
            self._check = self._loop.call_later(_CHECK_S, self._look)

    def released(self, account: _Account, size_bytes: int) -> None:
        """An answer has left, or never will; or there was none."""
        account.bytes -= size_bytes
        self._total -= size_bytes
        account.shares -= 1
        if size_bytes:
            account.moved_s = self._loop.time()
        if not account.shares:
            del self._accounts[account.peer]
        if self._waiting:
            self._wake()

    async def wait_for_room(self, account: _Account, until_s: float) -> None:
        """Wait in turn."""
        while self.room(account) <= 0:
            turn = self._loop.create_future()
            account.waiting.append(turn)
            self._waiting[account] = None
            try:
                async with asyncio.timeout_at(until_s):
                    await turn
            except TimeoutError:
                self._observer.answer_refused()
                raise RequestTimedOutError(self._why_refused(account)) from None
            finally:
                if not turn.done() or turn.cancelled():
                    self._leave(account, turn)

    def _leave(self, account: _Account, turn: asyncio.Future[None]) -> None:
        if turn in account.waiting:
            account.waiting.remove(turn)
        if not account.waiting:
            self._waiting.pop(account, None)

    def _wake(self) -> None:
        """Let those in whom there is room for, one of each connection."""
        for account in [*self._waiting]:
            if self.room(account) <= 0:
                continue
            while account.waiting and (turn := account.waiting.popleft()).done():
                pass
            if not turn.done():
                turn.set_result(None)
            if account.waiting:
                self._waiting.move_to_end(account)
            else:
                del self._waiting[account]

    def _why_refused(self, account: _Account) -> str:
        limits = self._limits
        if limits.connection_max_bytes <= account.bytes:
            return (
                f"this connection has {account.bytes} bytes of answers to take, and "
                f"unsent.connection.max.bytes is {limits.connection_max_bytes}; next: read what "
                "was asked for before asking for more, or ask for less at a time (fetch.max.bytes)"
            )
        return (
            f"clients have {self._total} bytes of this node's answers to take, and "
            f"unsent.max.bytes is {limits.max_bytes}; next: ask again, and if that does not help "
            "raise unsent.max.bytes as far as the node's memory allows"
        )

    # Who takes nothing.

    def _look(self) -> None:
        self._check = None
        if not self._total:
            return
        self._check = self._loop.call_later(_CHECK_S, self._look)
        allowed_s = self._limits.stalled_ms / 1000
        if self._waiting and self._total >= self._limits.max_bytes * 3 // 4:
            allowed_s /= _HURRY
        now_s = self._loop.time()
        for account in [*self._accounts.values()]:
            if account.bytes and now_s - account.moved_s >= allowed_s:
                self._end(account, now_s)

    def _end(self, account: _Account, now_s: float) -> None:
        self._observer.client_stalled()
        if now_s - self._told_s >= _TELL_EVERY_S:
            self._told_s = now_s
            log.warning(
                "a client that takes nothing of its answers was disconnected",
                peer=account.peer,
                unsent_bytes=account.bytes,
                silent_s=round(now_s - account.moved_s),
            )
        account.moved_s = now_s  # Once, and again should it not have helped.
        closing = self._loop.run_in_executor(None, self._close, account.peer)
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)
