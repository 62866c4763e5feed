"""Ports of 127.0.0.1 for nodes, of which no two test runs on one machine ever have the same.

A node that is down keeps its port for when it is started again, and nothing but its test knows:
asked for "any free port", the kernel may give it to another run's node meanwhile. So each run has
a thousand ports to itself, below those that the kernel gives out by itself, and hands them out in
turn. Other tests and benchmarks look for free ports from 21,000 on by ``find_base_port``, which
gives two processes none in common either.
"""

from __future__ import annotations

import itertools
import socket
from functools import cache

FIRST = 11_000
PORTS_A_RUN = 1_000
RUNS = 10


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now, all different. For one thread."""
    free = (port for port in _own().turns if _is_free(port))
    return list(itertools.islice(free, count))


class _Ports:
    """The ports of this run, from when it first asks until its process ends."""

    def __init__(self) -> None:
        self._claim, first = _claim()  # Kept open: it tells other runs that these are taken.
        self.turns = itertools.cycle(range(first + 1, first + PORTS_A_RUN))


_own = cache(_Ports)


def _claim() -> tuple[socket.socket, int]:
    """A socket bound to the first of a thousand ports that no other run has, and that port."""
    for first in range(FIRST, FIRST + RUNS * PORTS_A_RUN, PORTS_A_RUN):
        claim = socket.socket()
        try:
            claim.bind(("127.0.0.1", first))
        except OSError:
            claim.close()
            continue
        return claim, first
    raise AssertionError(f"{RUNS} runs have ports already, from {FIRST} on")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
