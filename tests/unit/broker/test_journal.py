"""Levels for systemd's journal."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.broker.journal import goes_to_journal, leveled

_NODE = """
import logging, structlog
from penstock.broker.logs import configure_logs
configure_logs("{format}", "info", node=1)
log = structlog.get_logger()
log.info("all is well")
log.warning("look")
try:
    raise ValueError
except ValueError:
    log.exception("failed")
logging.getLogger("grpc").warning("a library's")
"""


def written(path: Path, log_format: str, journal: str | None = None) -> list[str]:
    with path.open("wb") as file:
        here = os.fstat(file.fileno())
        stream = journal or f"{here.st_dev}:{here.st_ino}"
        subprocess.run(
            [sys.executable, "-c", _NODE.format(format=log_format)],
            stderr=file,
            timeout=60,
            check=True,
            env={**os.environ, "JOURNAL_STREAM": stream},
        )
    return path.read_text().splitlines()


@pytest.mark.parametrize("log_format", ["console", "json"])
def test_each_line_has_its_level(tmp_path: Path, log_format: str) -> None:
    lines = written(tmp_path / "journal", log_format)
    for text, prefix in (
        ("all is well", "<6>"),
        ("look", "<4>"),
        ("failed", "<3>"),
        ("a library's", "<4>"),
    ):
        found = next(line for line in lines if text in line)
        assert found.startswith(prefix), found
    # A traceback on the console is of many lines.
    assert [line for line in lines if line and not line.startswith("<")] == []


def test_what_goes_elsewhere_has_none(tmp_path: Path) -> None:
    lines = written(tmp_path / "file", "console", journal="1:2")
    assert [line for line in lines if line.startswith("<")] == []


def test_why_a_node_does_not_start_is_an_error(tmp_path: Path) -> None:
    with (tmp_path / "journal").open("wb") as file:
        here = os.fstat(file.fileno())
        subprocess.run(
            [sys.executable, "-m", "penstock.cli", "node", "--set", "node.idd=1"],
            stderr=file,
            timeout=60,
            check=False,
            env={**os.environ, "JOURNAL_STREAM": f"{here.st_dev}:{here.st_ino}"},
        )
    problem, step = (tmp_path / "journal").read_text().splitlines()
    assert problem.startswith("<3>error: ")
    assert step.startswith("<3>next: ")


def test_a_stream_that_is_no_file_goes_nowhere_near_the_journal() -> None:
    assert not goes_to_journal(io.StringIO(), {"JOURNAL_STREAM": "1:2"})
    assert not goes_to_journal(sys.stderr, {})


def test_a_level_that_the_journal_does_not_know_is_info() -> None:
    assert leveled("a\n\nb\n", "notice") == "<6>a\n\n<6>b\n"
