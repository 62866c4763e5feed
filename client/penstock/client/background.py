"""One event loop in one daemon thread, on which every synchronous client of a process runs.

One loop rather than one a client: gRPC's asyncio layer wakes every loop of a process for any
event of any of them.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import logging
import os
import threading
import weakref
from collections.abc import Callable, Coroutine
from typing import Any, ClassVar, Final, ParamSpec, Protocol, TypeVar

from penstock.wire.errors import ForkedProcessError, InvalidRequestError

T = TypeVar("T")
P = ParamSpec("P")
F = TypeVar("F", bound="concurrent.futures.Future[Any]")

_LOG: Final = logging.getLogger("penstock.client")
_EXIT_GRACE_MS: Final = 5_000
_POLLER: Final = "PollerCompletionQueue._handle_events"
_REMEDY: Final = (
    "make clients in processes that were started afresh (with multiprocessing, use the 'spawn' "
    "start method), or fork before the first client of the parent is used"
)


class Closable(Protocol):
    """A synchronous client that wants a last chance when the interpreter exits."""

    def close_at_exit(self, timeout_ms: float) -> None:
        """Close within the time; the application did not, so it may have been interrupted."""


class ForkGuard:
    """Refuses what a fork makes impossible; every client makes one before anything else.

    A client does not work in a child of the process that made it. Once a process has used
    gRPC's asyncio layer, none works in its forked children: the layer keeps, for the whole
    process, one wake-up socket that a child shares with its parent and a poller thread that the
    child does not have. A client made there would wait for ever, and take wake-ups from the
    parent's clients, whose group members then miss their heartbeats.
    """

    __slots__ = ("_pid", "_what")

    _grpc_pid: ClassVar[int | None] = None

    def __init__(self, what: str) -> None:
        """Raises ForkedProcessError where no client can work."""
        self._what = what
        self._pid = os.getpid()
        inherited = ForkGuard._grpc_pid
        if inherited is not None and inherited != self._pid:
            raise ForkedProcessError(
                f"no {what} can be made in process {self._pid}: it was forked from process "
                f"{inherited} after that had used a client, and shares its connections; {_REMEDY}"
            )

    @staticmethod
    def note_grpc() -> None:
        """Note that gRPC's asyncio layer is about to be used in this process."""
        if ForkGuard._grpc_pid is None:
            ForkGuard._grpc_pid = os.getpid()

    @property
    def foreign(self) -> bool:
        """Whether this process is not the one that made the client."""
        return os.getpid() != self._pid

    def check(self) -> None:
        """Raise ForkedProcessError in a forked child."""
        if os.getpid() != self._pid:
            raise ForkedProcessError(
                f"this {self._what} was made in process {self._pid}, and this is its forked child "
                f"{os.getpid()}: connections and threads do not survive a fork; {_REMEDY}"
            )


class LoopGuard(ForkGuard):
    """The same for an asyncio client, which belongs to the ``loop`` on which it is first used."""

    __slots__ = ("loop",)

    def __init__(self, what: str) -> None:
        """Raises ForkedProcessError where no client can work."""
        super().__init__(what)
        self.loop: asyncio.AbstractEventLoop | None = None

    def check(self) -> None:
        """Raise ForkedProcessError in a forked child, InvalidRequestError on another loop.

        Outside of any loop, as in a method that waits for nothing, only the former.
        """
        super().check()
        try:
            running = asyncio.get_running_loop()
        except RuntimeError:
            return
        if self.loop is None:
            self.loop = running
        elif self.loop is not running:
            raise InvalidRequestError(
                f"this {self._what} belongs to the event loop on which it was first used, and this "
                "is another one: make a client on each loop, and close it there (asyncio.run "
                "makes a loop each time)"
            )


