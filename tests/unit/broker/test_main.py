"""How a node's process ends."""

from __future__ import annotations

import asyncio
import gc
import signal
import sys
from typing import Any

import pytest

from penstock.broker import __main__ as main
from penstock.broker.service_manager import ServiceManager
from penstock.broker.stopping import ForcedEnd
from penstock.wire.errors import DataDirectoryError


class PaperNode:
    """Stops at once, and leaves a call that ends a few turns of the loop later, as gRPC does."""

    stop_timeout_s = 1.0
    has_failed = False

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
    serve(config, End())
    assert PaperNode.ended == ["by itself"]


class End(ForcedEnd):
    """Notes what it was told."""

    def __init__(self) -> None:
        super().__init__(1)
        self.told: list[tuple[str, float]] = []

    def by(self, timeout_s: float) -> None:
        self.told.append(("by", timeout_s))

    def now(self, status: int) -> None:
        self.told.append(("now", status))


def serve(config: Any, end: End) -> None:
    asyncio.run(main._serve(config, end, ServiceManager({})))


class SlowNode(PaperNode):
    """Is told to stop while it starts, which takes for ever, or is over at that moment."""

    is_quick = False

    async def start(self) -> None:
        PaperNode.ended = []
        signal.raise_signal(signal.SIGTERM)
        try:
            if not self.is_quick:
                await asyncio.Event().wait()
        finally:
            PaperNode.ended.append("start")

    async def run(self, stop: asyncio.Event) -> None:
        await asyncio.wait_for(stop.wait(), 10)
        PaperNode.ended.append("run")


@pytest.mark.parametrize("is_quick", [False, True])
def test_a_start_is_given_up_when_the_node_is_to_stop(
    monkeypatch: pytest.MonkeyPatch, is_quick: bool
) -> None:
    config: Any = None
    monkeypatch.setattr(main, "Node", SlowNode)
    monkeypatch.setattr(SlowNode, "is_quick", is_quick)
    for name in ("freeze", "set_threshold"):
        monkeypatch.setattr(gc, name, lambda *_: None)
    monkeypatch.setattr(sys, "setswitchinterval", lambda _: None)
    end = End()
    serve(config, end)
    bound = ("by", SlowNode.stop_timeout_s + main._FORCE_S)
    if is_quick:
        assert (PaperNode.ended, end.told) == (["start", "run"], [bound])
    else:
        # At once, for the thread that it waited for would keep the interpreter.
        assert (PaperNode.ended, end.told) == (["start"], [bound, ("now", 0)])


class FailingNode(PaperNode):
    """Is told to stop while it clears up what its failed start has begun."""

    async def start(self) -> None:
        PaperNode.ended = []
        try:
            raise DataDirectoryError("the disk is gone")
        except DataDirectoryError:
            self.has_failed = True
            signal.raise_signal(signal.SIGTERM)
            for _ in range(50):
                await asyncio.sleep(0)
            PaperNode.ended.append("cleared up")
            raise


def test_a_start_that_failed_is_told_of_though_it_is_to_stop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config: Any = None
    monkeypatch.setattr(main, "Node", FailingNode)
    end = End()
    with pytest.raises(DataDirectoryError, match="the disk is gone"):
        serve(config, end)
    assert PaperNode.ended == ["cleared up"]
    assert end.told == [("by", FailingNode.stop_timeout_s + main._FORCE_S)]
