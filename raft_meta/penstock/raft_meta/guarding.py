"""What stands between a port and the services on it: bytes that are no message, and peers that
may not say what they say.

gRPC itself answers bytes that it cannot parse with UNKNOWN and writes a traceback to the log, as
if the server had failed. Here the call ends with INVALID_ARGUMENT, and the log says nothing: it
is the sender's mistake. Who is not a node of this cluster, on a port or a service that is for
nodes alone, gets UNAUTHENTICATED, and a node that speaks for another one PERMISSION_DENIED.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final

import grpc
import structlog
from google.protobuf.message import DecodeError
from grpc import aio

from penstock.raft_meta import tracing
from penstock.raft_meta.arriving import Arrivals, CountedStream, counting
from penstock.raft_meta.authentication import Peer, PeerAuthentication, Refusal
from penstock.raft_meta.metering import Meter, Unmetered

log = structlog.get_logger()

_TOLD_REASONS: Final = 20
_UNREADABLE: Final = Refusal(
    grpc.StatusCode.INVALID_ARGUMENT,
    "the request's bytes are no message of this method; send what penstock.v1 describes",
)

if TYPE_CHECKING:  # Generic to the type stubs alone.
    _GenericHandler = grpc.GenericRpcHandler[Any, Any]
else:
    _GenericHandler = grpc.GenericRpcHandler

Speaker = Callable[[Any], int]
"""The node that a request says it comes from."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """A response that is bytes already, since many are sent the same. For streams of responses."""

    data: bytes


class _Malformed:
    """Stands for a request that cannot be read, on its way from gRPC to the refusal."""


_MALFORMED: Final = _Malformed()


@dataclass(frozen=True, slots=True)
class NodesOnly:
    """Methods for nodes of the cluster alone."""

    authentication: PeerAuthentication
    speakers: Mapping[str, Speaker] = field(default_factory=dict)
    """By method: the node that a request must come from. The other methods serve any node."""
    open_methods: frozenset[str] = frozenset()
    """Methods that whoever gets a connection may call."""


async def refuse(context: Any, refusal: Refusal = _UNREADABLE) -> None:
    """End the call. Raises what gRPC ends it by."""
    await context.abort(refusal.status, refusal.reason)


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
    """Takes servicers in a server's place and gives it methods that refuse what they should.

    Streams of requests cost nothing more for each message, unary calls one step. A method that
    takes a stream and yields its answers must use ``refusing_malformed`` itself, and tell the
    ``meter`` itself, unless it is for nodes only: there each message passes through here, and its
    speaker is checked. Calls with a ``traceparent`` are of that trace (penstock.raft_meta.tracing).
    Responses go out as ``tell`` makes them, but for those that are bytes already.
    ``arrivals`` is told of all requests, but for those of a method that tells them itself.
    """

    def __init__(
        self,
        server: aio.Server,
        nodes_only: NodesOnly | None = None,
        meter: Meter | None = None,
        tell: Callable[[Any], Any] | None = None,
        arrivals: Arrivals | None = None,
    ) -> None:
        self._server = server
        self._tell = tell
        self._nodes_only = nodes_only
        self._arrivals = arrivals
        self._meter = Unmetered() if meter is None else meter

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        """Called by the generated code, with what ``add_registered_method_handlers`` gets too."""

    def add_registered_method_handlers(
        self, service: str, handlers: Mapping[str, grpc.RpcMethodHandler[Any, Any]]
    ) -> None:
        """Called by the generated code with a service's methods."""
        short = service.rpartition(".")[2]
        guarded = {
            f"/{service}/{name}": self._guarded(name, f"{short}.{name}", handler)
            for name, handler in handlers.items()
        }
        self._server.add_generic_rpc_handlers((_Methods(guarded),))

    def _guarded(self, name: str, full_name: str, handler: Any) -> Any:
        only = self._nodes_only
        if only is not None and name not in only.open_methods:
            door = _Door(full_name, only.authentication, only.speakers.get(name))
        else:
            door = _Door(full_name, None, None)
        guarded = _guarded(handler, door, self._meter, self._tell)
        if self._arrivals is None or _tells_itself(handler, door):
            return guarded
        return counting(guarded, self._arrivals)


