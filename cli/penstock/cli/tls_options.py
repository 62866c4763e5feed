"""``--tls-ca``, ``--tls-cert`` and ``--tls-key``, on every command that connects to a cluster."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final, TypedDict

import typer

_PANEL: Final = "TLS"
_META: Final = "penstock.tls"
VARIABLES: Final[Mapping[str, str]] = {
    "ca": "PENSTOCK_TLS_CA",
    "cert": "PENSTOCK_TLS_CERT",
    "key": "PENSTOCK_TLS_KEY",
}

TlsCa = Annotated[
    str | None,
    typer.Option(
        "--tls-ca",
        metavar="FILE",
        help="The brokers' authority, PEM; turns TLS on.",
        show_default=f"${VARIABLES['ca']}",
        rich_help_panel=_PANEL,
    ),
]
TlsCert = Annotated[
    str | None,
    typer.Option(
        "--tls-cert",
        metavar="FILE",
        help="Your own certificate, PEM.",
        show_default=f"${VARIABLES['cert']}",
        rich_help_panel=_PANEL,
    ),
]
TlsKey = Annotated[
    str | None,
    typer.Option(
        "--tls-key",
        metavar="FILE",
        help="Its private key, PEM.",
        show_default=f"${VARIABLES['key']}",
        rich_help_panel=_PANEL,
    ),
]
_OPTIONS: Final = {"tls_ca": TlsCa, "tls_cert": TlsCert, "tls_key": TlsKey}


class ClientTls(TypedDict, total=False):
    """The client's settings."""

    tls_ca: str
    tls_certificate: str
    tls_key: str


@dataclass(frozen=True, slots=True)
class TlsOptions:
    """What stands on the line, None for nothing."""

    ca: str | None = None
    cert: str | None = None
    key: str | None = None

    def over(self, other: TlsOptions) -> TlsOptions:
        """These, and the other's where these say nothing."""
        return TlsOptions(self.ca or other.ca, self.cert or other.cert, self.key or other.key)

    def client_settings(self) -> ClientTls:
        """What clients are made with; nothing without TLS. The client checks it."""
        found = ClientTls()
        if self.ca:
            found["tls_ca"] = self.ca
        if self.cert:
            found["tls_certificate"] = self.cert
        if self.key:
            found["tls_key"] = self.key
        return found


def from_environment() -> TlsOptions:
    """What the environment says."""
    return TlsOptions(*(os.environ.get(VARIABLES[part]) for part in ("ca", "cert", "key")))


def of_command(ctx: typer.Context) -> TlsOptions:
    """What stands after the command's name."""
    found = ctx.meta.get(_META)
    return found if isinstance(found, TlsOptions) else TlsOptions()


def accept_tls_options(app: typer.Typer) -> None:
    """Give the options to each command of ``app`` that connects: that takes ``--bootstrap``."""
    for command in app.registered_commands:
        if command.callback is not None and _connects(command.callback):
            command.callback = _with_options(command.callback)
    for group in app.registered_groups:
        if group.typer_instance is not None:
            accept_tls_options(group.typer_instance)


def _connects(callback: Callable[..., Any]) -> bool:
    return {"ctx", "bootstrap"} <= inspect.signature(callback).parameters.keys()


def _with_options(callback: Callable[..., Any]) -> Callable[..., Any]:
    """``callback`` with three more options, which :func:`of_command` finds."""
    signature = inspect.signature(callback, eval_str=True)

    @functools.wraps(callback)
    def run(
        *,
        ctx: typer.Context,
        tls_ca: str | None = None,
        tls_cert: str | None = None,
        tls_key: str | None = None,
        **arguments: Any,
    ) -> Any:
        ctx.meta[_META] = TlsOptions(tls_ca, tls_cert, tls_key)
        return callback(ctx=ctx, **arguments)

    more = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind)
        for name, kind in _OPTIONS.items()
    ]
    described: Any = run  # typer reads the signature and the annotations of what it runs.
    described.__signature__ = signature.replace(parameters=[*signature.parameters.values(), *more])
    described.__annotations__ = {
        **{name: one.annotation for name, one in signature.parameters.items()},
        **_OPTIONS,
    }
    del described.__wrapped__
    return run
