"""How lines become records, and what is counted."""

from __future__ import annotations

import json
import logging
import os
import pty
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from penstock import client
from penstock.cli import produce as module
from penstock.cli.app import app
from penstock.cli.produce import make_split
from penstock.cli.tally import Tally, report_tally
from penstock.client.config import ProducerConfig
from penstock.wire.errors import (
    BootstrapError,
    ClientClosedError,
    ConfigurationError,
    DeliveryFailedError,
    NotEnoughReplicasError,
    PenstockError,
    RecordTooLargeError,
    RequestTimedOutError,
)
from penstock.wire.records import Compression as CompressionKind


class FakeProducer:
    """Acknowledges records, or fails those whose value is in ``failing``."""

    def __init__(self) -> None:
        self.records: list[tuple[str, bytes | None, bytes]] = []
        self.refusing: dict[bytes, PenstockError] = {}
        self.failing: dict[bytes, PenstockError] = {}
        self.pending: list[tuple[Future[Any], PenstockError | None]] = []
        self.closed = False
        self.flushed: list[float | None] = []
        self.unreachable = False
        self.on_wait: Callable[[str], object] = lambda _what: None

    def send(self, topic: str, value: bytes, key: bytes | None) -> Future[Any]:
        if value in self.refusing:
            raise self.refusing[value]
        self.on_wait("send")
        self.records.append((topic, key, value))
        future: Future[Any] = Future()
        self.pending.append((future, self.failing.get(value)))
        return future

    def partitions_for(self, topic: str) -> int:
        self.on_wait("metadata")
        return 1

    def flush(self, timeout_ms: float | None = None) -> None:
        """Settle everything on another thread, as the client does."""
        self.flushed.append(timeout_ms)
        self.on_wait("flush")
        if self.unreachable:
            raise RequestTimedOutError("they stay queued")
        thread = threading.Thread(target=self._settle)
        thread.start()
        thread.join()
        if any(error for _, error in self.pending):
            raise DeliveryFailedError("1 record failed")

    def close(self, timeout_ms: float | None = None) -> None:
        self.closed = True
        for future, _ in self.pending:
            if not future.done():
                future.set_exception(ClientClosedError("the producer was closed"))

    def _settle(self) -> None:
        for future, error in self.pending:
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(None)


@pytest.fixture
def producer(monkeypatch: pytest.MonkeyPatch) -> FakeProducer:
    fake = FakeProducer()
    monkeypatch.setattr(module, "_connect", lambda *_arguments: fake)
    return fake


def run(*arguments: str, stdin: bytes = b"") -> Any:
    return CliRunner().invoke(app, ["produce", "orders", *arguments], input=stdin)


def test_lines_become_values(producer: FakeProducer) -> None:
    result = run(stdin=b"first\nsecond\r\n\nlast without an end")
    assert result.exit_code == 0, result.output
    assert [value for _, _, value in producer.records] == [
        b"first",
        b"second\r",
        b"",
        b"last without an end",
    ]
    assert {key for _, key, _ in producer.records} == {None}
    assert producer.closed
    assert result.stdout == ""
    assert result.stderr.startswith("4 records, 31 B in ")


def test_a_file_is_read_instead_of_standard_input(producer: FakeProducer, tmp_path: Path) -> None:
    (tmp_path / "lines").write_bytes(b"one\ntwo\n")
    assert run("--file", str(tmp_path / "lines")).exit_code == 0
    assert [value for _, _, value in producer.records] == [b"one", b"two"]


def test_a_file_that_is_not_there_is_named(producer: FakeProducer, tmp_path: Path) -> None:
    result = run("--file", str(tmp_path / "missing"))
    assert result.exit_code == 1
    first, second = result.stderr.splitlines()
    assert first == f"error: cannot read {tmp_path / 'missing'}: No such file or directory"
    assert second.startswith("next: name a file that can be read")


def test_a_key_by_expression_keeps_the_line_whole(producer: FakeProducer) -> None:
    run("--key-regex", r"^(\S+) ", stdin=b"10.0.0.1 GET /\n10.0.0.2 GET /x\n")
    assert producer.records == [
        ("orders", b"10.0.0.1", b"10.0.0.1 GET /"),
        ("orders", b"10.0.0.2", b"10.0.0.2 GET /x"),
    ]


def test_a_key_by_separator_is_cut_off(producer: FakeProducer) -> None:
    run("--key-separator", "::", stdin=b"k1::v1\nk2::v2::more\n::empty key\n")
    assert [(key, value) for _, key, value in producer.records] == [
        (b"k1", b"v1"),
        (b"k2", b"v2::more"),
        (b"", b"empty key"),
    ]


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        (["--key-separator", ":"], "line 2 has no --key-separator ':'"),
        (["--key-regex", "^(k.*):"], "line 2 has no match of --key-regex '^(k.*):'"),
    ],
)
def test_a_line_without_its_key_fails_and_the_rest_goes_on(
    producer: FakeProducer, options: list[str], wanted: str
) -> None:
    result = run(*options, stdin=b"k1:a\nnothing\nk3:c\n")
    assert result.exit_code == 1
    assert len(producer.records) == 2
    assert "2 records" in result.stderr
    assert "1 failed" in result.stderr
    assert wanted in result.stderr


