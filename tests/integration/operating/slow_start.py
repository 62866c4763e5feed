"""A node whose logs take an hour to recover."""

from __future__ import annotations

import sys
import threading

from penstock.broker.__main__ import main
from penstock.broker.storage.manager import LogManager

if __name__ == "__main__":
    LogManager.open = lambda _self: threading.Event().wait(3600)
    sys.exit(main())
