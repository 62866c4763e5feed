"""`penstock drain` where nobody answers: it has less time than clients take to say why."""

from __future__ import annotations

import socket
import time

import pytest
from typer.testing import CliRunner

from penstock.cli.app import app


@pytest.mark.parametrize("more", [(), ("--undo",)], ids=["drain", "undo"])
def test_within_a_short_time_too_it_says_why_nobody_answers(more: tuple[str, ...]) -> None:
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))  # And does not listen.
        address = f"127.0.0.1:{reserved.getsockname()[1]}"
        began_s = time.monotonic()
        done = CliRunner().invoke(app, ["drain", "1", *more, "--timeout", "2", "-b", address])
    assert done.exit_code == 1
    assert f"{address}: connection refused (nothing listens there)" in done.stderr
    assert time.monotonic() - began_s < 10
