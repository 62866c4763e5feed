"""How lines become records, and what is counted."""

from __future__ import annotations

import io
import json
import os
import pty
import subprocess
import sys
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from penstock.cli import produce as module
from penstock.cli.app import app
from penstock.cli.produce import Tally, make_split, send_lines
from penstock.wire.errors import (
    BootstrapError,
    DeliveryFailedError,
    NotEnoughReplicasError,
    PenstockError,
    RecordTooLargeError,
)


class FakeProducer:
    """Acknowledges records, or fails those whose value is in ``failing``."""

    def __init__(self) -> None:
        self.records: list[tuple[str, bytes | None, bytes]] = []
        self.refusing: dict[bytes, PenstockError] = {}
        self.failing: dict[bytes, PenstockError] = {}
        self.pending: list[tuple[Future[Any], PenstockError | None]] = []
        self.closed = False

    def send(self, topic: str, value: bytes, key: bytes | None) -> Future[Any]:
        if value in self.refusing:
            raise self.refusing[value]
        self.records.append((topic, key, value))
        future: Future[Any] = Future()
        self.pending.append((future, self.failing.get(value)))
        return future

    def close(self) -> None:
        """Settle everything on another thread, as the client does."""
        thread = threading.Thread(target=self._settle)
        thread.start()
        thread.join()
        self.closed = True
        if any(error for _, error in self.pending):
            raise DeliveryFailedError("1 record failed")

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
    assert f"error: cannot read {tmp_path / 'missing'}: No such file" in result.stderr


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


def test_ctrl_c_waits_for_what_was_sent(producer: FakeProducer) -> None:
    class Interrupted(io.BytesIO):
        def __next__(self) -> bytes:
            line = super().__next__()
            if line == b"stop\n":
                raise KeyboardInterrupt
            return line

    tally = Tally()
    with pytest.raises(KeyboardInterrupt):
        send_lines(
            producer,  # type: ignore[arg-type]
            "orders",
            Interrupted(b"one\nstop\n"),
            split=make_split(None, None),
            tally=tally,
            advance=lambda _size: None,
        )
    producer.close()
    assert (tally.sent, tally.acknowledged, tally.failed) == (1, 1, 0)


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
        "    def close(self): pass\n"
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
