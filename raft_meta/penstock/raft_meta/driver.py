"""A voter on a thread of its own, which sleeps until the next deadline or something comes in."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Final

from penstock.raft_meta.guard import Message
from penstock.raft_meta.punctuality import LATE_S
from penstock.raft_meta.quorum import QuorumStatus
from penstock.raft_meta.voter import Event, Voter

Operation = Callable[[Voter, float], None]
Output = Callable[[list[Event], list[tuple[int, Message]], QuorumStatus], None]

INBOX_OPERATIONS: Final = 16_384
INBOX_BYTES: Final = 64 * 1024 * 1024
"""What may wait for the thread while the disk holds it up."""

ROOM_RETRY_S = 1.0
"""So long after a write found no room on the disk it is tried again."""

_OPERATIONS_A_STEP: Final = 4096
_LONGEST_SLEEP_S: Final = 60.0

LONGEST_STUCK_S: Final = 5.0
"""A loop that stands still for longer, while this thread runs, excuses no silence any more: a
leader whose loop is stuck serves nobody, and must not take itself for one for ever.
"""


def _never_late(_now_s: float) -> None:
    """There is no loop to look at."""


class VoterThread:
    """Runs a voter. ``on_output`` and ``on_failed`` are called on the thread.

    Whatever the voter raises ends the thread and goes to ``on_failed``: a voter that is not sure
    of its disk must not go on.

    A voter without room on its disk waits in ``await_room`` until there is some: to the others it
    is one that hangs. ``on_room(error)`` is called when that begins, ``on_room(None)`` when it is
    over. It leads no more then: what it led meanwhile, it led without knowing. The only voter may
    go on leading, unless ``on_room(error)`` has answered that others were told that it does not.

    The voter is told of the time in which it could hear nobody, before it judges others by their
    silence: the thread stood still, or was long at one step, or the loop that carries the messages
    stands still. ``loop_late_since_s(now_s)``, called on the thread, says since when it does.
    """

    def __init__(
        self,
        make_voter: Callable[[float], Voter],
        *,
        on_output: Output,
        on_failed: Callable[[BaseException], None],
        on_room: Callable[[Exception | None], bool] = lambda _error: False,
        loop_late_since_s: Callable[[float], float | None] = _never_late,
    ) -> None:
        self._on_room = on_room
        self._loop_late_since_s = loop_late_since_s
        self._without_room = False
        self._due_s = math.inf  # When the thread is to run next, whatever comes in.
        self._began_s = math.inf  # The last step.
        self._told_to_resign = False  # When the disk had no room.
        self._make_voter = make_voter
        self._on_output = on_output
        self._on_failed = on_failed
        self._operations: deque[tuple[Operation, int]] = deque()
        self._waiting_bytes = 0
        self._stopping = False
        self._wake = threading.Condition(threading.Lock())  # Never taken twice: the cheaper kind.
        self._ready: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, name="raft", daemon=True)

    def start(self) -> Future[None]:
        """Begin; the future ends when the disk was read, or with what was wrong with it."""
        self._thread.start()
        return self._ready

    def submit(self, operation: Operation) -> None:
        """Have ``operation(voter, now_s)`` called on the thread, in order, before its next step."""
        with self._wake:
            self._add(operation, 0)

    def offer(self, operation: Operation, size_bytes: int) -> bool:
        """As submit, for what comes from outside: False, and it is not called, when the thread is
        held up so long that INBOX_OPERATIONS or INBOX_BYTES wait for it.
        """
        with self._wake:
            if (
                len(self._operations) >= INBOX_OPERATIONS
                or self._waiting_bytes + size_bytes > INBOX_BYTES
            ):
                return False
            self._add(operation, size_bytes)
            return True

    def _add(self, operation: Operation, size_bytes: int) -> None:
        self._operations.append((operation, size_bytes))
        self._waiting_bytes += size_bytes
        self._wake.notify()

    def stop(self) -> None:
        """Have the thread close the voter and end; ``join`` waits for it."""
        with self._wake:
            self._stopping = True
            self._wake.notify()

    def join(self) -> None:
        """Wait for the end of the thread."""
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        try:
            voter = self._make_voter(time.monotonic())
        except BaseException as error:
            if self._is_awaited():
                self._ready.set_exception(error)
            return
        if self._is_awaited():
            self._ready.set_result(None)
        try:
            self._drive(voter)
            voter.close()
        except BaseException as error:
            self._on_failed(error)

    def _is_awaited(self) -> bool:
        """From here on whoever started the thread cannot give up waiting any more."""
        return self._ready.set_running_or_notify_cancel()

    def _drive(self, voter: Voter) -> None:
        while True:
            self._step_ended(voter, self._now_s())
            operations = self._wait(self._due_s)
            if operations is None:
                return
            events, messages = self._act(voter, operations)
            self._on_output(events, messages, voter.status())

    def _step_ended(self, voter: Voter, now_s: float) -> None:
        """Decide when to run next. What came in during a long step was not heard yet."""
        was_long = now_s - self._began_s > LATE_S
        self._due_s = self._began_s if was_long else max(voter.next_deadline_s(), now_s)

    def _count_standstills(self, voter: Voter, now_s: float) -> None:
        """Before anything that waited is heard: it came while nobody listened."""
        late_s = now_s - self._due_s
        since_s = self._due_s if late_s > LATE_S else now_s
        loop_since_s = self._loop_late_since_s(now_s)
        if loop_since_s is not None and since_s - loop_since_s <= LONGEST_STUCK_S:
            since_s = min(since_s, loop_since_s)
        if since_s < now_s:
            voter.stood_still(since_s, now_s)

    def _act(
        self, voter: Voter, operations: list[Operation]
    ) -> tuple[list[Event], list[tuple[int, Message]]]:
        """One step, and what is due after one that had to wait for room."""
        self._began_s = now_s = self._now_s()
        self._count_standstills(voter, now_s)
        for operation in operations:
            operation(voter, now_s)
        events, messages = voter.step(now_s)
        while self._without_room:
            self._without_room = False
            self._on_room(None)
            now_s = self._now_s()
            voter.resign(now_s, even_alone=self._told_to_resign)
            later_events, later_messages = voter.step(now_s)
            events, messages = events + later_events, messages + later_messages
        return events, messages

    def _now_s(self) -> float:
        return time.monotonic()

    def await_room(self, error: Exception) -> None:
        """On the thread: wait before the voter tries again what found no room.

        Raises the error once the thread is to stop.
        """
        if not self._without_room:
            self._without_room = True
            self._told_to_resign = self._on_room(error)
        if self._stops_within(ROOM_RETRY_S):
            raise error

    def _stops_within(self, seconds: float) -> bool:
        """On the thread: wait; whether it is to stop."""
        with self._wake:
            return self._wake.wait_for(lambda: self._stopping, seconds)

    def _wait(self, deadline_s: float) -> list[Operation] | None:
        """What came in, at the latest at the deadline; None when it is time to stop."""
        with self._wake:
            while not self._operations and not self._stopping:
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    break
                self._wake.wait(min(left_s, _LONGEST_SLEEP_S))
            if self._stopping:
                return None
            count = min(len(self._operations), _OPERATIONS_A_STEP)
            taken = [self._operations.popleft() for _ in range(count)]
            self._waiting_bytes -= sum(size_bytes for _, size_bytes in taken)
            return [operation for operation, _ in taken]
