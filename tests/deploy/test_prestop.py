from __future__ import annotations

import contextlib
import importlib.util
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


@contextlib.contextmanager
def answering(*statuses: int) -> Iterator[tuple[str, list[str]]]:
    """A node's HTTP port that answers with these, the last one for ever; and what was asked."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            body = b"orders-0 would have 1 replica in sync"
            self.send_response(statuses[min(len(asked), len(statuses)) - 1])
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
    assert prestop.wait_until_it_may_leave(lambda: "", 60, clock, clock.sleep) == ""
    assert clock.now_s == 0


def test_a_node_stays_until_it_may_leave(prestop: ModuleType) -> None:
    clock = Clock()
    reasons = iter(["orders-0", "orders-0", ""])
    assert prestop.wait_until_it_may_leave(lambda: next(reasons), 60, clock, clock.sleep) == ""
    assert clock.now_s == 2 * prestop.POLL_S


def test_a_node_that_may_never_leave_does_so_in_time(prestop: ModuleType) -> None:
    clock = Clock()
    said = prestop.wait_until_it_may_leave(lambda: "orders-0", 60, clock, clock.sleep)
    assert said == "orders-0"
    assert 60 <= clock.now_s <= 61


@pytest.mark.parametrize(("status", "waits"), [(503, True), (200, False), (404, False)])
def test_only_a_clear_no_is_waited_for(prestop: ModuleType, status: int, waits: bool) -> None:
    with answering(status) as (address, _):
        said = prestop.why_not_yet(f"http://{address}/can-roll")
    assert said == ("orders-0 would have 1 replica in sync" if waits else "")


def test_a_node_that_does_not_answer_is_not_waited_for(prestop: ModuleType) -> None:
    with answering(200) as (address, _):
        pass
    assert prestop.why_not_yet(f"http://{address}/can-roll") == ""


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


def test_it_waits_and_drains(
    prestop: ModuleType, container: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with answering(503, 200) as (address, asked):
        monkeypatch.setenv("PENSTOCK_METRICS_LISTEN", f"0.0.0.0:{address.rpartition(':')[2]}")
        assert prestop.main(["20"]) == 0
    assert asked == ["/can-roll"] * 2
    assert (container / "called").read_text() == "drain 2\n"


def test_what_was_not_done_is_said(
    prestop: ModuleType,
    container: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (container / "fails").touch()
    with answering(503) as (address, _):
        monkeypatch.setenv("PENSTOCK_METRICS_LISTEN", address)
        assert prestop.main(["1"]) == 1
    said = capsys.readouterr().out
    assert "leaves although it should not: orders-0 would have 1 replica in sync" in said
    assert "it is not drained: no such broker" in said
    assert (container / "called").read_text() == "drain 2\n"


def test_a_drain_that_hangs_is_given_up(prestop: ModuleType) -> None:
    assert "was not done within 0 s" in prestop.drain(["sleep", "30"], 0)
    assert prestop.drain(["there-is-no-such-program"], 1) != ""