def test_an_expression_without_a_group_takes_the_whole_match() -> None:
    assert make_split("[0-9]+", None)(b"order 42 of 43") == (b"42", b"order 42 of 43")


def test_failed_records_are_counted_and_the_first_is_explained(producer: FakeProducer) -> None:
    producer.failing[b"bad"] = NotEnoughReplicasError("orders-0 has 1 in-sync replica, needs 2")
    result = run(stdin=b"good\nbad\ngood\n")
    assert result.exit_code == 1
    assert "2 records" in result.stderr
    assert "; 1 failed" in result.stderr
    assert "error (first at line 2): orders-0 has 1 in-sync replica, needs 2" in result.stderr
    assert "next: start the missing brokers" in result.stderr


def test_a_record_that_is_too_large_fails_alone(producer: FakeProducer) -> None:
    producer.refusing[b"huge"] = RecordTooLargeError("the record has 2000000 bytes")
    result = run(stdin=b"a\nhuge\nb\n")
    assert result.exit_code == 1
    assert [value for _, _, value in producer.records] == [b"a", b"b"]
    assert "error (first at line 2): the record has 2000000 bytes" in result.stderr


def test_an_unreachable_cluster_says_only_that(producer: FakeProducer) -> None:
    producer.refusing[b"a"] = BootstrapError("localhost:9 refused the connection")
    result = run(stdin=b"a\nb\n")
    assert result.exit_code == 1
    assert result.stderr.splitlines()[0] == "error: localhost:9 refused the connection"


def test_the_summary_as_json(producer: FakeProducer) -> None:
    result = run("--output", "json", stdin=b"one\ntwo\n")
    summary = json.loads(result.stderr)
    assert (summary["records"], summary["bytes"], summary["failed"]) == (2, 6, 0)
    assert result.stdout == ""


# --- Ctrl-C and SIGTERM --------------------------------------------------------------------------


class Stopping:
    """Signals this process as often as ``moments`` says, each when the command is there."""

    def __init__(self, *moments: tuple[str, int]) -> None:
        self.moments = list(moments)

    def __call__(self, where: str) -> None:
        if self.moments and self.moments[0][0] == where:
            _, number = self.moments.pop(0)
            os.kill(os.getpid(), number)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_stop_flushes_what_was_sent(producer: FakeProducer, number: int, status: int) -> None:
    producer.on_wait = Stopping(("send", number))
    result = run(stdin=b"one\ntwo\n")
    assert result.exit_code == status
    # The record at hand was sent whole, and counted.
    assert [value for _, _, value in producer.records] == [b"one"]
    first, second = result.stderr.splitlines()
    assert first == "stopping: flushing 1 record, Ctrl-C again to give up"
    assert second.startswith("1 record, 3 B in ")
    assert producer.flushed == [5000]
    assert producer.closed


def test_a_stop_while_the_last_records_are_awaited_gives_them_some_time(
    producer: FakeProducer,
) -> None:
    producer.on_wait = Stopping(("flush", signal.SIGINT))
    result = run(stdin=b"one\ntwo\n")
    assert result.exit_code == 130
    assert "stopping: flushing 2 records" in result.stderr
    assert "2 records, 6 B in" in result.stderr
    assert producer.flushed == [None, 5000]


def test_a_second_stop_ends_at_once_and_says_what_is_not_known(producer: FakeProducer) -> None:
    producer.on_wait = Stopping(("flush", signal.SIGINT), ("flush", signal.SIGINT))
    result = run(stdin=b"one\ntwo\n")
    assert result.exit_code == 130
    first, second = result.stderr.splitlines()
    assert first == "stopping: flushing 2 records, Ctrl-C again to give up"
    assert second.startswith("0 records, 0 B in ")
    assert second.endswith("; 2 not acknowledged, which may be there or not")
    assert producer.closed


def test_a_cluster_that_does_not_answer_holds_a_stop_up_for_a_while_alone(
    producer: FakeProducer,
) -> None:
    producer.unreachable = True
    producer.on_wait = Stopping(("send", signal.SIGTERM))
    result = run("--output", "json", stdin=b"one\ntwo\n")
    assert result.exit_code == 143
    _, gave_up, summary = result.stderr.splitlines()
    assert gave_up == "gave up after 5 s"
    assert json.loads(summary)["unacknowledged"] == 1
    assert json.loads(summary)["failed"] == 0


def test_a_stop_before_the_cluster_was_found(producer: FakeProducer) -> None:
    producer.on_wait = Stopping(("metadata", signal.SIGINT))
    result = run(stdin=b"one\n")
    assert result.exit_code == 130
    assert result.stderr.startswith("0 records, 0 B in ")
    assert producer.records == []


