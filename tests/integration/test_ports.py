"""No two runs of tests have the same ports."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

from tests.integration.ports import PORTS_A_RUN, free_ports

ROOT = Path(__file__).resolve().parents[2]


def test_another_run_has_other_ports() -> None:
    ours = free_ports(1)[0]
    done = subprocess.run(
        [sys.executable, "-c", "from tests.integration.ports import free_ports as f; print(*f(9))"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    theirs = [int(word) for word in done.stdout.split()]
    assert len(set(theirs)) == 9
    assert {port // PORTS_A_RUN for port in theirs}.isdisjoint({ours // PORTS_A_RUN})


def test_a_port_comes_again_after_all_others_and_only_where_it_is_free() -> None:
    (taken,) = free_ports(1)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", taken))
        turn = free_ports(PORTS_A_RUN // 2)
        assert len({*turn, taken}) == PORTS_A_RUN // 2 + 1
        assert taken not in free_ports(PORTS_A_RUN // 2)
