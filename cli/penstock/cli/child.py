"""Runs a node that ends with the process that started it.

``python -m penstock.cli.child ARGS`` is ``python -m penstock.broker ARGS`` whose standard input
is a pipe that the parent holds open and never writes to. When the parent goes, even by SIGKILL,
the kernel closes the pipe, and the node stops: first as an operator would stop it, then by force.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import threading
import time
from typing import Final

_GRACE_SECONDS: Final = 15.0


def _stop_with_parent() -> None:
    while os.read(0, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_GRACE_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)


def watch_parent() -> None:
    """From now on, stop this process when the pipe at its standard input closes."""
    threading.Thread(target=_stop_with_parent, name="parent-watch", daemon=True).start()


def main() -> None:
    """Watch the parent and become the node."""
    watch_parent()
    sys.argv[0] = "penstock.broker"
    runpy.run_module("penstock.broker", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
