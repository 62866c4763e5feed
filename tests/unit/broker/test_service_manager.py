"""What a service manager is told, by a socket as systemd has it."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from penstock.broker.service_manager import ServiceManager


class Listener:
    """The manager's end."""

    def __init__(self, directory: Path) -> None:
        self.address = str(directory / "notify")
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(self.address)
        self._socket.settimeout(10)

    def next(self) -> list[str]:
        return self._socket.recv(4096).decode().split("\n")

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[Listener]:
    made = Listener(tmp_path)
    yield made
    made.close()


def test_start_and_stop_are_told(listener: Listener) -> None:
    manager = ServiceManager({"NOTIFY_SOCKET": listener.address})
    manager.ready()
    manager.stopping()
    assert [listener.next(), listener.next()] == [["READY=1"], ["STOPPING=1"]]


async def test_the_loop_and_what_has_changed_are_told_again_and_again(listener: Listener) -> None:
    manager = ServiceManager({"NOTIFY_SOCKET": listener.address, "WATCHDOG_USEC": "30000"})
    assert manager.pause_s == pytest.approx(0.01)
    states = iter(["it starts", "it starts", "it\nserves"])
    telling = asyncio.create_task(manager.keep_told(lambda: next(states, "it\nserves")))
    heard = [await asyncio.to_thread(listener.next) for _ in range(4)]
    telling.cancel()
    with suppress(asyncio.CancelledError):
        await telling
    assert heard == [
        ["WATCHDOG=1", "STATUS=it starts"],
        ["WATCHDOG=1"],
        ["WATCHDOG=1", "STATUS=it serves"],
        ["WATCHDOG=1"],
    ]


@pytest.mark.parametrize(
    ("environment", "pause_s"),
    [
        ({}, 1.0),
        ({"WATCHDOG_USEC": "600000000"}, 1.0),
        ({"WATCHDOG_USEC": "1500000"}, 0.5),
        ({"WATCHDOG_USEC": "1500000", "WATCHDOG_PID": str(os.getpid())}, 0.5),
        # Of a process that this one descends from.
        ({"WATCHDOG_USEC": "1500000", "WATCHDOG_PID": str(os.getpid() + 1)}, 1.0),
        ({"WATCHDOG_USEC": "soon"}, 1.0),
        ({"WATCHDOG_USEC": "-3"}, 1.0),
    ],
)
def test_several_pats_come_within_the_watchdogs_time(
    environment: dict[str, str], pause_s: float
) -> None:
    assert ServiceManager({"NOTIFY_SOCKET": "/n", **environment}).pause_s == pause_s


async def test_who_has_no_manager_tells_nobody() -> None:
    manager = ServiceManager({"WATCHDOG_USEC": "1000"})
    manager.ready()
    await manager.keep_told(lambda: "nobody asks")
    manager.stopping()


async def test_a_manager_that_is_gone_or_does_not_read_holds_nothing_up(
    listener: Listener, tmp_path: Path
) -> None:
    ServiceManager({"NOTIFY_SOCKET": str(tmp_path / "nowhere")}).ready()
    manager = ServiceManager({"NOTIFY_SOCKET": listener.address})
    for _ in range(10_000):  # More than any queue of datagrams takes.
        manager.ready()


def test_an_abstract_address(tmp_path: Path) -> None:
    name = f"penstock-{os.getpid()}-{tmp_path.name}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as heard:
        heard.bind(f"\0{name}")
        heard.settimeout(10)
        ServiceManager({"NOTIFY_SOCKET": f"@{name}"}).ready()
        assert heard.recv(100) == b"READY=1"