class LoopThread:
    """The loop and its thread. Thread-safe."""

    _shared: ClassVar[LoopThread | None] = None
    _shared_lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.loop = asyncio.new_event_loop()
        self.loop.set_exception_handler(_handle_loop_exception)
        self._clients: weakref.WeakSet[Closable] = weakref.WeakSet()
        self._thread = threading.Thread(target=self._run, name="penstock-client", daemon=True)
        self._thread.start()
        atexit.register(self._at_exit)

    @classmethod
    def shared(cls) -> LoopThread:
        """The process' own, made when first wanted (and anew in a forked child)."""
        with cls._shared_lock:
            if cls._shared is None or cls._shared.pid != os.getpid():
                cls._shared = LoopThread()
            return cls._shared

    @classmethod
    def current(cls) -> LoopThread | None:
        """The process' own, if there is one yet."""
        return cls._shared

    def register(self, client: Closable) -> None:
        """Have ``client`` closed when the interpreter exits, if it still lives."""
        self._clients.add(client)

    def forget(self, client: Closable) -> None:
        """Undo ``register``: the client was closed."""
        self._clients.discard(client)

    @property
    def is_current(self) -> bool:
        """Whether the caller runs on this very thread, which must never wait."""
        return threading.current_thread() is self._thread

    def check_may_wait(self) -> None:
        """Raise InvalidRequestError on the loop's own thread, which would wait for itself."""
        if self.is_current:
            raise InvalidRequestError(
                "a client method that may have to wait was called from a callback on the client's "
                "own thread, which must not wait; call it from another thread (send() waits only "
                "for a topic's first record: ask partitions_for(topic) beforehand)"
            )

    def run(
        self, work: Callable[P, Coroutine[Any, Any, T]], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """The result of ``work(*args, **kwargs)``. An interrupt (Ctrl-C) cancels the coroutine.

        Raises InvalidRequestError on the loop's own thread, which would wait for itself.
        """
        self.check_may_wait()
        future: concurrent.futures.Future[T] = concurrent.futures.Future()
        try:
            self._start(future, lambda: work(*args, **kwargs))
            return future.result()
        except BaseException:
            if not future.done():
                future.cancel()
            raise

    def submit(
        self, work: Callable[P, Coroutine[Any, Any, T]], *args: P.args, **kwargs: P.kwargs
    ) -> concurrent.futures.Future[T]:
        """Start ``work(*args, **kwargs)`` and do not wait. Cancelling the future cancels it."""
        future: concurrent.futures.Future[T] = concurrent.futures.Future()
        self._start(future, lambda: work(*args, **kwargs))
        return future

    def _start(
        self, future: concurrent.futures.Future[T], make: Callable[[], Coroutine[Any, Any, T]]
    ) -> None:
        # The coroutine is made on the loop: one made here would be left behind, never awaited, by
        # an interrupt (a signal handler's exception) that comes before the loop has it.
        async def run() -> T:
            return await make()

        def start() -> None:
            if not future.cancelled():
                _tie(self.loop.create_task(run()), future)

        self.loop.call_soon_threadsafe(start)

    def call(self, callback: Callable[[], object]) -> None:
        """Run ``callback`` on the loop soon."""
        self.loop.call_soon_threadsafe(callback)

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        while True:
            try:
                self.loop.run_forever()
            except BaseException:
                # Some callback's, and not for this thread: every client of the process needs it.
                _LOG.exception("the clients' thread goes on after what ends other threads")
            else:
                return

    def _at_exit(self) -> None:
        if os.getpid() != self.pid:
            return
        for client in list(self._clients):
            try:
                client.close_at_exit(_EXIT_GRACE_MS)
            except Exception as error:
                _LOG.error("at exit: %s", error)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(timeout=_EXIT_GRACE_MS / 1000)


def contained(callback: Callable[[F], object]) -> Callable[[F], object]:
    """``callback``, of which nothing but an Exception comes out on the clients' thread.

    concurrent.futures passes everything else on (SystemExit, say), and it would end the thread, and
    with it every synchronous client of the process; whoever waits for one would wait for ever.
    """

    def call(future: F) -> None:
        try:
            callback(future)
        except Exception:
            raise
        except BaseException as error:
            shared = LoopThread.current()
            if shared is None or not shared.is_current:
                raise
            _LOG.error(
                "a callback raised %r on the client's own thread, where it ends nothing: have it "
                "tell another thread",
                error,
                exc_info=True,
            )

    return call


def _tie(task: asyncio.Task[T], future: concurrent.futures.Future[T]) -> None:
    """Have ``future`` end as ``task`` does, and a cancelled ``future`` cancel ``task``."""

    def pass_on(_: asyncio.Task[T]) -> None:
        if task.cancelled():
            future.cancel()
        if not future.set_running_or_notify_cancel():
            return
        error = task.exception()
        if error is None:
            future.set_result(task.result())
        else:
            future.set_exception(error)

    def cancel(_: concurrent.futures.Future[T]) -> None:
        if future.cancelled() and not task.done():
            task.get_loop().call_soon_threadsafe(task.cancel)

    task.add_done_callback(pass_on)
    future.add_done_callback(cancel)


def _handle_loop_exception(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    # gRPC's poller wakes every loop of the process for each event. The losers of the race read
    # nothing. The winner passes the event on to the loop that it is for; that one is closed where
    # the event ends what was cancelled in the last moment of an asyncio.run, for which nobody
    # waits. What else is in the queue has woken us as well, and is passed on in another turn.
    # Harmless both, and nothing that a user could act on.
    of_poller = _POLLER in str(context.get("message"))
    late = of_poller and isinstance(context.get("exception"), RuntimeError)
    if late or isinstance(context.get("exception"), BlockingIOError):
        return
    loop.default_exception_handler(context)


def _forget_locks_in_child() -> None:
    # The lock may have been held by a thread that the child does not have.
    LoopThread._shared_lock = threading.Lock()
    LoopThread._shared = None


os.register_at_fork(after_in_child=_forget_locks_in_child)
