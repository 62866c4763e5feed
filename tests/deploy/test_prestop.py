from __future__ import annotations

import contextlib
import importlib.util
import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.deploy.objects import ROOT


@pytest.fixture(scope="module")
def prestop() -> ModuleType:
    file = ROOT / "deploy" / "docker" / "prestop.py"
    spec = importlib.util.spec_from_file_location("prestop", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


REASON = "orders-0 would have 1 replica in sync"
NO = 503, {"can_roll": False, "reasons": [REASON], "passes": True, "drained": False}
NEVER = 503, {"can_roll": False, "reasons": [REASON], "passes": False, "drained": False}
NEVER_DRAINED = 503, {**NEVER[1], "drained": True}
YES = 200, {"can_roll": True, "reasons": [], "passes": False, "drained": False}
DRAINED = 200, {"can_roll": True, "reasons": [], "passes": False, "drained": True}


@contextlib.contextmanager
def answering(*answers: tuple[int, Any]) -> Iterator[tuple[str, list[str]]]:
    """A node's HTTP port that answers with these, the last one for ever; and what was asked."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            status, told = answers[min(len(asked), len(answers)) - 1]
            body = json.dumps(told).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            """Nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_address[1]}", asked
        finally:
            server.shutdown()
            thread.join()


def asked_of(prestop: ModuleType, address: str, timeout_s: float = 5.0) -> Any:
    host, _, port = address.rpartition(":")
    return prestop.ask((host, int(port)), timeout_s)


