"""What a node tells the service manager that started it, in the words of sd_notify(3)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable, Mapping
from typing import Final

_LOOK_S: Final = 1.0
_PATS_A_WATCHDOG: Final = 3
"""So often within the watchdog's time: one or two may come late on a busy machine."""


class ServiceManager:
    """systemd, for a unit of ``Type=notify``; else nobody, and every word is for nothing.

    It is told when the node has started and when it stops, in between how it is, and, for the
    unit's ``WatchdogSec``, that its event loop turns. What cannot be delivered is dropped: a node
    serves, whether somebody watches it or not. Used on one event loop.
    """

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        self._address = _address(environment.get("NOTIFY_SOCKET", ""))
        self._watchdog_s = _watchdog_s(environment) if self._address else 0.0
        self._status = ""

    @property
    def pause_s(self) -> float:
        """How long ``keep_told`` pauses."""
        return min(_LOOK_S, self._watchdog_s / _PATS_A_WATCHDOG) if self._watchdog_s else _LOOK_S

    def ready(self) -> None:
        """The node has started, and whoever waits for that may go on."""
        self._tell("READY=1")

    def stopping(self) -> None:
        """The node is about to stop."""
        self._tell("STOPPING=1")

    async def keep_told(self, status: Callable[[], str]) -> None:
        """Say that the loop turns, and how the node is where that has changed; until cancelled."""
        while self._address:
            words = ["WATCHDOG=1"] if self._watchdog_s else []
            now = status().replace("\n", " ")
            if now != self._status:
                words.append(f"STATUS={now}")
                self._status = now
            if words:
                self._tell(*words)
            await asyncio.sleep(self.pause_s)

    def _tell(self, *words: str) -> None:
        if not self._address:
            return
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as to:
            # A manager that does not read must not hold up the loop.
            to.setblocking(False)
            to.connect(self._address)
            to.send("\n".join(words).encode())


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
