"""What gRPC's failures mean, and what stands behind an address that does not answer."""

from __future__ import annotations

import asyncio
import re
import socket
from typing import Final

import grpc

from penstock.client import tls
from penstock.client.core.too_large import RequestTooLargeError
from penstock.wire.errors import (
    InvalidRequestError,
    NetworkError,
    PenstockError,
    RequestTimedOutError,
)
from penstock.wire.transport import format_address

_PROBE_S: Final = 1.0
_TOO_LARGE: Final = re.compile(
    r"(?:(?:SERVER: )?Received|CLIENT: Sent) message larger than max \((\d+) vs\. (\d+)\)"
)
"""How gRPC says it of a request. Of an answer that is too large it says CLIENT: Received."""
_MOVE_ON: Final = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.ABORTED,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
    }
)


def rpc_error(error: grpc.aio.AioRpcError, where: str, what: str) -> PenstockError:
    """The typed error that a gRPC status stands for; ``where`` and ``what`` go into its message."""
    status = error.code()
    details = error.details() or status.name
    if status is grpc.StatusCode.DEADLINE_EXCEEDED:
        return RequestTimedOutError(f"{where} did not answer {what} in time")
    if status is grpc.StatusCode.RESOURCE_EXHAUSTED and (said := _TOO_LARGE.match(details)):
        return _too_large(where, what, int(said[1]), int(said[2]))
    if status in _MOVE_ON:
        return NetworkError(f"{where} could not be reached for {what}: {details}")
    if status is grpc.StatusCode.UNIMPLEMENTED:
        return NetworkError(
            f"{where} does not know {what}: it is no Penstock broker, or one of another version"
        )
    return InvalidRequestError(f"{where} refused {what}: {status.name}: {details}")


def _too_large(where: str, what: str, size_bytes: int, limit_bytes: int) -> RequestTooLargeError:
    error = RequestTooLargeError(
        f"{where} takes no {what} of {size_bytes} bytes: its limit is {limit_bytes}, by "
        "request.max.bytes; next: send less at a time (of a producer: smaller records, or a lower "
        "max_request_size), or raise request.max.bytes on the brokers"
    )
    error.size_bytes, error.limit_bytes = size_bytes, limit_bytes
    return error


async def diagnose(
    host: str, port: int, answer: str, settings: tls.TlsSettings | None = None
) -> tls.Diagnosis:
    """One clause on why ``host:port`` cannot be used: what it resolved to and what happened; and
    what to do, where that is known better than "check the address".

    ``answer`` is what gRPC had to say, used when something listens there.
    """
    address = format_address(host, port)
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(_PROBE_S * 3):
            found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except TimeoutError:
        return tls.Diagnosis(
            f"{address}: the name {host!r} was not resolved within {_PROBE_S * 3:.0f} s"
        )
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        return tls.Diagnosis(f"{address}: the name {host!r} does not resolve ({reason})")
    numbers = list(dict.fromkeys(str(entry[4][0]) for entry in found))
    outcomes = [await _probe(number, port, host, answer, settings) for number in numbers[:4]]
    step = next((one.step for one in outcomes if one.step), "")
    if numbers == [host]:
        return tls.Diagnosis(f"{address}: {outcomes[0].what}", step)
    clauses = [
        f"resolved to {number}: {outcome.what}"
        for number, outcome in zip(numbers, outcomes, strict=False)
    ]
    return tls.Diagnosis(f"{address}: {', '.join(clauses)}", step)


async def _probe(
    number: str, port: int, host: str, answer: str, settings: tls.TlsSettings | None
) -> tls.Diagnosis:
    try:
        async with asyncio.timeout(_PROBE_S):
            _, writer = await asyncio.open_connection(number, port)
    except TimeoutError:
        return tls.Diagnosis("no answer (timed out; wrong address or a firewall?)")
    except ConnectionRefusedError:
        return tls.Diagnosis("connection refused (nothing listens there)")
    except OSError as error:
        return tls.Diagnosis((error.strerror or str(error)).lower())
    writer.close()
    trouble = await tls.explain(number, port, host, settings, _PROBE_S * 2)
    if trouble.what:
        return tls.Diagnosis(f"{trouble.what} ({answer})", trouble.step)
    return tls.Diagnosis(f"something listens, but does not answer as a Penstock broker ({answer})")
