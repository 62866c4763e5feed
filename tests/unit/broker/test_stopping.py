"""A stop is bounded as a whole, whatever its parts do."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import pytest

from penstock.broker.stopping import RESERVE_S, stop_all


async def test_parts_stop_in_reverse_and_one_that_fails_holds_up_none() -> None:
    stopped: list[str] = []

    async def first() -> None:
        stopped.append("first")

    async def broken() -> None:
        raise RuntimeError("it broke")

    async def last() -> None:
        stopped.append("last")

    parts = [first, broken, last]
    await stop_all(parts, asyncio.get_running_loop().time() + 5)
    assert stopped == ["last", "first"]
    assert parts == []


async def test_parts_that_hang_take_no_longer_together_than_the_whole_may() -> None:
    loop = asyncio.get_running_loop()
    closed: list[str] = []

    async def logs() -> None:
        await asyncio.sleep(RESERVE_S / 5)  # A part that needs some of what it is left.
        closed.append("logs")

    async def hang() -> None:
        await asyncio.Event().wait()

    begun_s = loop.time()
    await stop_all([logs, hang, hang, hang], begun_s + 1.2)
    assert closed == ["logs"]
    # Each of the three with the whole of it would take 3.6 s; a busy machine adds some.
    assert loop.time() - begun_s < 3


async def test_a_part_gets_its_share_even_when_no_time_is_left() -> None:
    closed: list[str] = []

    async def logs() -> None:
        await asyncio.sleep(0)
        closed.append("logs")

    await stop_all([logs, logs], asyncio.get_running_loop().time() - 60)
    assert closed == ["logs", "logs"]


async def test_a_stop_that_is_itself_called_off_ends() -> None:
    async def hang() -> None:
        await asyncio.Event().wait()

    stopping = asyncio.ensure_future(stop_all([hang], asyncio.get_running_loop().time() + 60))
    await asyncio.sleep(0)
    stopping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stopping


HELD_UP = """
import threading
from penstock.broker.stopping import ForcedEnd
end = ForcedEnd(7)
end.by(0.2)
threading.Thread(target=threading.Event().wait).start()  # Python waits for it when it ends.
"""
CALLED_OFF = """
import threading
from penstock.broker.stopping import ForcedEnd
end = ForcedEnd(7)
end.by(0.2)
end.called_off()
threading.Thread(target=threading.Event().wait, args=(0.5,)).start()
"""


def ended(script: str) -> tuple[int, bytes]:
    command = [sys.executable, "-c", script]
    ran = subprocess.run(command, check=False, capture_output=True, timeout=30)
    return ran.returncode, ran.stdout + ran.stderr


def test_a_process_that_a_thread_holds_up_ends_nevertheless() -> None:
    status, said = ended(HELD_UP)
    assert status == 7
    assert b"did not stop in time" in said


def test_an_end_that_is_called_off_does_not_come() -> None:
    assert ended(CALLED_OFF) == (0, b"")
