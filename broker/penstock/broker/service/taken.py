"""Answers of all kinds count as long as the client has yet to take them, if they are large.

Those with records are counted where they are read (penstock.broker.service.log). Others are made of
metadata: each is small beside those, but of a large cluster they are not small, and of thousands
that nobody takes the sum is not. So a connection that has too much to take already waits before
another is made.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Container, Mapping
from typing import Any, Final

import grpc

from penstock.broker.service.unsent import Unsent
from penstock.raft_meta.guarding import Encoded, Guarded
from penstock.wire.errors import RequestTimedOutError

LARGE_BYTES: Final = 16 * 1024
"""What is smaller is not counted: it is about what a call takes without its answer."""


Tell = Callable[[Any], Any]

AskEncoded = Callable[[Any, Tell | None], bytes | None]
"""Asked for the bytes of an answer as this port tells it; None where they are not known."""


def _nothing_known(_answer: Any, _tell: Tell | None) -> None:
    return None


class Taken:
    """Takes the servicer's methods from the generated code, in the place of a server.

    Their answers are messages of Protocol Buffers. A call that finds no room in time ends with
    RESOURCE_EXHAUSTED: no method has a place of its own for that in its answer. Large ones go out
    as ``tell`` makes them; for all others that is the affair of the server that is given. Those
    that ``encoded`` knows are not turned into bytes again. ``methods`` names those of which answers
    count; without it they all do.

    An answer that comes as bytes, since many share it, waits for room too once it is there: only
    what gRPC makes of it for each takes memory. Of unary calls ``reserved_bytes`` count from where
    an answer begins to be made: for those that take a while, so that many are made at once.
    """

    def __init__(
        self,
        guarded: Guarded,
        unsent: Unsent,
        tell: Tell | None = None,
        encoded: AskEncoded = _nothing_known,
        *,
        methods: Container[str] | None = None,
        reserved_bytes: int = 0,
    ) -> None:
        self._guarded = guarded
        self._unsent = unsent
        self._tell = tell
        self._encoded = encoded
        self._methods = methods
        self._reserved_bytes = reserved_bytes

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        """Called with what ``add_registered_method_handlers`` gets too."""

    def add_registered_method_handlers(
        self, service: str, handlers: Mapping[str, grpc.RpcMethodHandler[Any, Any]]
    ) -> None:
        """Called with a service's methods."""
        counted = {
            name: self._counted(handler)
            if self._methods is None or name in self._methods
            else handler
            for name, handler in handlers.items()
        }
        self._guarded.add_registered_method_handlers(service, counted)

    def _counted(self, handler: Any) -> Any:
        if handler.request_streaming:
            return handler  # Heartbeats: an answer is that of one member, and small.
        if handler.response_streaming:
            make, behave = grpc.unary_stream_rpc_method_handler, self._stream(handler.unary_stream)
        else:
            make, behave = grpc.unary_unary_rpc_method_handler, self._unary(handler.unary_unary)
        serialize = handler.response_serializer
        return make(
            behave,
            handler.request_deserializer,
            lambda answer: answer if isinstance(answer, bytes) else serialize(answer),
        )

    def _unary(self, behave: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        unsent = self._unsent

        async def answer(request: Any, context: Any) -> Any:
            if unsent.total_bytes:
                await self._wait_for_room(context)
            response = await behave(request, context)
            if (data := self._large(response)) is None:
                return response
            share = unsent.share(context.peer())
            context.add_done_callback(share.release)
            share.take(len(data))
            return data

        return self._reserving(behave) if self._reserved_bytes else answer

    def _reserving(self, behave: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        unsent, reserved_bytes = self._unsent, self._reserved_bytes

        async def answer(request: Any, context: Any) -> Any:
            await self._wait_for_room(context)
            share = unsent.share(context.peer())
            context.add_done_callback(share.release)
            share.take(reserved_bytes)
            response = await behave(request, context)
            data = self._large(response)
            share.take((0 if data is None else len(data)) - reserved_bytes)
            return response if data is None else data

        return answer

    def _stream(self, behave: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        unsent = self._unsent

        async def answer(request: Any, context: Any) -> AsyncIterator[Any]:
            if unsent.total_bytes:
                await self._wait_for_room(context)
            async with contextlib.aclosing(behave(request, context)) as responses:
                async for response in responses:
                    if (data := self._large(response)) is None:
                        yield response
                        continue
                    if isinstance(response, Encoded) and unsent.total_bytes:
                        await self._wait_for_room(context)
                    del response  # As the bytes say: it is let go.
                    share = unsent.share(context.peer())
                    share.take(len(data))
                    try:
                        yield data
                    finally:  # Whoever asks for the next one has written this one.
                        share.release()

        return answer

    def _large(self, response: Any) -> bytes | None:
        """The bytes of an answer that counts: the message itself takes several times that, and
        would stay until it is taken. None for all others.
        """
        if isinstance(response, Encoded):
            return response.data if len(response.data) >= LARGE_BYTES else None
        data = self._encoded(response, self._tell)
        if data is None and response.ByteSize() >= LARGE_BYTES:
            told = response if self._tell is None else self._tell(response)
            data = told.SerializeToString()
        return data

    async def _wait_for_room(self, context: Any) -> None:
        share = self._unsent.share(context.peer())
        try:
            await share.room(self._unsent.until_s())
        except RequestTimedOutError as error:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, error.message)
        finally:
            share.release()
