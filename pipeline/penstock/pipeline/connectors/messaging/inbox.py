"""What the thread of a connection and Spark's have in common: a ledger, and what went wrong."""

from __future__ import annotations

import threading
import time
from collections.abc import Hashable
from typing import Any, Generic, TypeVar

from penstock.pipeline.connectors.messaging.ledger import Ledger
from penstock.pipeline.errors import ConnectorError

Tag = TypeVar("Tag")


class Inbox(Generic[Tag]):
    """Safe for threads. What asks about messages raises ConnectorError once the link has failed."""

    def __init__(self, where: str, outage_s: float) -> None:
        self._where = where
        self._outage_s = outage_s
        self._ledger: Ledger[Tag] = Ledger()
        self._changed = threading.Condition()
        self._error: ConnectorError | None = None
        self._down: tuple[float, str] | None = None
        self._arrived_at = time.monotonic()

    # --- for the link -----------------------------------------------------------------------

    def arrive(
        self, row: tuple[Any, ...], tag: Tag | None, identity: Hashable | None, *, again: bool
    ) -> bool:
        """As ``Ledger.arrive``."""
        with self._changed:
            is_wanted = self._ledger.arrive(row, tag, identity, again=again)
            self._arrived_at = time.monotonic()
            self._changed.notify_all()
            return is_wanted

    def up(self, *, forgotten: bool = False) -> None:
        """The connection stands; ``forgotten`` says that the broker knows nothing of us."""
        with self._changed:
            self._down = None
            self._arrived_at = time.monotonic()
            if forgotten:
                self._ledger.forget_identities()

    def lost(self, reason: str, *, keep: bool) -> None:
        """The connection is gone, or still is; see ``Ledger.lost``."""
        with self._changed:
            if self._down is None:
                self._ledger.lost(keep=keep)
                self._down = (time.monotonic(), reason)
            self._down = (self._down[0], reason)

    def fail(self, error: ConnectorError) -> None:
        """Nothing more will come. The first reason counts."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    # --- for Spark --------------------------------------------------------------------------

    def plan(self, start: int, most: int | None, wait_s: float) -> int:
        """As ``Ledger.plan``, after waiting for so long for a first message."""
        with self._changed:
            self._changed.wait_for(lambda: self._error or self._ledger.end > start, wait_s)
            self._check()
            return self._ledger.plan(start, most)

    def rows(self, start: int, end: int) -> list[tuple[Any, ...]]:
        """As ``Ledger.rows``."""
        with self._changed:
            return self._ledger.rows(start, end)

    def done(self, upto: int) -> list[Tag]:
        """As ``Ledger.done``."""
        with self._changed:
            return self._ledger.done(upto)

    def quiet_s(self) -> float:
        """For how long nothing has arrived; 0 while there is no connection."""
        with self._changed:
            self._check()
            return 0.0 if self._down else time.monotonic() - self._arrived_at

    def _check(self) -> None:
        if self._error is not None:
            raise self._error
        if self._down is not None and time.monotonic() - self._down[0] >= self._outage_s:
            raise ConnectorError(
                f"{self._where}: no connection for {self._outage_s:g} s: {self._down[1]}; next: "
                "see to the broker, or raise reconnectTimeout"
            )
