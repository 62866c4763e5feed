"""Refuses two at once in what only one may do at a time."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

from penstock.client.errors import ConcurrentUseError


class OnePoller:
    """Entered with ``with``; by whoever is in already, as often as they like.

    ``who`` says who enters: a thread, or a task of one event loop. Raises ConcurrentUseError for
    anybody else, at once: nobody waits here. Safe from any thread.
    """

    def __init__(self, who: Callable[[], object]) -> None:
        self._who = who
        # One entry at most: who is in, and how deep. ``setdefault`` is one step for all threads,
        # and an interrupt right after it leaves somebody in who may go in again.
        self._inside: dict[str, tuple[object, list[None]]] = {}

    def __enter__(self) -> None:
        me = self._who()
        inside, depth = self._inside.setdefault("poller", (me, []))
        if inside != me:
            raise ConcurrentUseError(
                "the consumer is being read by another thread or task at this moment; next: read "
                "it in one at a time, or give each a consumer of its own (in one group they share "
                "the partitions)"
            )
        depth.append(None)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        _, depth = self._inside["poller"]
        depth.pop()
        if not depth:
            del self._inside["poller"]
