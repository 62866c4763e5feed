"""Which connection whole requests arrived on, and how large they were.

gRPC takes a request in for as long as it comes, and hands it over when it is whole. So what a
connection brought and nobody was handed lies in gRPC's memory; who is told here can say how much.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc

Arrived = Callable[[int], object]
"""Told the bytes of each request of a call."""

Arrivals = Callable[[str], Arrived]
"""Asked where a call begins, with the connection's peer as gRPC names it: on the event loop."""


class _Request:
    """A request on its way from the parser, which knows its size, to where the peer is known."""

    __slots__ = ("message", "size_bytes")

    def __init__(self, message: Any, size_bytes: int) -> None:
        self.message = message
        self.size_bytes = size_bytes


class CountedStream:
    """A method that takes a stream of requests: each of its calls has a handler of its own."""

    def __init__(self, handler: Any, arrivals: Arrivals) -> None:
        self._handler = handler
        self._arrivals = arrivals

    def of_one_call(self) -> Any:
        """The handler of a call that begins."""
        handler, arrivals = self._handler, self._arrivals
        behave = handler.stream_stream or handler.stream_unary
        parse = handler.request_deserializer
        arrived: Arrived = int  # Nothing is parsed before the method is called.

        def read(data: bytes) -> Any:
            arrived(len(data))
            return parse(data)

        async def answer(requests: Any, context: Any) -> Any:
            nonlocal arrived
            arrived = arrivals(context.peer())
            return await behave(requests, context)

        async def yield_answers(requests: Any, context: Any) -> AsyncIterator[Any]:
            nonlocal arrived
            arrived = arrivals(context.peer())
            async with contextlib.aclosing(behave(requests, context)) as responses:
                async for response in responses:
                    yield response

        serialize = handler.response_serializer
        if handler.stream_unary:
            return grpc.stream_unary_rpc_method_handler(answer, read, serialize)
        counted: Any = yield_answers if inspect.isasyncgenfunction(behave) else answer
        return grpc.stream_stream_rpc_method_handler(counted, read, serialize)


def counting(handler: Any, arrivals: Arrivals) -> Any:
    """The same handler, of which ``arrivals`` is told what it is handed."""
    if handler.request_streaming:
        return CountedStream(handler, arrivals)
    parse, serialize = handler.request_deserializer, handler.response_serializer
    behave = handler.unary_unary or handler.unary_stream

    def read(data: bytes) -> _Request:
        return _Request(parse(data), len(data))

    async def answer(request: _Request, context: Any) -> Any:
        arrivals(context.peer())(request.size_bytes)
        return await behave(request.message, context)

    async def yield_answers(request: _Request, context: Any) -> AsyncIterator[Any]:
        arrivals(context.peer())(request.size_bytes)
        async with contextlib.aclosing(behave(request.message, context)) as responses:
            async for response in responses:
                yield response

    if handler.unary_unary:
        return grpc.unary_unary_rpc_method_handler(answer, read, serialize)
    return grpc.unary_stream_rpc_method_handler(yield_answers, read, serialize)
