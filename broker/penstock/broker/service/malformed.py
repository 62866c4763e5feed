"""What becomes of bytes that are no message of the method that they were sent to.

gRPC itself answers UNKNOWN and writes a traceback to the log, as if the broker had failed. Here
the call ends with INVALID_ARGUMENT, and the log says nothing: it is the sender's mistake.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, Final

import grpc
from google.protobuf.message import DecodeError
from grpc import aio

_REFUSAL: Final = (
    "the request's bytes are no message of this method; send what penstock.v1 describes"
)


class _Malformed:
    """Stands for a request that cannot be read, on its way from gRPC to the refusal."""


_MALFORMED: Final = _Malformed()


async def refuse(context: Any) -> None:
    """End the call. Raises what gRPC ends it by."""
    await context.abort(grpc.StatusCode.INVALID_ARGUMENT, _REFUSAL)


@contextlib.asynccontextmanager
async def refusing_malformed(context: Any) -> AsyncIterator[None]:
    """End the call as it should when a message of its stream cannot be read in this block.

    For methods that yield their answers: a wrapper around them would cost something for each.
    """
    try:
        yield
    except DecodeError:
        await refuse(context)


class Guarded:
    """Takes servicers in a server's place and gives it methods that refuse what is malformed.

    Streams of requests cost nothing more for each message, unary calls one step. A method that
    takes a stream and yields its answers must use ``refusing_malformed`` itself.
    """

    def __init__(self, server: aio.Server) -> None:
        self._server = server

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        """Called by the generated code, with what ``add_registered_method_handlers`` gets too."""

    def add_registered_method_handlers(
        self, service: str, handlers: Mapping[str, grpc.RpcMethodHandler[Any, Any]]
    ) -> None:
        """Called by the generated code with a service's methods."""
        guarded = {name: _guarded(handler) for name, handler in handlers.items()}
        handler = grpc.method_handlers_generic_handler(service, guarded)
        self._server.add_generic_rpc_handlers((handler,))


def _guarded(handler: Any) -> Any:
    parse, serialize = handler.request_deserializer, handler.response_serializer
    if inspect.iscoroutinefunction(handler.unary_unary):
        return grpc.unary_unary_rpc_method_handler(
            _guarded_unary(handler.unary_unary), _lenient(parse), serialize
        )
    if inspect.isasyncgenfunction(handler.unary_stream):
        return grpc.unary_stream_rpc_method_handler(
            _guarded_generator(handler.unary_stream), _lenient(parse), serialize
        )
    if inspect.iscoroutinefunction(handler.stream_stream):
        return grpc.stream_stream_rpc_method_handler(
            _guarded_stream(handler.stream_stream), parse, serialize
        )
    if not inspect.isasyncgenfunction(handler.stream_stream):
        raise TypeError(f"no guard is known for a method of this kind: {handler}")
    return handler  # It uses refusing_malformed.


def _lenient(parse: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def read(data: bytes) -> Any:
        try:
            return parse(data)
        except DecodeError:
            return _MALFORMED

    return read


def _guarded_unary(behave: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    async def answer(request: Any, context: Any) -> Any:
        if request is _MALFORMED:
            await refuse(context)
        return await behave(request, context)

    return answer


def _guarded_generator(behave: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    async def answer(request: Any, context: Any) -> AsyncIterator[Any]:
        if request is _MALFORMED:
            await refuse(context)
        async with contextlib.aclosing(behave(request, context)) as responses:
            async for response in responses:
                yield response

    return answer


def _guarded_stream(behave: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    async def serve(requests: Any, context: Any) -> None:
        try:
            await behave(requests, context)
        except DecodeError:
            await refuse(context)

    return serve
