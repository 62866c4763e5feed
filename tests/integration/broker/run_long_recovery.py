"""A node whose recovery lasts until there is a file `recovered` in its data directory."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from penstock.broker.__main__ import main
from penstock.broker.storage.manager import LogManager

PAUSE_S = 0.05

_open = LogManager.open


def open_late(manager: LogManager) -> None:
    marker = Path(sys.argv[sys.argv.index("--config") + 1]).with_name("recovered")
    while not marker.exists():
        time.sleep(PAUSE_S)  # It reads logs meanwhile, as a thread of its own.
    _open(manager)


LogManager.open = open_late  # type: ignore[method-assign]  # That is what this file is for.

if __name__ == "__main__":
    sys.exit(main())
