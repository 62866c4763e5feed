"""What the command does where a stream, a byte or Ctrl-C comes from outside at the wrong time."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from penstock.cli.app import app
from penstock.wire.records import Record, encode_batch


def run(*arguments: str, **environment: str) -> Result:
    return CliRunner().invoke(app, list(arguments), env=environment)


COMMAND = [sys.executable, "-m", "penstock.cli"]


def into_full_disk(*arguments: str) -> subprocess.CompletedProcess[str]:
    with Path("/dev/full").open("w") as full:
        return subprocess.run(
            [*COMMAND, *arguments], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )


@pytest.fixture
def segment(tmp_path: Path) -> Path:
    path = tmp_path / "00000000000000000000.log"
    path.write_bytes(encode_batch([Record(0, 1000, b"k", b"v", ())], base_offset=0, leader_epoch=1))
    return path


@pytest.mark.parametrize(
    "arguments",
    [["topics", "list", "--help"], ["topics"], ["--version"], ["log", "dump", "SEGMENT"]],
    ids=" ".join,
)
def test_a_full_disk_behind_standard_output_is_said(arguments: list[str], segment: Path) -> None:
    result = into_full_disk(*(str(segment) if word == "SEGMENT" else word for word in arguments))
    assert result.returncode == 1
    assert result.stderr == (
        "error: cannot write to standard output: No space left on device\n"
        "next: free space where the output goes, or send it elsewhere\n"
    )


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["topics", "create", "--help"], ["topics"], ["log", "dump", "SEGMENT"]],
    ids=" ".join,
)
def test_a_closed_pipe_ends_every_command_alike(arguments: list[str], segment: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    words = [str(segment) if word == "SEGMENT" else word for word in arguments]
    result = subprocess.run(
        [*COMMAND, *words], stdout=writer, stderr=subprocess.PIPE, text=True, check=False
    )
    os.close(writer)
    assert (result.returncode, result.stderr) == (141, "")


def test_a_table_into_a_closed_pipe_ends_alike(segment: Path) -> None:
    """A library must not swallow the closed pipe where more output follows."""
    reader, writer = os.pipe()
    os.close(reader)
    result = subprocess.run(
        [*COMMAND, "log", "dump", str(segment), "--verify"],
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    os.close(writer)
    assert (result.returncode, result.stderr) == (141, "")


@pytest.mark.parametrize(
    ("arguments", "where"),
    [
        (["topics", "describe", "a\udcff"], "'NAME'"),
        (["topics", "create", "a", "--config", "k=\udcff"], "'--config'"),
        (["produce", "a\udcff"], "'TOPIC'"),
        (["consume", "a", "--group", "a\udcff"], "'--group'"),
        (["groups", "describe", "a\udcff"], "'GROUP'"),
        (["-b", "a\udcff:1", "topics", "list"], "'--bootstrap'"),
        (["format", "--data-dir", "x", "--node-id", "1", "--cluster-id", "a\udcff"], "cluster-id"),
        (["node", "--set", "node.id=a\udcff"], "'--set'"),
    ],
)
def test_bytes_that_are_no_text_are_refused(
    arguments: list[str], where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    first, second = result.stderr.splitlines()
    assert where in first
    assert r"\xff" in first
    assert "is not UTF-8" in first
    assert second.endswith("--help")
    assert list(tmp_path.iterdir()) == []


def test_a_bootstrap_variable_that_is_no_text_is_refused() -> None:
    result = run("topics", "list", PENSTOCK_BOOTSTRAP="a\udcff:1")
    assert result.exit_code == 2
    assert r"PENSTOCK_BOOTSTRAP: 'a\xff:1' is not UTF-8" in result.stderr


def test_a_path_need_not_be_text(tmp_path: Path) -> None:
    result = run("log", "dump", str(tmp_path / "a\udcff"))
    assert result.exit_code == 1
    assert "No such file or directory" in result.stderr


def test_closed_standard_streams_are_no_bug(segment: Path) -> None:
    line = f'"{sys.executable}" -m penstock.cli log dump "{segment}" <&- >&- 2>&-'
    assert subprocess.run(["sh", "-c", line], check=False).returncode == 0


def test_ctrl_c_while_modules_load_shows_nothing(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text(
        "import sys, time\nprint('loading', flush=True)\ntime.sleep(60)\n"
    )
    with subprocess.Popen(
        COMMAND,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"loading\n"
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=20)
    # A shell reports 130, as for every program that Ctrl-C ends.
    assert process.returncode == -signal.SIGINT
    assert errors == b""


def test_ctrl_c_while_a_command_waits_shows_nothing() -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        address = f"127.0.0.1:{mute.getsockname()[1]}"
        with subprocess.Popen(
            [*COMMAND, "-b", address, "topics", "list"], stderr=subprocess.PIPE
        ) as process:
            connection, _ = mute.accept()
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=20)
            connection.close()
    assert process.returncode == -signal.SIGINT
    assert errors == b""
