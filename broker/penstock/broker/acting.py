"""Acting on the metadata: in small steps, so that the event loop's other work has its turn."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final, Protocol

from penstock.broker.core.metadata_image import ImageChange
from penstock.broker.replication.ports import Step

SLICE_S: Final = 0.015
"""Acting takes so much time, and the rest of a step, before the event loop's other work passes."""


class Replicas(Protocol):
    """Who acts in steps; penstock.broker.replication.manager.ReplicaManager is the real one."""

    def on_metadata(self, change: ImageChange) -> Iterator[Step]:
        """Act on what was applied to the image, a step for each time that the next is asked for.

        What a step yields is awaited before that.
        """
        ...

    def catch_up(self) -> Iterator[Step]:
        """Act on what the image had before this process was registered, in steps."""
        ...


class MetadataActor:
    """Acts on one change of the image after the other, and on the registration. On one event loop.

    How long acting on a change takes is not known before: it opens logs and renames directories,
    which waits for the disk. So it is cut by time and not by count, and a step, which is
    all that happens to one partition, is never cut. ``first`` comes before the replicas' steps, the
    ``followers`` after them, each of which is a step. ``on_caught_up`` is called when the image had
    reached the registration before that was known, once everything is hosted; ``on_failed`` with
    what that raised, after which the broker is not fit to go on.
    """

    def __init__(
        self,
        replicas: Replicas,
        *,
        first: Callable[[ImageChange], None],
        followers: Sequence[Callable[[ImageChange], None]],
        on_caught_up: Callable[[], None],
        on_failed: Callable[[BaseException], None],
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._replicas = replicas
        self._first = first
        self._followers = followers
        self._on_caught_up = on_caught_up
        self._on_failed = on_failed
        self._clock_s = clock_s
        self._turn = asyncio.Lock()  # Steps of two changes must not mix.
        self._catching_up: set[asyncio.Task[None]] = set()
        self._failure: BaseException | None = None  # Of acting on the registration.

    async def until_idle(self) -> None:
        """Return when the image may change: nothing acts on it, nor begins to before the caller's
        next suspension. To be awaited by who also awaits ``on_change``.
        """
        while self._catching_up:
            await asyncio.wait(self._catching_up)

    async def on_change(self, change: ImageChange) -> None:
        """Act on ``change``, which was applied to the image; done when this returns.

        The image must not change before that. What a step raises goes through, and leaves the rest
        undone: the caller must not go on as if it were done. Cancelled, it ends between two steps.
        """
        async with self._turn:
            if self._failure is not None:
                raise self._failure
            await self._in_slices(self._steps(change))

    def on_registered(self) -> None:
        """This process was registered: begin to host if the image is that far already."""
        task = asyncio.create_task(self._catch_up(), name="acting on the registration")
        self._catching_up.add(task)
        task.add_done_callback(self._catching_up.discard)

    async def stop(self) -> None:
        """Act on the registration no more; who calls ``on_change`` ends that by cancelling it."""
        tasks = list(self._catching_up)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _catch_up(self) -> None:
        try:
            async with self._turn:
                await self._in_slices(self._replicas.catch_up())
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            self._failure = error
            self._on_failed(error)
        else:
            self._on_caught_up()

    def _steps(self, change: ImageChange) -> Iterator[Step]:
        self._first(change)
        yield None
        yield from self._replicas.on_metadata(change)
        for follower in self._followers:
            follower(change)
            yield None

    async def _in_slices(self, steps: Iterator[Step]) -> None:
        began_s = self._clock_s()
        for awaited in steps:
            if awaited is not None:
                await awaited()
                began_s = self._clock_s()
            if self._clock_s() - began_s >= SLICE_S:
                await asyncio.sleep(0)  # Not a wait: whoever else is due has its turn.
                began_s = self._clock_s()