class Clock:
    """Time passes while it sleeps, and then alone."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


def test_a_node_that_may_leave_is_not_kept(prestop: ModuleType) -> None:
    clock = Clock()
    assert (
        prestop.wait_until_it_may_leave(lambda _: prestop.Verdict(), 60, clock, clock.sleep) == ""
    )
    assert clock.now_s == 0


def test_a_node_stays_until_it_may_leave(prestop: ModuleType) -> None:
    clock = Clock()
    said = [prestop.Verdict("orders-0", passes=True)] * 2 + [prestop.Verdict()]
    look = iter(said).__next__
    assert prestop.wait_until_it_may_leave(lambda _: look(), 60, clock, clock.sleep) == ""
    assert clock.now_s == 2 * prestop.POLL_S


def test_a_node_that_may_never_leave_does_so_in_time(prestop: ModuleType) -> None:
    clock = Clock()
    verdict = prestop.Verdict("orders-0", passes=True)
    said = prestop.wait_until_it_may_leave(lambda _: verdict, 60, clock, clock.sleep)
    assert said == "orders-0"
    assert 59 <= clock.now_s < 60


@pytest.mark.parametrize(
    ("answer", "before", "after"),
    [
        (NO, (REASON, True), (REASON, True)),
        (NEVER, (REASON, False), (REASON, True)),
        (NEVER_DRAINED, (REASON, False), (REASON, False)),
        (YES, ("", False), ("it has not heard of its drain yet", True)),
        (DRAINED, ("", False), ("", False)),
        ((503, "out of order"), ('"out of order"', True), ('"out of order"', True)),
        ((404, "there is /metrics"), ("", False), ("", False)),
    ],
)
def test_what_the_node_says_is_gone_by(
    prestop: ModuleType,
    answer: tuple[int, Any],
    before: tuple[str, bool],
    after: tuple[str, bool],
) -> None:
    with answering(answer) as (address, asked):
        verdict = asked_of(prestop, address)
    assert asked == ["/can-roll"]
    assert verdict[:2] == before
    assert verdict.after_drain()[:2] == after


def test_a_node_that_does_not_serve_is_not_waited_for(prestop: ModuleType) -> None:
    with answering(YES) as (address, _):
        pass
    assert asked_of(prestop, address).after_drain() == prestop.Verdict()


def test_a_node_that_is_too_busy_to_answer_is_waited_for(prestop: ModuleType) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        verdict = asked_of(prestop, f"127.0.0.1:{silent.getsockname()[1]}", 0.1)
    assert "it does not answer" in verdict.reason
    assert verdict.passes


def test_it_is_asked_for_longer_than_a_busy_node_takes_to_say_so(prestop: ModuleType) -> None:
    from penstock.broker import node_http

    assert prestop.ANSWER_S > node_http.ROLL_S + node_http._PLACE_S


def test_no_proxy_is_asked(prestop: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    with answering(NO) as (address, _):
        assert asked_of(prestop, address).reason == REASON


@pytest.fixture
def container(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The environment of a node, and a command that notes how it was called."""
    program = tmp_path / "penstock"
    program.write_text(
        f'#!/bin/sh\necho "$@" >> {tmp_path}/called\n[ ! -e {tmp_path}/fails ] || '
        "{ echo no such broker >&2; exit 1; }\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("PENSTOCK_NODE_ID", "2")
    monkeypatch.setenv("PENSTOCK_DATA_DIR", str(tmp_path))
    monkeypatch.setenv("PENSTOCK_CONTROLLER_QUORUM_VOTERS", "2@127.0.0.1:1")
    return tmp_path


def test_it_waits_and_drains_and_asks_whether_it_was_the_first(
    prestop: ModuleType, container: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with answering(NO, YES, YES, NO, DRAINED) as (address, asked):
        monkeypatch.setenv("PENSTOCK_METRICS_LISTEN", f"0.0.0.0:{address.rpartition(':')[2]}")
        assert prestop.main(["20"]) == 0
    assert asked == ["/can-roll"] * 5
    assert (container / "called").read_text() == "drain 2 --timeout 3.0\n"


def test_what_waiting_cannot_mend_is_said_and_not_waited_for(
    prestop: ModuleType,
    container: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """And it does not hide that another was drained first, for which it waits."""
    with answering(NEVER, NEVER, NO, NEVER_DRAINED) as (address, asked):
        monkeypatch.setenv("PENSTOCK_METRICS_LISTEN", address)
        assert prestop.main(["20"]) == 1
    assert len(asked) == 4
    assert f"leaves although it should not: {REASON}" in capsys.readouterr().out


def test_what_was_not_done_is_said(
    prestop: ModuleType,
    container: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (container / "fails").touch()
    with answering(NO) as (address, _):
        monkeypatch.setenv("PENSTOCK_METRICS_LISTEN", address)
        assert prestop.main(["2"]) == 1
    said = capsys.readouterr().out
    assert f"leaves although it should not: {REASON}" in said
    assert "it is not drained: no such broker" in said
    assert (container / "called").read_text().startswith("drain 2 ")


def test_a_node_that_cannot_be_drained_leaves_when_it_may(
    prestop: ModuleType, container: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As below metadata.version 6."""
    (container / "fails").touch()
    with answering(YES) as (address, asked):
        monkeypatch.setenv("PENSTOCK_METRICS_LISTEN", address)
        assert prestop.main(["20"]) == 1
    assert len(asked) == 2


def test_a_controller_that_is_no_broker_waits_and_drains_nothing(
    prestop: ModuleType,
    container: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("PENSTOCK_NODE_ROLES", "controller")
    with answering(NO, NO, YES) as (address, asked):
        monkeypatch.setenv("PENSTOCK_METRICS_LISTEN", address)
        assert prestop.main(["20"]) == 0
    assert len(asked) == 3
    with answering(NO) as (address, _):
        monkeypatch.setenv("PENSTOCK_METRICS_LISTEN", address)
        assert prestop.main(["1"]) == 1
    assert f"leaves although it should not: {REASON}" in capsys.readouterr().out
    assert not (container / "called").exists()


def test_a_drain_that_hangs_is_given_up(prestop: ModuleType) -> None:
    assert "was not done within 0 s" in prestop.drain(["sleep", "30"], 0)
    assert prestop.drain(["there-is-no-such-program"], 1) != ""
