"""What a service manager is told, by a socket as systemd has it."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
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

    def fill(self) -> None:
        """As if it did not read for long."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as others:
            others.setblocking(False)
            with suppress(BlockingIOError):
                for _ in range(100_000):
                    others.sendto(b"noise", self.address)

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[Listener]:
    made = Listener(tmp_path)
    yield made
    made.close()


Make = Callable[[dict[str, str]], ServiceManager]


@pytest.fixture
def made() -> Iterator[Make]:
    with ExitStack() as stack:

        def make(environment: dict[str, str]) -> ServiceManager:
            manager = ServiceManager(environment)
            stack.callback(manager.close)
            return manager

        yield make


def test_start_stop_and_failure_are_told_with_how_it_is(made: Make, listener: Listener) -> None:
    manager = made({"NOTIFY_SOCKET": listener.address})
    manager.ready(lambda: "it serves")
    manager.stopping("it stops")
    manager.failed("the disk\nis gone")
    assert [listener.next() for _ in range(3)] == [
        ["READY=1", "STATUS=it serves"],
        ["STOPPING=1", "STATUS=it stops"],
        ["STATUS=the disk is gone"],
    ]


class Told:
    """Keeps a manager told while it is entered."""

    def __init__(self, manager: ServiceManager, status: Callable[[], str]) -> None:
        self._task = asyncio.create_task(manager.keep_told(status))

    async def __aenter__(self) -> None:
        return

    async def __aexit__(self, *_: object) -> None:
        assert not self._task.done()
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task


WATCHED = {"WATCHDOG_USEC": "30000"}


async def test_the_loop_and_what_has_changed_are_told_again_and_again(
    made: Make, listener: Listener
) -> None:
    manager = made({"NOTIFY_SOCKET": listener.address, **WATCHED})
    assert manager.pause_s == pytest.approx(0.01)
    manager.ready(lambda: "it serves")
    states = iter(["it serves", "it serves", "it\nhas lost its leader"])
    async with Told(manager, lambda: next(states, "it serves")):
        heard = [await asyncio.to_thread(listener.next) for _ in range(5)]
    assert heard[1:] == [
        ["WATCHDOG=1"],
        ["WATCHDOG=1"],
        ["WATCHDOG=1", "STATUS=it has lost its leader"],
        ["WATCHDOG=1", "STATUS=it serves"],
    ]


async def test_nobody_is_to_watch_a_start(made: Make, listener: Listener) -> None:
    manager = made({"NOTIFY_SOCKET": listener.address, **WATCHED})
    states = iter(["it starts", "it starts", "it starts", "it recovers"])
    async with Told(manager, lambda: next(states, "it recovers")):
        heard = [await asyncio.to_thread(listener.next) for _ in range(2)]
    assert heard == [["STATUS=it starts"], ["STATUS=it recovers"]]


def test_a_stop_is_watched_from_its_first_word(made: Make, listener: Listener) -> None:
    manager = made({"NOTIFY_SOCKET": listener.address, **WATCHED})
    manager.ready(lambda: "it serves")
    manager.stopping("it stops")
    listener.next()
    assert listener.next() == ["STOPPING=1", "WATCHDOG=1", "STATUS=it stops"]


@pytest.mark.parametrize(
    ("status", "told"),
    [
        ("x" * 4_096, "x" * 799 + "…"),
        ("x" * 1_000_000, "x" * 799 + "…"),
        ("a\nb\rc\0d", "a b c d"),
        # As paths have it that are no UTF-8.
        ("/disks/\udcff/logs", "/disks/ /logs"),
    ],
    ids=["a message that systemd ignores", "more than a socket takes", "lines", "no text"],
)
def test_a_status_fits_whatever_it_is_made_of(
    made: Make, listener: Listener, status: str, told: str
) -> None:
    manager = made({"NOTIFY_SOCKET": listener.address})
    manager.ready(lambda: status)
    assert listener.next() == ["READY=1", f"STATUS={told}"]


async def test_a_word_that_was_not_taken_is_told_again(made: Make, listener: Listener) -> None:
    manager = made({"NOTIFY_SOCKET": listener.address, **WATCHED})
    listener.fill()
    manager.ready(lambda: "it serves")
    async with Told(manager, lambda: "it serves"):
        while (heard := await asyncio.to_thread(listener.next)) == ["noise"]:
            pass
        assert heard == ["READY=1", "WATCHDOG=1", "STATUS=it serves"]
        assert await asyncio.to_thread(listener.next) == ["WATCHDOG=1"]


async def test_who_does_not_know_how_it_is_lives(made: Make, listener: Listener) -> None:
    manager = made({"NOTIFY_SOCKET": listener.address, **WATCHED})
    manager.ready(lambda: "it serves")
    async with Told(manager, lambda: str(1 / 0)):
        heard = [await asyncio.to_thread(listener.next) for _ in range(3)]
    assert heard[1:] == [
        ["WATCHDOG=1", "STATUS=the node does not know how it is; see its log"],
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
    made: Make, environment: dict[str, str], pause_s: float
) -> None:
    assert made({"NOTIFY_SOCKET": "/n", **environment}).pause_s == pause_s


async def test_who_has_no_manager_tells_nobody(made: Make) -> None:
    manager = made({"WATCHDOG_USEC": "1000"})
    manager.ready(lambda: "it serves")
    await manager.keep_told(lambda: "nobody asks")
    manager.stopping("it stops")


async def test_a_manager_that_is_gone_or_does_not_read_holds_nothing_up(
    made: Make, listener: Listener, tmp_path: Path
) -> None:
    made({"NOTIFY_SOCKET": str(tmp_path / "nowhere")}).ready(lambda: "it serves")
    listener.fill()
    made({"NOTIFY_SOCKET": listener.address}).ready(lambda: "it serves")


def test_an_abstract_address(made: Make, tmp_path: Path) -> None:
    name = f"penstock-{os.getpid()}-{tmp_path.name}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as heard:
        heard.bind(f"\0{name}")
        heard.settimeout(10)
        made({"NOTIFY_SOCKET": f"@{name}"}).ready(lambda: "")
        assert heard.recv(100) == b"READY=1"
