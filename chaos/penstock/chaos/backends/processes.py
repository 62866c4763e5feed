"""What is done to a process of this machine beside ending it: stop it in its tracks, limit it."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from penstock.chaos.errors import FaultError

_SECONDS: Final = 10.0
_POLL_S: Final = 0.001

DESCRIPTORS: Final = resource.RLIMIT_NOFILE
MEMORY: Final = resource.RLIMIT_DATA
"""What the process may have for itself alone: its heap, its threads' stacks. Address space would
count files that LMDB has mapped too, which take no memory."""


def pause(pid: int) -> None:
    """Stop it in its tracks, and return when it stands still; nothing where it is gone."""
    _signal_and_wait(pid, signal.SIGSTOP, lambda: state(pid) in ("T", "Z", ""))


def resume(pid: int) -> None:
    """Have it go on, and return when it does; nothing where it is gone."""
    _signal_and_wait(pid, signal.SIGCONT, lambda: state(pid) != "T")


def state(pid: int) -> str:
    """What the kernel says that it does, such as S, R or T (stopped); empty where it is gone."""
    with contextlib.suppress(OSError, IndexError):
        # Behind the name, which may have any letters in it.
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    return ""


def data_bytes(pid: int) -> int:
    """What MEMORY counts of it now. Raises FaultError where it is gone."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines():
            if line.startswith("VmData:"):
                return int(line.split()[1]) * 1024
    raise FaultError(f"process {pid} is gone, so that nobody knows what memory it has")


def open_descriptors(pid: int) -> int:
    """How many it has open. Raises FaultError where it is gone."""
    try:
        return len(os.listdir(f"/proc/{pid}/fd"))  # noqa: PTH208 - they are counted, not used.
    except OSError:
        raise FaultError(f"process {pid} is gone, so that nobody knows what it has open") from None


def limit(pid: int, what: int, most: int | None) -> None:
    """From now on it may have no more; None is what this process may have.

    Nothing where it is gone. Its hard limit stays, so that it can be given back what it had.
    """
    with contextlib.suppress(ProcessLookupError):
        _, hard = resource.prlimit(pid, what)
        wanted = resource.getrlimit(what)[0] if most is None else most
        if hard != resource.RLIM_INFINITY:
            wanted = hard if wanted == resource.RLIM_INFINITY else min(wanted, hard)
        resource.prlimit(pid, what, (wanted, hard))


def _signal_and_wait(pid: int, number: int, has_come: Callable[[], bool]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
    deadline = time.monotonic() + _SECONDS
    while not has_come():
        if time.monotonic() > deadline:
            raise FaultError(f"process {pid} does not react to signal {number}")
        time.sleep(_POLL_S)
