"""What `penstock quorum add` says while a controller catches up."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from penstock.cli.errors import report
from penstock.wire.errors import PenstockError
from penstock.wire.transport import format_address

if TYPE_CHECKING:
    from penstock.client import AdminClient
    from penstock.client.descriptions import QuorumDescription

_LOOK_SECONDS: Final = 1.0


@contextmanager
def told_of_progress(admin: AdminClient, node: int) -> Iterator[None]:
    """Meanwhile say on standard error, a second apart and where it changed, how far ``node`` is.

    A thread of its own asks; whoever waits for the change can be interrupted.
    """
    over = threading.Event()
    watcher = threading.Thread(
        target=watch, args=(admin.describe_quorum, node, over), name="progress", daemon=True
    )
    watcher.start()
    try:
        yield
    finally:
        over.set()


def watch(
    describe: Callable[[], QuorumDescription],
    node: int,
    over: threading.Event,
    look_seconds: float = _LOOK_SECONDS,
) -> None:
    """Ask and say it until ``over``."""
    said = ""
    while not over.wait(look_seconds):
        try:
            line = progress(describe(), node)
        except PenstockError:
            continue  # The change itself will say why, should it fail.
        except (RuntimeError, CancelledError):
            if not over.is_set():
                raise
            continue  # The client's loop ended under the question, as the command does.
        if line and line != said and not over.is_set():
            said = line
            report(line)


def progress(quorum: QuorumDescription, node: int) -> str:
    """How far a controller is on its way to become a voter; empty if nothing is known of it."""
    newcomer = quorum.catching_up
    if newcomer is None:
        return ""
    if newcomer.node_id != node:
        return f"controller {node} waits for controller {newcomer.node_id}, which is being added"
    where = f"controller {node} at {format_address(newcomer.host, newcomer.port)}"
    if newcomer.match_index < 0:
        return f"{where} has not answered yet"
    silent = " and does not answer now" if newcomer.is_unreachable else ""
    return f"{where} has {newcomer.match_index} of {quorum.last_index} entries{silent}"