class _Methods(_GenericHandler):
    """The methods of one service, by path; those of a call with a trace say that they are."""

    def __init__(self, handlers: Mapping[str, Any]) -> None:
        self._handlers = handlers

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        """What answers a call; None for one that is not of this service."""
        handler = self._handlers.get(handler_call_details.method)
        if handler is None:
            return None
        if isinstance(handler, CountedStream):
            handler = handler.of_one_call()
        traceparent = tracing.carried(handler_call_details.invocation_metadata)
        return _traced(handler, traceparent) if traceparent else handler


class _Door:
    """Whom one method lets in."""

    def __init__(
        self, name: str, authentication: PeerAuthentication | None, speaker: Speaker | None
    ) -> None:
        self.name = name
        self._told: set[str] = set()
        self._authentication = authentication
        self.is_open = authentication is None
        self._speaker = speaker

    async def enter(self, context: Any) -> Peer | None:
        """The peer, once it may call the method at all; the call ends otherwise."""
        if self._authentication is None:
            return None
        peer = self._authentication.identify(context)
        if (refusal := peer.refusal()) is not None:
            await refuse(context, refusal)
        return peer

    def refusal(self, peer: Peer | None, request: Any) -> Refusal | None:
        """Why this request may not be put by this peer, or by anybody."""
        if request is _MALFORMED:
            return _UNREADABLE
        if peer is None or self._speaker is None:
            return None
        refusal = peer.refusal(self._speaker(request))
        if refusal is not None:
            self._tell(refusal.reason)
        return refusal

    def _tell(self, reason: str) -> None:
        """Say once in the log that a node spoke for another: it is set up wrongly, or not ours."""
        if reason not in self._told and len(self._told) < _TOLD_REASONS:
            self._told.add(reason)
            log.warning("a node was refused", method=self.name, reason=reason)

    async def admit(self, request: Any, context: Any) -> None:
        """Let a request in, or end the call."""
        peer = await self.enter(context)
        if (refusal := self.refusal(peer, request)) is not None:
            await refuse(context, refusal)


class _Inlet:
    """A stream of requests, ended by the first that is refused."""

    def __init__(self, requests: AsyncIterator[Any], door: _Door, peer: Peer | None) -> None:
        self._requests = requests
        self._door = door
        self._peer = peer
        self.refusal: Refusal | None = None

    def __aiter__(self) -> _Inlet:
        return self

    async def __anext__(self) -> Any:
        if self.refusal is not None:
            raise StopAsyncIteration
        try:
            request = await anext(self._requests)
        except DecodeError:
            self.refusal = _UNREADABLE
        else:
            self.refusal = self._door.refusal(self._peer, request)
        if self.refusal is not None:
            raise StopAsyncIteration
        return request


def _guarded(
    handler: Any, door: _Door, meter: Meter, tell: Callable[[Any], Any] | None = None
) -> Any:
    parse, serialize = handler.request_deserializer, _telling(handler.response_serializer, tell)
    if inspect.iscoroutinefunction(handler.unary_unary):
        return grpc.unary_unary_rpc_method_handler(
            _guarded_unary(handler.unary_unary, door, meter.unary(door.name)),
            _lenient(parse),
            serialize,
        )
    count = meter.stream(door.name)
    if inspect.isasyncgenfunction(handler.unary_stream):
        return grpc.unary_stream_rpc_method_handler(
            _guarded_generator(handler.unary_stream, door, count), _lenient(parse), _once(serialize)
        )
    if inspect.iscoroutinefunction(handler.stream_unary):
        return grpc.stream_unary_rpc_method_handler(
            _guarded_stream(handler.stream_unary, door, count), parse, serialize
        )
    if inspect.iscoroutinefunction(handler.stream_stream):
        return grpc.stream_stream_rpc_method_handler(
            _guarded_stream(handler.stream_stream, door, count), parse, serialize
        )
    if inspect.isasyncgenfunction(handler.stream_stream) and not door.is_open:
        return grpc.stream_stream_rpc_method_handler(
            _guarded_exchange(handler.stream_stream, door, count), parse, serialize
        )
    if not _tells_itself(handler, door):
        raise TypeError(f"no guard is known for a method of this kind: {handler}")
    return grpc.stream_stream_rpc_method_handler(handler.stream_stream, parse, serialize)


