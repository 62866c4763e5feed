"""One bidirectional gRPC stream: messages out in order, messages in, one end."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any, Final

import grpc

from penstock.client.transport import rpc_error
from penstock.wire.errors import NetworkError, PenstockError

_END: Final = object()


class BidiStream:
    """Belongs to one event loop. Opens the call in its own task.

    ``on_message`` gets each message that comes; ``on_end`` is called once with the reason,
    unless ``cancel`` came first. Then ``unwritten`` is what was surely never on the wire.
    """

    def __init__(
        self,
        open_call: Callable[[], Any],
        *,
        where: str,
        what: str,
        on_message: Callable[[Any], object],
        on_end: Callable[[PenstockError], object],
    ) -> None:
        self.ended = False
        self.broken = False  # It ended otherwise than by the other side's closing it.
        self._open_call = open_call
        self._where = where
        self._what = what
        self._on_message = on_message
        self._on_end = on_end
        self._outbox: deque[tuple[Any, Callable[[], object] | None]] = deque()
        self._filled = asyncio.Event()
        self._task = asyncio.ensure_future(self._run())

    def send(self, message: Any, on_written: Callable[[], object] | None = None) -> None:
        """Queue a message; those queued go out in order. ``on_written`` once it is under way."""
        self._outbox.append((message, on_written))
        self._filled.set()

    def finish(self) -> None:
        """Say that nothing more comes, after what is queued; the other side then ends it."""
        self.send(_END)

    def cancel(self) -> None:
        """Give the stream up; it reports nothing more."""
        self.ended = True
        self._task.cancel()

    async def finished(self) -> None:
        """Wait until its task has ended. Cancelling this does not cancel the stream."""
        await asyncio.wait([self._task])

    @property
    def unwritten(self) -> list[Any]:
        """The queued messages of which nothing was given to a connection, in order."""
        return [message for message, _ in self._outbox if message is not _END]

    async def _run(self) -> None:
        error: PenstockError
        self.broken = True
        try:
            call = self._open_call()
            writer = asyncio.ensure_future(self._write(call))
            try:
                await self._read(call)
            finally:
                writer.cancel()
                call.cancel()
                await asyncio.gather(writer, return_exceptions=True)
            error = NetworkError(f"{self._where} ended the stream {self._what}")
            self.broken = False
        except grpc.aio.AioRpcError as failure:
            error = rpc_error(failure, self._where, self._what)
        except PenstockError as failure:
            error = failure
        except (asyncio.InvalidStateError, grpc.aio.UsageError) as failure:
            error = NetworkError(f"{self._where}: {failure}")
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            # Not this task was cancelled but the call, with its channel.
            error = NetworkError(f"the connection to {self._where} was closed")
        self.ended = True
        self._on_end(error)

    async def _write(self, call: Any) -> None:
        # Until there is a connection nothing leaves the outbox: one that is refused takes nothing.
        await call.wait_for_connection()
        while True:
            while self._outbox:
                message, on_written = self._outbox.popleft()
                if message is _END:
                    await call.done_writing()
                    return
                await call.write(message)
                if on_written is not None:
                    on_written()
            self._filled.clear()
            await self._filled.wait()

    async def _read(self, call: Any) -> None:
        end = grpc.aio.EOF  # type: ignore[attr-defined] # missing in grpc-stubs
        while (message := await call.read()) is not end:
            self._on_message(message)
