"""Whether nodes and the chaos harness can run here: they need more than the command does."""

from __future__ import annotations

import importlib.util
from typing import Final

from penstock.cli.errors import EXIT_FAILED, report

BROKER_PACKAGES: Final = {
    "cryptography": "cryptography",
    "grpcio-health-checking": "grpc_health",
    "grpcio-reflection": "grpc_reflection",
    "lmdb": "lmdb",
    "prometheus-client": "prometheus_client",
    "pysyncobj": "pysyncobj",
    "structlog": "structlog",
    "uvloop": "uvloop",
}
"""What the extra ``broker`` installs, each with the module that it brings."""

CHAOS_PACKAGES: Final = {
    "docker": "docker",
    "hpack": "hpack",
    "numpy": "numpy",
    "orjson": "orjson",
}
"""What the extra ``chaos`` installs, likewise."""


def missing_for_chaos() -> list[str]:
    """The packages that `penstock chaos` wants and are not installed."""
    return [name for name, module in CHAOS_PACKAGES.items() if not _is_installed(module)]


def require_broker() -> None:
    """Exit with what to install unless nodes can run. Imports none of it, and writes nothing."""
    missing = [name for name, module in BROKER_PACKAGES.items() if not _is_installed(module)]
    if missing:
        report(
            f"error: nodes need packages that are not installed: {', '.join(missing)}\n"
            'next: pip install "penstock[broker]"'
        )
        raise SystemExit(EXIT_FAILED)


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False
