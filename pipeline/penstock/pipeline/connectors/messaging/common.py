"""The options that both sources share."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from types import ModuleType
from urllib.parse import SplitResult, urlsplit

from penstock.pipeline.connectors.messaging.reader import Limits
from penstock.pipeline.connectors.tls import TlsOptions
from penstock.pipeline.errors import ConnectorError
from penstock.pipeline.option_map import OptionMap

MOST_PREFETCH = 65_535
"""Both protocols have 16 bits for it."""


@dataclass(frozen=True, slots=True)
class Server:
    """Where a broker listens."""

    host: str
    port: int
    is_tls: bool
    path: str = ""

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class CommonOptions:
    """It pickles."""

    servers: tuple[Server, ...]
    username: str | None
    password: str | None = field(repr=False)
    tls: TlsOptions
    prefetch: int
    limits: Limits
    heartbeat_s: int
    connect_timeout_s: float
    reconnect_timeout_s: float
    check_on_load: bool

    @classmethod
    def load(cls, options: OptionMap, scheme: str, ports: tuple[int, int]) -> CommonOptions:
        """``ports`` are the usual ones, without and with TLS. Raises OptionError."""
        text = options.required("url", f"write {scheme}://host:{ports[0]}")
        prefetch = options.whole_number("prefetch", 5000, low=1, high=MOST_PREFETCH) or 0
        username, password = options.text("username"), options.text("password")
        if (username is None) != (password is None):
            raise options.contradiction("username and password go together; one of them is missing")
        heartbeat_ms = options.span_ms("heartbeat", 30_000) or 0
        if not 1_000 <= heartbeat_ms <= 3_600_000:
            raise options.refusal("heartbeat", "from 1s to 1h")
        return cls(
            servers=_servers(options, text, scheme, ports),
            username=username,
            password=password,
            tls=TlsOptions.load(options),
            prefetch=prefetch,
            limits=Limits(
                options.whole_number("maxRowsPerTrigger", None, low=1),
                options.whole_number("minPartitions", 1, low=1, high=10_000) or 1,
                (options.span_ms("availableNowTimeout", 300_000) or 0) / 1000,
            ),
            heartbeat_s=heartbeat_ms // 1000,
            connect_timeout_s=(options.span_ms("connectTimeout", 10_000, low=1) or 1) / 1000,
            reconnect_timeout_s=(options.span_ms("reconnectTimeout", 300_000) or 0) / 1000,
            check_on_load=options.flag("checkOnLoad", True),
        )


class AwayError(ConnectorError):
    """The broker may be back soon."""


def _servers(
    options: OptionMap, text: str, scheme: str, ports: tuple[int, int]
) -> tuple[Server, ...]:
    found = tuple(_server(options, url, scheme, ports) for url in text.split(","))
    if len({server.is_tls for server in found}) > 1:
        raise options.contradiction(
            f"url has {scheme}:// and {scheme}s://, so that password and messages would be "
            "readable on the way to some of the servers; write the same for all of them"
        )
    return found


def _server(options: OptionMap, url: str, scheme: str, ports: tuple[int, int]) -> Server:
    refusal = options.refusal(
        "url", f"{scheme}://host:port or {scheme}s://host:port, or several with commas"
    )
    try:
        parts = urlsplit(url.strip())
        port = parts.port
        (parts.hostname or "").encode("idna")
    except ValueError:
        raise refusal from None
    if parts.scheme not in (scheme, f"{scheme}s") or not parts.hostname or port == 0:
        raise refusal
    if parts.username is not None:
        raise options.contradiction(
            "url has credentials in it, which Spark would show; give username and password"
        )
    if parts.query or parts.fragment:
        raise refusal
    is_tls = parts.scheme != scheme
    return Server(parts.hostname, port or ports[is_tls], is_tls, _path(parts))


def _path(parts: SplitResult) -> str:
    return parts.path.removeprefix("/")


def library(name: str, package: str) -> ModuleType:
    """A client library. Raises ConnectorError where it is not installed."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ConnectorError(
            f"{package} is not installed; next: pip install 'penstock[pipeline]'"
        ) from error
