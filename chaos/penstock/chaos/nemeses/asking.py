"""What nemeses ask a cluster, and wait for, before they strike and after they have healed."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Final

from penstock.chaos.errors import FaultError
from penstock.chaos.nemeses import Scene
from penstock.client import AdminClient, PenstockError

PATIENCE_S: Final = 20.0
"""So long is waited for one thing. With what a heal waits for it must be less than the runner
gives the faults' thread to heal."""
_LOOK_S: Final = 0.2


def until(
    is_so: Callable[[], bool], what: str, patience_s: float = PATIENCE_S, look_s: float = _LOOK_S
) -> None:
    """Return when it is so; while nobody answers it is not. Raises FaultError after a while."""
    deadline = time.monotonic() + patience_s
    why = ""
    pause = threading.Event()
    while True:
        try:
            if is_so():
                return
        except PenstockError as error:
            why = f" ({error})"
        if time.monotonic() > deadline:
            raise FaultError(f"{what} not within {patience_s:.0f} s{why}")
        pause.wait(look_s)


def out_of_sync(admin: AdminClient) -> list[str]:
    """The partitions, of all topics, some replica of which is not in sync."""
    return [
        f"{topic.name}-{one.partition}"
        for topic in admin.list_topics(include_internal=True)
        for one in topic.partitions
        if set(one.isr) != set(one.replicas)
    ]


def wait_in_sync(scene: Scene) -> None:
    """Return when all replicas are in sync: then records that one node loses are elsewhere too.

    Raises FaultError. What takes records away strikes at no other time: two nodes that lose them
    one soon after the other are more than ``acks=all`` stands up to.
    """
    left: list[str] = []

    def is_so() -> bool:
        with scene.admin() as admin:
            left[:] = out_of_sync(admin)
        return not left

    try:
        until(is_so, "all replicas are in sync:", 2 * PATIENCE_S)
    except FaultError as error:
        raise FaultError(
            f"{error}: {', '.join(left[:5]) or 'nobody knows of which'}; next: plan faults further "
            "apart"
        ) from None


def has_ended(scene: Scene, node: int, patience_s: float = PATIENCE_S) -> bool:
    """Whether a node ends by itself within the time."""
    with contextlib.suppress(FaultError):
        until(lambda: node not in scene.cluster.running, f"node {node} has ended", patience_s)
        return True
    return False
