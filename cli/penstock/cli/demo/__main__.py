"""Run the demo: ``python -m penstock.cli.demo``. Exit status 0 means nothing lost or doubled."""

from __future__ import annotations

import signal
import sys


def main() -> int:
    """Run the demo; the exit status."""
    # While modules load Ctrl-C ends the process as it ends any tool; there is nothing to remove.
    handler = signal.signal(signal.SIGINT, signal.SIG_DFL)
    from penstock.cli.demo import scenario  # noqa: PLC0415 - it imports gRPC.

    signal.signal(signal.SIGINT, handler)
    return scenario.main()


if __name__ == "__main__":
    sys.exit(main())
