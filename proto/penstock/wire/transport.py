"""How every Penstock process sets up gRPC and its allocator, so that all agree.

The figures behind the values are in ARCHITECTURE.md.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
from typing import Final

MAX_MESSAGE_BYTES: Final = 64 * 1024 * 1024
"""The largest gRPC message: a fetch answer of 50 MB and its framing fit."""

Option = tuple[str, int | str]

_COMMON: Final[list[Option]] = [
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # A peer whose machine vanished without closing its sockets is found within 15 seconds.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
]

SERVER_OPTIONS: Final[list[Option]] = [
    *_COMMON,
    # Two processes must never share a port: the second gets a clear error instead of half of
    # the connections.
    ("grpc.so_reuseport", 0),
    # At gRPC's default, thousands of simultaneous calls were dropped.
    ("grpc.server.max_pending_requests", 20_000),
    ("grpc.server.max_pending_requests_hard_limit", 40_000),
    # Until HTTP/2, and TLS, are agreed on. At gRPC's default who says nothing stays two minutes.
    ("grpc.server_handshake_timeout_ms", 20_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
]

NODE_CONNECTIONS_MAX: Final = 1_000
"""So many connections a port for nodes alone has at most: each other node has one or two."""

NODE_SERVER_OPTIONS: Final[list[Option]] = [
    *SERVER_OPTIONS,
    # Without TLS strangers reach such a port, too. A broker has a few streams to a controller, and
    # a call for each of an administrator: as many as one client may have. Of a burst on a new
    # connection gRPC sends all before it hears of the limit, and does not repeat what is refused.
    ("grpc.max_concurrent_streams", 4_000),
    ("grpc.max_allowed_incoming_connections", NODE_CONNECTIONS_MAX),
]

CHANNEL_OPTIONS: Final[list[Option]] = [
    *_COMMON,
    # Retries are ours: only we know which requests may be repeated.
    ("grpc.enable_retries", 0),
    # A restarted node is found again quickly.
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # A pod comes back under the same name at another address. A channel looks the name up anew
    # when it fails to connect, but by gRPC's default no more than once in 30 seconds.
    ("grpc.dns_min_time_between_resolutions_ms", 500),
    # Channels to one address do not share a connection or its back-off.
    ("grpc.use_local_subchannel_pool", 1),
]

_NO_HOST: Final = re.compile(r"[\s/@?#]")
"""What no host has in its name: a path, a user, white space."""

_M_TRIM_THRESHOLD: Final = -1
_M_TOP_PAD: Final = -2
_M_MMAP_THRESHOLD: Final = -3


def tune_malloc() -> None:
    """Keep megabyte buffers on the heap instead of mapping and unmapping each one.

    Call first thing in a process. It is for the process as a whole, so a library must not do it
    unasked: the heap may keep up to 256 MiB that it does not use. Does nothing where the C library
    is not glibc.
    """
    if not sys.platform.startswith("linux"):
        return
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return  # musl: nothing to tune.
    mallopt(_M_MMAP_THRESHOLD, 64 * 1024 * 1024)
    mallopt(_M_TRIM_THRESHOLD, 256 * 1024 * 1024)
    mallopt(_M_TOP_PAD, 16 * 1024 * 1024)


def quiet_grpc() -> None:
    """Keep gRPC's C core from writing its own notices of broken connections to standard error.

    Our errors say what broke, and a stranger could fill a node's log with them. Call before grpc
    is imported, which reads it then; GRPC_VERBOSITY in the environment wins.
    """
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")


def format_address(host: str, port: int) -> str:
    """``host:port``, with an IPv6 host in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def parse_address(text: str) -> tuple[str, int]:
    """Host and port of ``host:port`` or ``[v6]:port``.

    Raises ValueError that names the text when it is neither.
    """
    scheme, separator, _ = text.strip().partition("://")
    if separator:
        raise ValueError(
            f"{text!r} is a URL; write HOST:PORT without {scheme}://, such as localhost:9092"
        )
    host, colon, port_text = text.strip().rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    is_port = port_text.isdecimal() and int(port_text) <= 65_535
    if not colon or not host or _NO_HOST.search(host) or not is_port:
        raise ValueError(f"{text!r} is not an address; write host:port, such as localhost:9092")
    return host, int(port_text)
