"""When a snapshot of the state machine is due, and how it is taken while the voter goes on."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import TypeVar

from penstock.raft_meta.config import ControllerConfig
from penstock.raft_meta.driver import Operation
from penstock.raft_meta.quorum import StateMachine
from penstock.raft_meta.snapshots import SnapshotStore
from penstock.raft_meta.voter import Voter

T = TypeVar("T")


class SnapshotTaking:
    """Takes one snapshot at a time. Belongs to the event loop.

    What takes long is done on threads of the executor: encoding the state, and writing it to the
    disk. The voter's thread, which ``submit`` gives work to, says before the write of what term
    and voters the snapshot is, and puts the file in its place after it. ``on_failed`` is called
    with whatever goes wrong, but for a disk without room: the log stays as long as it is then.
    """

    def __init__(
        self,
        config: ControllerConfig,
        machine: StateMachine,
        store: SnapshotStore,
        *,
        submit: Callable[[Operation], None],
        on_failed: Callable[[BaseException], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._config = config
        self._machine = machine
        self._store = store
        self._submit = submit
        self._on_failed = on_failed
        self._entries = 0  # Since the last snapshot, as all that follows.
        self._bytes = 0
        self._busy_s = 0.0
        self._counted_s = 0.0  # CPU time of the loop that was counted in it, or before it.
        self._task: asyncio.Task[None] | None = None  # Until the snapshot is in its place.
        self._writing: asyncio.Future[bool] | None = None

    # When.

    def feeding_begins(self) -> None:
        """The state machine is fed from now on: count the time that it takes."""
        self._counted_s = time.thread_time()

    def feeding_ends(self) -> None:
        """The loop goes on with something else."""
        self._busy_s += time.thread_time() - self._counted_s

    def count(self, payload: bytes) -> None:
        """A command was applied."""
        self._entries += 1
        self._bytes += len(payload)

    def count_anew(self) -> None:
        """The state machine is what a snapshot says, or one of it is being taken."""
        self._entries = self._bytes = 0
        self._busy_s = 0.0
        self._counted_s = time.thread_time()

    def begin_if_due(self, applied_index: int) -> None:
        """Begin to take a snapshot, if there is reason to and none is being taken."""
        config = self._config
        due = (
            self._entries >= config.snapshot_entries
            or self._bytes >= config.snapshot_bytes
            or self._busy_s * 1000 >= config.snapshot_apply_ms
        )
        if self._task is not None or not due or not self._entries:
            return
        self.count_anew()
        # Frozen before anything else is applied.
        self._task = self._loop.create_task(self._take(applied_index, self._machine.freeze()))
        self._task.add_done_callback(self._ended)

    # How.

    async def _take(self, index: int, encode: Callable[[], bytes]) -> None:
        data = await self._loop.run_in_executor(None, encode)
        snapshot = await self._on_voter(lambda voter: voter.snapshot_of(index, data))
        if snapshot is None:
            return
        self._writing = self._loop.run_in_executor(None, self._store.write_aside, snapshot)
        # Shielded, since a write that began ends by itself: ``stop`` must be able to wait for it.
        if await asyncio.shield(self._writing):
            await self._on_voter(lambda voter: voter.keep(snapshot))

    def _on_voter(self, operation: Callable[[Voter], T]) -> asyncio.Future[T]:
        """What the operation answers on the voter's thread; never ends where that thread does."""
        answer: asyncio.Future[T] = self._loop.create_future()

        def tell(result: T) -> None:
            if not answer.done():
                answer.set_result(result)

        def operate(voter: Voter, _now_s: float) -> None:
            result = operation(voter)
            with contextlib.suppress(RuntimeError):  # The loop is closed: nobody waits.
                self._loop.call_soon_threadsafe(tell, result)

        self._submit(operate)
        return answer

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._task = None
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._on_failed(error)

    async def stop(self) -> None:
        """Take no more; nothing is written any more when this returns.

        The voter's thread must have ended. Waits for a write that is under way.
        """
        if self._task is not None:
            self._task.cancel()  # First, so that no write begins while this waits.
        if self._writing is not None:
            await asyncio.wait([self._writing])
        await self._loop.run_in_executor(None, self._store.remove_leftovers)
