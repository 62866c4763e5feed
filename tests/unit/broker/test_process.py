"""What a node's process asks of the interpreter while it serves."""

from __future__ import annotations

import asyncio
import gc
import signal
import sys
from collections.abc import Iterator

import pytest

from penstock.broker import __main__ as process
from penstock.broker.config import NodeConfig
from penstock.broker.service_manager import ServiceManager
from penstock.broker.stopping import ForcedEnd


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    interval, thresholds = sys.getswitchinterval(), gc.get_threshold()
    yield
    sys.setswitchinterval(interval)
    gc.set_threshold(*thresholds)
    gc.unfreeze()


async def test_no_thread_keeps_the_event_loop_waiting_for_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[tuple[float, int]] = []

    class Serving:
        """A node that is stopped as soon as it runs."""

        stop_timeout_s = 1.0
        has_failed = False

        def __init__(self, config: NodeConfig) -> None:
            pass

        async def start(self) -> None:
            pass

        async def run(self, stop: asyncio.Event) -> None:
            seen.append((sys.getswitchinterval(), gc.get_threshold()[0]))

        async def stop(self) -> None:
            pass

        def state(self) -> str:
            return "it serves"

    monkeypatch.setattr(process, "Node", Serving)
    end = ForcedEnd(1)
    try:
        await process._serve(NodeConfig(), end, ServiceManager({}))
    finally:
        end.called_off()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().remove_signal_handler(number)
    [(interval_s, threshold)] = seen
    assert interval_s <= 0.001
    assert threshold >= 5_000
