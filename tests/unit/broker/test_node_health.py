"""What probes are told of a node: alive, started, ready."""

from __future__ import annotations

import asyncio
import gzip
import http.client
import json
import threading
from email.message import Message

import pytest
from prometheus_client import CollectorRegistry, Gauge

from penstock.broker import node_health
from penstock.broker.core.rolling import RollVerdict
from penstock.broker.http import NodeHttp, Reply
from penstock.broker.node_health import LIVE_S, LoopBusyError, NodeHealth
from penstock.broker.node_http import NodePages
from tests.support import wait_until


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


async def test_a_node_lives_while_its_loop_turns() -> None:
    clock = Clock()
    health = NodeHealth(clock_s=clock)
    try:
        clock.now_s += LIVE_S - 1
        assert health.live() == ""
        clock.now_s += 1
        assert "stood still for 10 s" in health.live()
        await asyncio.sleep(0)  # The pulse's turn.
        assert health.live() == ""
    finally:
        await health.stop()


async def test_a_node_is_not_ready_before_it_has_started_nor_while_it_stops() -> None:
    health = NodeHealth()
    try:
        assert "recovers" in health.startup()
        assert "recovers" in await asyncio.to_thread(health.ready)
        health.started()
        assert health.startup() == ""
        assert await asyncio.to_thread(health.ready) == ""
        health.stopping()
        assert await asyncio.to_thread(health.ready) == "the node stops"
        assert health.startup() == "", "it has started, whatever comes after"
    finally:
        await health.stop()


async def test_all_that_is_missing_is_said() -> None:
    health = NodeHealth()
    reasons = {"a": "the controller knows no leader", "b": "", "c": "the broker is fenced"}
    for part in (*reasons,):
        health.require(lambda part=part: reasons[part])
    health.started()
    try:
        said = await asyncio.to_thread(health.ready)
        assert said == "the controller knows no leader; the broker is fenced"
        reasons.clear()
        reasons.update(dict.fromkeys("abc", ""))
        assert await asyncio.to_thread(health.ready) == ""
    finally:
        await health.stop()


async def test_a_loop_that_does_not_answer_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(node_health, "ANSWER_S", 0.05)
    health = NodeHealth()
    health.started()
    said: list[str] = []
    try:
        asker = threading.Thread(target=lambda: said.append(health.ready()))
        asker.start()
        asker.join()  # The loop stands still meanwhile.
        assert "busy" in said[0]
    finally:
        await health.stop()


def test_a_loop_that_hangs_is_told_over_http(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_health, "LIVE_S", 0.2)
    monkeypatch.setattr(node_health, "PULSE_S", 0.01)
    told: dict[str, list[int]] = {"/livez": []}
    hung = threading.Event()

    async def serve() -> None:
        health = NodeHealth()
        health.started()
        server = NodeHttp("127.0.0.1:0", NodePages(health, CollectorRegistry()).routes())
        asker = threading.Thread(target=ask, args=(server.port,))
        await asyncio.sleep(0.02)  # The pulse has begun.
        asker.start()
        hung.wait(20)  # The loop stands still until the hang was told of.
        await asyncio.to_thread(asker.join)  # It turns again, and the asker sees it.
        await asyncio.to_thread(server.close)
        await health.stop()

    def status(port: int) -> int:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        connection.request("GET", "/livez")
        found = connection.getresponse().status
        connection.close()
        return found

    def ask(port: int) -> None:
        wait_until(lambda: status(port) == 503, "the hang is told")
        told["/livez"].append(503)
        hung.set()
        wait_until(lambda: status(port) == 200, "it lives again")
        told["/livez"].append(200)

    asyncio.run(serve())
    assert told == {"/livez": [503, 200]}


def test_a_loop_that_is_over_is_said() -> None:
    async def made() -> NodeHealth:
        health = NodeHealth()
        health.started()
        await health.stop()
        return health

    health = asyncio.run(made())
    assert health.ready() == "the node has stopped"
    with pytest.raises(LoopBusyError):
        health.ask(_nothing, 1.0)


async def _nothing() -> None:
    return None


class Pages:
    """The pages of a node, asked as its port asks them: from another thread."""

    def __init__(self) -> None:
        self.health = NodeHealth()
        self.registry = CollectorRegistry()
        self.pages = NodePages(self.health, self.registry)
        self.routes = self.pages.routes()

    async def get(self, path: str, **headers: str) -> Reply:
        message = Message()
        for name, value in headers.items():
            message[name.replace("_", "-")] = value
        return await asyncio.to_thread(self.routes[path], message)


async def test_the_probes_answer_200_or_503() -> None:
    node = Pages()
    try:
        found = {path: (await node.get(path)).status for path in ("/livez", "/readyz", "/startupz")}
        assert found == {"/livez": 200, "/readyz": 503, "/startupz": 503}
        node.health.started()
        for path in found:
            assert await node.get(path) == Reply(200, b"ok\n")
    finally:
        await node.health.stop()


async def test_whether_a_node_may_stop_is_told_with_the_reasons() -> None:
    node = Pages()
    reasons = ["node 1 has the only replica in sync of orders-0; next: wait"]

    drained = False

    async def verdict() -> RollVerdict:
        return RollVerdict(reasons, drained)

    try:
        early = await node.get("/can-roll")
        assert early.status == 503
        assert "starts" in json.loads(early.body)["reasons"][0]
        node.health.started()
        node.pages.roll_verdict = verdict
        no = await node.get("/can-roll")
        assert (no.status, no.content_type) == (503, "application/json")
        expected = {"can_roll": False, "reasons": reasons, "passes": True, "drained": False}
        assert json.loads(no.body) == expected
        reasons, drained = [], True
        yes = await node.get("/can-roll")
        told = {"can_roll": True, "reasons": [], "passes": False, "drained": True}
        assert (yes.status, json.loads(yes.body)) == (200, told)
    finally:
        await node.health.stop()


async def test_metrics_come_in_the_encoding_that_was_asked_for() -> None:
    node = Pages()
    Gauge("penstock_probe", "Tried here", registry=node.registry).set(7)
    try:
        plain = await node.get("/metrics")
        assert plain.content_type.startswith("text/plain; version=")
        assert b"penstock_probe 7.0" in plain.body
        packed = await node.get("/metrics", accept_encoding="gzip, br")
        assert (packed.encoding, gzip.decompress(packed.body)) == ("gzip", plain.body)
        other = await node.get("/metrics", accept="application/openmetrics-text")
        assert other.body.endswith(b"# EOF\n")
    finally:
        await node.health.stop()


async def test_probes_have_their_turn_while_dear_answers_are_worked_on() -> None:
    node = Pages()
    node.health.started()
    go_on, both_asked = asyncio.Event(), asyncio.Event()
    asked: list[int] = []

    async def verdict() -> RollVerdict:
        asked.append(1)
        if len(asked) == 2:
            both_asked.set()
        await go_on.wait()
        return RollVerdict([])

    node.pages.roll_verdict = verdict
    try:
        held = [asyncio.create_task(node.get("/can-roll")) for _ in range(2)]
        await both_asked.wait()
        assert (await node.get("/livez")).status == 200
        refused = await node.get("/can-roll")
        assert refused.status == 503
        assert b"ask again" in refused.body
        crowded = await node.get("/metrics")
        assert (crowded.status, b"ask again" in crowded.body) == (503, True)
        go_on.set()
        assert [(await task).status for task in held] == [200, 200]
    finally:
        await node.health.stop()
