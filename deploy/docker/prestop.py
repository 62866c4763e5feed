"""What a node's container does before SIGTERM: wait until the node may leave, and drain it.

    python prestop.py SECONDS

takes no longer than that. Half of it at most to wait until no partition would fall under its
min.insync.replicas and the controllers can spare the node (/can-roll at metrics.listen), a quarter
to hand the node's leaderships to others (``drain``), the rest to ask once more: of several nodes
that are stopped at the same moment, and were all told that they may leave, the one that was drained
first may still, and the others wait until it is back. Then the node is stopped in any case, and
does what was not done as far as it can: exit status 1 and a line say so. A rolling restart goes by
readiness alone, and a node is ready before its replicas are in sync again: this is what keeps two
nodes from being out of sync at once. What waiting cannot mend, such as a topic with one replica, is
said and not waited for. A controller that is no broker leads nothing that could be handed over: all
of the time is for it to wait until it can be spared.
"""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from penstock.broker.config import NodeConfig
from penstock.wire.transport import parse_address

SETTINGS = Path("/etc/penstock/node.toml")
WAITING_SHARE = 0.5
DRAINING_SHARE = 0.25
POLL_S = 0.5
ANSWER_S = 12.0
"""A node that is busy takes up to nine seconds to say so."""
EVERYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - where it is asked, not bound.


class Verdict(NamedTuple):
    """Why the node should not leave yet, if waiting helps, and if it knows itself to be drained."""

    reason: str = ""
    passes: bool = False
    drained: bool = True

    def after_drain(self) -> Verdict:
        """That of a node that has been drained: before it knows that, it does not count."""
        if self.drained or self.passes:
            return self
        return Verdict(self.reason or "it has not heard of its drain yet", passes=True)


def ask(address: tuple[str, int], timeout_s: float) -> Verdict:
    """What the node says; no reason where nobody can tell."""
    host, port = address
    connection = http.client.HTTPConnection(EVERYWHERE.get(host, host), port, timeout=timeout_s)
    try:
        connection.request("GET", "/can-roll")
        answer = connection.getresponse()
        text = answer.read(100_000).decode(errors="replace").strip()
    except ConnectionRefusedError:
        # It does not serve: there is nothing to wait for.
        return Verdict()
    except (OSError, http.client.HTTPException) as error:
        said = f"it does not answer at port {port}: {error or type(error).__name__}"
        return Verdict(said, passes=True)
    finally:
        connection.close()
    if answer.status not in (http.HTTPStatus.OK, http.HTTPStatus.SERVICE_UNAVAILABLE):
        return Verdict()
    try:
        told = json.loads(text)
        reason, passes = "; ".join(told["reasons"]), bool(told["passes"])
        drained = bool(told["drained"])
    except (ValueError, KeyError, TypeError):
        reason, passes, drained = text, True, True
    if answer.status == http.HTTPStatus.OK:
        return Verdict(drained=drained)
    return Verdict(reason or "it says so", passes, drained)


def wait_until_it_may_leave(
    look: Callable[[float], Verdict],
    timeout_s: float,
    clock_s: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> str:
    """Ask, with the seconds that are left, until nothing is worth to wait for or the time is over.

    The last reason is returned.
    """
    end_s = clock_s() + timeout_s
    while (verdict := look(end_s - clock_s())).passes and clock_s() + POLL_S < end_s:
        sleep(POLL_S)
    return verdict.reason


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
    address = parse_address(config.metrics_listen) if config.metrics_listen else None

    def look(left_s: float) -> Verdict:
        assert address is not None
        return ask(address, max(POLL_S, min(ANSWER_S, left_s)))

    def look_after_drain(left_s: float) -> Verdict:
        return look(left_s).after_drain()

    if "broker" not in config.roles:
        reason = "" if address is None else wait_until_it_may_leave(look, timeout_s)
        return told([f"it leaves although it should not: {reason}"] if reason else [])
    if address is not None:
        wait_until_it_may_leave(look, timeout_s * WAITING_SHARE)
    draining_s = timeout_s * DRAINING_SHARE
    # It needs a second to start, and knows best why it was not done.
    within = f"{max(draining_s - 2, draining_s / 2):.1f}"
    failed = drain(["penstock", "drain", str(config.node_id), "--timeout", within], draining_s)
    reason = ""
    if address is not None:
        reason = wait_until_it_may_leave(
            look if failed else look_after_drain, end_s - time.monotonic()
        )
    complaints = [f"it leaves although it should not: {reason}"] if reason else []
    if failed:
        complaints.append(f"it is not drained: {failed}")
    return told(complaints)


def told(complaints: Sequence[str]) -> int:
    """Say what was not as it should be; the exit status."""
    for complaint in complaints:
        sys.stdout.write(f"{complaint}\n")
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