def _tells_itself(handler: Any, door: _Door) -> bool:
    """Of a stream that is answered by what the method yields, to whoever calls: that comes as it
    is, uses ``refusing_malformed``, and tells the meter and the arrivals itself.
    """
    return door.is_open and inspect.isasyncgenfunction(handler.stream_stream)


def _traced(handler: Any, traceparent: str) -> Any:
    """The same handler, for one call that is of a trace."""
    behave = (
        handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream
    )

    async def answer(request: Any, context: Any) -> Any:
        with tracing.working_for(traceparent):
            return await behave(request, context)

    async def yield_answers(request: Any, context: Any) -> AsyncIterator[Any]:
        with tracing.working_for(traceparent):
            async with contextlib.aclosing(behave(request, context)) as responses:
                async for response in responses:
                    yield response

    traced = yield_answers if inspect.isasyncgenfunction(behave) else answer
    make = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }[handler.request_streaming, handler.response_streaming]
    return make(traced, handler.request_deserializer, handler.response_serializer)


def _telling(
    serialize: Callable[[Any], bytes], tell: Callable[[Any], Any] | None
) -> Callable[[Any], bytes]:
    if tell is None:
        return serialize
    return lambda response: serialize(response if isinstance(response, bytes) else tell(response))


def _once(serialize: Callable[[Any], bytes]) -> Callable[[Any], bytes]:
    def write(response: Any) -> bytes:
        return response.data if isinstance(response, Encoded) else serialize(response)

    return write


def _lenient(parse: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def read(data: bytes) -> Any:
        try:
            return parse(data)
        except DecodeError:
            return _MALFORMED

    return read


def _guarded_unary(
    behave: Callable[[Any, Any], Any], door: _Door, observe: Callable[[float], None]
) -> Callable[[Any, Any], Any]:
    async def answer(request: Any, context: Any) -> Any:
        begun_s = perf_counter()
        try:
            if request is _MALFORMED or not door.is_open:
                await door.admit(request, context)
            return await behave(request, context)
        finally:
            observe(perf_counter() - begun_s)

    return answer


@contextlib.contextmanager
def _counted(count: Callable[[int], None]) -> Iterator[None]:
    count(1)
    try:
        yield
    finally:
        count(-1)


def _guarded_generator(
    behave: Callable[[Any, Any], Any], door: _Door, count: Callable[[int], None]
) -> Callable[[Any, Any], Any]:
    async def answer(request: Any, context: Any) -> AsyncIterator[Any]:
        if request is _MALFORMED or not door.is_open:
            await door.admit(request, context)
        with _counted(count):
            async with contextlib.aclosing(behave(request, context)) as responses:
                async for response in responses:
                    yield response

    return answer


def _guarded_stream(
    behave: Callable[[Any, Any], Any], door: _Door, count: Callable[[int], None]
) -> Callable[[Any, Any], Any]:
    async def serve(requests: Any, context: Any) -> Any:
        await door.enter(context)
        with _counted(count):
            try:
                return await behave(requests, context)
            except DecodeError:
                return await refuse(context)

    return serve


def _guarded_exchange(
    behave: Callable[[Any, Any], Any], door: _Door, count: Callable[[int], None]
) -> Callable[[Any, Any], Any]:
    async def exchange(requests: Any, context: Any) -> AsyncIterator[Any]:
        inlet = _Inlet(requests, door, await door.enter(context))
        with _counted(count):
            async with contextlib.aclosing(behave(inlet, context)) as responses:
                async for response in responses:
                    yield response
        if inlet.refusal is not None:
            await refuse(context, inlet.refusal)

    return exchange
