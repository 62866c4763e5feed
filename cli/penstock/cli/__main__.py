"""The entry point of the `penstock` command."""

from __future__ import annotations

import signal
import sys


def main() -> None:
    """Run `penstock`; without typer, say which extra holds the command."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # Ctrl-C ends the process as it ends any tool, at once and silently, also while modules
        # load. A command that has something to finish handles it itself.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        import typer  # noqa: F401, PLC0415 - the base install has no typer, and says so below.
    except ModuleNotFoundError:
        print(
            "error: the penstock command is not installed, only the client library\n"
            'next: pip install "penstock[cli]", or "penstock[broker]" to run nodes as well',
            file=sys.stderr,
        )
        raise SystemExit(1) from None
    from penstock.wire.transport import quiet_grpc, tune_malloc  # noqa: PLC0415 - see quiet_grpc.

    tune_malloc()
    quiet_grpc()
    from penstock.cli.app import app  # noqa: PLC0415 - it imports typer.
    from penstock.cli.standard_streams import guard_streams  # noqa: PLC0415 - goes with it.

    guard_streams()
    app(prog_name="penstock")


if __name__ == "__main__":
    main()
