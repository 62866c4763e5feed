"""The paths of a node's HTTP port."""

from __future__ import annotations

import gzip
import json
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from email.message import Message
from typing import Final

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from penstock.broker.core.rolling import RollVerdict
from penstock.broker.http import Reply, Route
from penstock.broker.node_health import LoopBusyError, NodeHealth

ROLL_S: Final = 8.0
"""So long the question whether the node may be stopped is tried to be answered."""
_AT_ONCE: Final = 2
"""So many dear answers are worked on at once; more are refused, so that probes have their turn."""
_PLACE_S: Final = 1.0
_GZIP_LEVEL: Final = 1  # The text is very regular: more costs more than it saves.

AskVerdict = Callable[[], Awaitable[RollVerdict]]


def metrics_reply(registry: CollectorRegistry, headers: Message) -> Reply:
    """The metrics in the format and the encoding that were asked for."""
    encode, content_type = choose_encoder(headers.get("Accept", ""))
    body: bytes = encode(registry)
    if "gzip" in headers.get("Accept-Encoding", ""):
        return Reply(200, gzip.compress(body, _GZIP_LEVEL), content_type, encoding="gzip")
    return Reply(200, body, content_type)


class NodePages:
    """What the paths answer. ``roll_verdict`` is set once there is somebody to ask."""

    def __init__(self, health: NodeHealth, registry: CollectorRegistry) -> None:
        self._health = health
        self._registry = registry
        self._dear = threading.BoundedSemaphore(_AT_ONCE)
        self.roll_verdict: AskVerdict | None = None

    def routes(self) -> Mapping[str, Route]:
        """The paths."""
        return {
            "/metrics": self._metrics,
            "/livez": lambda _: Reply.verdict(self._health.live()),
            "/readyz": lambda _: Reply.verdict(self._health.ready()),
            "/startupz": lambda _: Reply.verdict(self._health.startup()),
            "/can-roll": lambda _: self._can_roll(),
        }

    def _metrics(self, headers: Message) -> Reply:
        with self._place() as free:
            if not free:
                return Reply.verdict("others read the metrics now: ask again")
            return metrics_reply(self._registry, headers)

    def _can_roll(self) -> Reply:
        with self._place() as free:
            if not free:
                return _rolling(RollVerdict(["others ask the same now; next: ask again"]))
            return _rolling(self._verdict())

    def _verdict(self) -> RollVerdict:
        if reason := self._health.startup():
            return RollVerdict([f"{reason}; next: wait until /startupz answers 200"])
        ask = self.roll_verdict
        if ask is None:
            return RollVerdict(["the node starts; next: ask again"])

        async def question() -> RollVerdict:
            return await ask()

        try:
            return self._health.ask(question, ROLL_S)
        except LoopBusyError as error:
            return RollVerdict([f"{error}; next: ask again"])

    @contextmanager
    def _place(self) -> Iterator[bool]:
        free = self._dear.acquire(timeout=_PLACE_S)
        try:
            yield free
        finally:
            if free:
                self._dear.release()


def _rolling(verdict: RollVerdict) -> Reply:
    reasons = verdict.reasons
    told = {
        "can_roll": not reasons,
        "reasons": reasons,
        "passes": bool(reasons) and verdict.passes,
        "drained": verdict.drained,
    }
    body = json.dumps(told, ensure_ascii=False)
    return Reply(503 if reasons else 200, f"{body}\n".encode(), "application/json")
