"""What a node's container does before SIGTERM: wait until the node may leave, and drain it.

    python prestop.py SECONDS

takes no longer than that: three quarters of it to wait until no partition would fall under its
min.insync.replicas and the controllers can spare the node (/can-roll at metrics.listen), the rest
to hand the node's leaderships to others (``drain``). Then the node is stopped in any case, and does
what was not done as far as it can: exit status 1 and a line say so. A rolling restart goes by
readiness alone, and a node is ready before its replicas are in sync again: this is what keeps two
nodes from being out of sync at once.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from http import HTTPStatus
from pathlib import Path

from penstock.broker.config import NodeConfig
from penstock.wire.transport import parse_address

SETTINGS = Path("/etc/penstock/node.toml")
WAITING_SHARE = 0.75
POLL_S = 0.5
ANSWER_S = 5.0


def why_not_yet(url: str) -> str:
    """Why the node should not leave yet; empty when it may, or where nobody can tell."""
    try:
        with urllib.request.urlopen(url, timeout=ANSWER_S):  # noqa: S310 - of this container.
            return ""
    except urllib.error.HTTPError as error:
        if error.code == HTTPStatus.SERVICE_UNAVAILABLE:
            return error.read(2000).decode(errors="replace").strip() or "it says so"
        return ""
    except OSError:
        # It does not serve: there is nothing to wait for.
        return ""


def wait_until_it_may_leave(
    ask: Callable[[], str],
    timeout_s: float,
    clock_s: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> str:
    """Ask until there is no reason to stay, or the time is over; the last reason."""
    end_s = clock_s() + timeout_s
    while (reason := ask()) and clock_s() < end_s:
        sleep(POLL_S)
    return reason


def drain(command: Sequence[str], timeout_s: float) -> str:
    """Run what drains the node; why that failed, or nothing."""
    try:
        done = subprocess.run(  # noqa: S603 - our own command.
            command, timeout=max(timeout_s, 1.0), capture_output=True, text=True, check=False
        )
    except subprocess.TimeoutExpired:
        return f"{' '.join(command)} was not done within {timeout_s:.0f} s"
    except OSError as error:
        return f"{command[0]}: {error.strerror}"
    return done.stderr.strip() if done.returncode else ""


def main(arguments: Sequence[str]) -> int:
    """The exit status."""
    timeout_s = float(arguments[0])
    end_s = time.monotonic() + timeout_s
    config = NodeConfig.load(SETTINGS if SETTINGS.exists() else None, os.environ)
    complaints = []
    if config.metrics_listen:
        _, port = parse_address(config.metrics_listen)
        reason = wait_until_it_may_leave(
            lambda: why_not_yet(f"http://127.0.0.1:{port}/can-roll"), timeout_s * WAITING_SHARE
        )
        if reason:
            complaints.append(f"it leaves although it should not: {reason}")
    if failed := drain(["penstock", "drain", str(config.node_id)], end_s - time.monotonic()):
        complaints.append(f"it is not drained: {failed}")
    for complaint in complaints:
        sys.stdout.write(f"{complaint}\n")
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
