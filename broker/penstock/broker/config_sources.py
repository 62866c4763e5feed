"""Where a node's settings come from, and how one is refused."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from penstock.raft_meta.denied import what_to_do
from penstock.wire.errors import ConfigurationError
from penstock.wire.transport import format_address

_MAX_HOST_CHARS: Final = 255  # A DNS name has no more.


def require(holds: bool, message: str) -> None:
    """Raise ConfigurationError with the message unless it holds."""
    if not holds:
        raise ConfigurationError(message)


def require_reachable(key: str, address: tuple[str, int], whose: str) -> None:
    """Raise ConfigurationError for what others are told and cannot connect to."""
    host, port = address
    require(
        host not in ("0.0.0.0", "::") and port > 0,  # noqa: S104 - this refuses it.
        f"{key} would be {format_address(host, port)}, which nobody can connect to; set {key} to "
        f"the address that {whose}",
    )
    require(
        len(host) <= _MAX_HOST_CHARS,
        f"{key} has a host of {len(host)} characters; at most {_MAX_HOST_CHARS} are wanted",
    )


def read_toml(path: Path) -> dict[str, object]:
    """What a file sets, by key. Raises ConfigurationError."""
    try:
        with path.open("rb") as file:
            tree = tomllib.load(file)
    except OSError as error:
        rights = what_to_do(error, path)
        step = f"; next: {rights}" if rights else ""
        raise ConfigurationError(f"cannot read {path}: {error.strerror}{step}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path} is not valid TOML: {error}") from None
    return dict(_flatten(tree, ""))


def _flatten(tree: Mapping[str, object], prefix: str) -> Iterator[tuple[str, object]]:
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{name}.")
        elif isinstance(value, list):
            yield f"{prefix}{name}", ",".join(str(part) for part in value)
        else:
            yield f"{prefix}{name}", value


def split_overrides(overrides: Sequence[str]) -> dict[str, object]:
    """What ``key=value`` of a command line sets. Raises ConfigurationError."""
    values: dict[str, object] = {}
    for override in overrides:
        key, equals, value = override.partition("=")
        require(bool(equals), f"--set {override!r}: key=value is wanted")
        require(key.strip() not in values, f"--set: {key.strip()} is set twice; once is wanted")
        values[key.strip()] = value.strip()
    return values
