"""What a node tells the service manager that started it, in the words of sd_notify(3)."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Mapping
from typing import Final

import structlog

log = structlog.get_logger()

_LOOK_S: Final = 1.0
_STATUS_CHARACTERS: Final = 800
_PATS_A_WATCHDOG: Final = 3
"""So often within the watchdog's time: one or two may come late on a busy machine."""


class ServiceManager:
    """systemd, for a unit of ``Type=notify``; else nobody, and every word is for nothing.

    It is told when the node has started and when it stops, in between how it is, and, for the
    unit's ``WatchdogSec``, that its event loop turns. What cannot be delivered holds nothing up
    and is told again by ``keep_told``. Used on one event loop.
    """

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        self._address = _address(environment.get("NOTIFY_SOCKET", ""))
        self._watchdog_s = _watchdog_s(environment) if self._address else 0.0
        # Made now: a node that is out of descriptors serves, and must not be taken for hung.
        self._socket = _open() if self._address else None
        self._due: list[str] = []  # Words of which none may be lost, and that were not taken yet.
        self._is_ready = False
        self._told_status = ""

    def close(self) -> None:
        """Nothing more will be told."""
        if self._socket is not None:
            self._socket.close()

    @property
    def pause_s(self) -> float:
        """How long ``keep_told`` pauses."""
        return min(_LOOK_S, self._watchdog_s / _PATS_A_WATCHDOG) if self._watchdog_s else _LOOK_S

    def ready(self, status: Callable[[], str]) -> None:
        """The node has started, and whoever waits for that may go on."""
        self._is_ready = True
        self._due.append("READY=1")
        self._tell(_asked(status), pats=self._watchdog_s > 0)

    def stopping(self, status: str) -> None:
        """The node is about to stop. Its loop is watched in that, too."""
        self._due.append("STOPPING=1")
        self._tell(status, pats=self._is_ready and self._watchdog_s > 0)

    def failed(self, why: str) -> None:
        """The node ends for this reason, which stays to be read."""
        self._tell(why)

    async def keep_told(self, status: Callable[[], str]) -> None:
        """Say how the node is, and once it is ready that its loop turns; until cancelled.

        Before that nobody watches the loop: a start has the time that it takes.
        """
        while self._address:
            self._tell(_asked(status), pats=self._is_ready and self._watchdog_s > 0)
            await asyncio.sleep(self.pause_s)

    def _tell(self, status: str, *, pats: bool = False) -> None:
        """Raises nothing: a word that can't be told must not keep a node from anything."""
        status = _fit(status)
        words = [*self._due, *(["WATCHDOG=1"] if pats else [])]
        if status != self._told_status:
            words.append(f"STATUS={status}")
        if words and self._is_sent("\n".join(words)):
            self._due.clear()
            self._told_status = status

    def _is_sent(self, message: str) -> bool:
        if self._socket is None:
            return False
        try:
            self._socket.sendto(message.encode(), self._address)
        except OSError:
            return False
        return True


def _open() -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    # A manager that does not read must not hold up the loop.
    made.setblocking(False)
    return made


def _fit(status: str) -> str:
    """One line, of what any manager takes: systemd throws whole messages of 4,096 bytes away."""
    line = "".join(letter if letter.isprintable() else " " for letter in status)
    return line if len(line) <= _STATUS_CHARACTERS else f"{line[: _STATUS_CHARACTERS - 1]}…"


def _asked(status: Callable[[], str]) -> str:
    """Whatever it says; a fault in there must not be taken for a loop that hangs."""
    try:
        return status()
    except Exception:
        log.exception("the node does not know how it is")
        return "the node does not know how it is; see its log"


def _address(named: str) -> str:
    """A path, or a name in Linux's abstract namespace, which begins with @."""
    return f"\0{named[1:]}" if named.startswith("@") else named


def _watchdog_s(environment: Mapping[str, str]) -> float:
    """The time after which the manager takes this process for hung; 0 if it does not watch it."""
    if environment.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return 0.0
    try:
        return max(0, int(environment.get("WATCHDOG_USEC", "0"))) / 1e6
    except ValueError:
        return 0.0
