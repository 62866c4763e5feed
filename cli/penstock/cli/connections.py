"""Clients for commands, imported only when a command needs one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from penstock.cli.settings import Settings

if TYPE_CHECKING:
    from penstock.client import AdminClient


@contextmanager
def admin_client(settings: Settings) -> Iterator[AdminClient]:
    """An administration client, closed at the end."""
    from penstock.client import AdminClient  # noqa: PLC0415 - it imports gRPC.

    tls = settings.tls.client_settings()
    with AdminClient(settings.bootstrap, client_id="penstock-cli", **tls) as admin:
        yield admin


def key_values(pairs: list[str], option: str) -> dict[str, str]:
    """``k=v`` pairs as a dictionary.

    Raises BadParameter that names the one that is none, or the key that is there twice.
    """
    import typer  # noqa: PLC0415 - with the client alone there is no typer.

    found: dict[str, str] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise typer.BadParameter(f"{pair!r} is not KEY=VALUE", param_hint=option)
        if key.strip() in found:
            raise typer.BadParameter(
                f"{key.strip()!r} is set twice; which one is meant?", param_hint=option
            )
        found[key.strip()] = value.strip()
    return found
