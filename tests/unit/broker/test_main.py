"""How a node's process ends."""

from __future__ import annotations

import asyncio
import gc
import sys
from typing import Any

import pytest

from penstock.broker import __main__ as main


class PaperNode:
    """Stops at once, and leaves a call that ends a few turns of the loop later, as gRPC does."""

    stop_timeout_s = 1.0

    ended: list[str]

    def __init__(self, config: Any) -> None:
        self._call: asyncio.Task[None] | None = None

    async def start(self) -> None:
        PaperNode.ended = []
        self._call = asyncio.create_task(self._be_called())

    async def run(self, stop: asyncio.Event) -> None:
        stop.set()

    def state(self) -> str:
        return "made of paper"

    async def stop(self) -> None:
        return

    async def _be_called(self) -> None:
        try:
            for _ in range(50):
                await asyncio.sleep(0)
        except asyncio.CancelledError:
            PaperNode.ended.append("cancelled")
            raise
        PaperNode.ended.append("by itself")


def test_calls_end_by_themselves_before_the_loop_does(monkeypatch: pytest.MonkeyPatch) -> None:
    config: Any = None
    monkeypatch.setattr(main, "Node", PaperNode)
    for name in ("freeze", "set_threshold"):
        monkeypatch.setattr(gc, name, lambda *_: None)
    monkeypatch.setattr(sys, "setswitchinterval", lambda _: None)
    asyncio.run(main._serve(config))
    assert PaperNode.ended == ["by itself"]