def test_reading_waits_while_too_much_is_on_its_way_and_can_be_stopped(
    producer: FakeProducer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_ON_THEIR_WAY_BYTES", 150)
    full = threading.Event()

    def interrupt() -> None:
        full.wait(20)
        # Whether it is heard before or while the command waits is the same to it.
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    producer.on_wait = lambda _what: full.set() if len(producer.records) == 1 else None
    result = run(stdin=b"one\ntwo\nthree\nfour\n")
    thread.join()
    assert result.exit_code == 130
    assert len(producer.records) == 2
    assert "2 records, 6 B in" in result.stderr


# --- Options --------------------------------------------------------------------------------------


def test_the_options_reach_the_producer(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[dict[str, Any]] = []

    class Recorded(FakeProducer):
        def __init__(self, _bootstrap: str, **settings: Any) -> None:
            super().__init__()
            made.append(settings)
            ProducerConfig.load("localhost:1", settings)

    monkeypatch.setattr(client, "Producer", Recorded)
    assert run(stdin=b"a\n").exit_code == 0
    assert (made[0]["acks"], made[0]["compression"]) == ("all", "none")
    assert made[0]["max_request_size"] == ProducerConfig.load("localhost:1", {}).max_request_size
    options = ["--acks", "1", "--compression", "zstd", "--max-request-size", "33554432"]
    assert run(*options, stdin=b"a\n").exit_code == 0
    assert (made[1]["acks"], made[1]["compression"]) == (1, "zstd")
    assert made[1]["max_request_size"] == 33_554_432


def test_the_largest_request_is_that_of_the_client() -> None:
    for size in (module.MIN_REQUEST_SIZE, module.MAX_REQUEST_SIZE):
        ProducerConfig.load("localhost:1", {"max_request_size": size})
    for size in (module.MIN_REQUEST_SIZE - 1, module.MAX_REQUEST_SIZE + 1):
        with pytest.raises(ConfigurationError):
            ProducerConfig.load("localhost:1", {"max_request_size": size})
    assert {entry.value for entry in module.Compression} == {
        kind.name.lower() for kind in CompressionKind
    }


def test_a_record_that_is_too_large_names_the_option(producer: FakeProducer) -> None:
    producer.refusing[b"huge"] = RecordTooLargeError("the record has 2000000 bytes")
    result = run(stdin=b"huge\n")
    assert "next: send smaller records, or pass --max-request-size BYTES" in result.stderr


def test_a_bar_is_shown_on_a_terminal_and_the_summary_after_it(tmp_path: Path) -> None:
    (tmp_path / "lines").write_bytes(b"a line\n" * 20_000)
    code = (
        "import sys\n"
        "from concurrent.futures import Future\n"
        "from penstock.cli import produce\n"
        "from penstock.cli.app import app\n"
        "class Producer:\n"
        "    def send(self, topic, value, key):\n"
        "        future = Future(); future.set_result(None); return future\n"
        "    def partitions_for(self, topic): return 1\n"
        "    def flush(self, timeout_ms=None): pass\n"
        "    def close(self, timeout_ms=None): pass\n"
        "produce._connect = lambda *arguments: Producer()\n"
        f"app(['produce', 'orders', '--file', {str(tmp_path / 'lines')!r}])\n"
    )
    shown: list[bytes] = []

    assert _in_terminal([sys.executable, "-c", code], shown) == 0
    text = b"".join(shown).decode()
    assert "sending" in text
    assert "140.0/140.0 kB" in text
    # The ends of lines are no part of the records.
    assert "20,000 records, 120.00 kB in" in text


def _in_terminal(command: list[str], shown: list[bytes]) -> int:
    """Run a command in a terminal of its own; its exit status."""
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, env=os.environ | {"TERM": "xterm"}
    ) as process:
        os.close(theirs)
        while True:
            try:
                data = os.read(ours, 4096)
            except OSError:  # So Linux says that the last writer is gone.
                break
            if not data:
                break
            shown.append(data)
        os.close(ours)
        return process.wait(20)


def test_what_nobody_was_asked_about_is_not_called_acknowledged(
    capsys: pytest.CaptureFixture[str],
) -> None:
    tally = Tally(acknowledging=False)
    done: Future[None] = Future()
    done.set_result(None)
    tally.send(3)
    tally.settle(1, 3, 3, done)
    report_tally(tally, as_json=False, stopped=False)
    assert "; sent, and nobody was asked to acknowledge it" in capsys.readouterr().err


def test_what_the_client_warns_of_is_said_with_what_to_do(producer: FakeProducer) -> None:
    producer.on_wait = lambda what: logging.getLogger("penstock.client").warning(
        "no %s yet; next: start node 1", what
    )
    assert run(stdin=b"").stderr.startswith("warning: no metadata yet\nnext: start node 1\n")
