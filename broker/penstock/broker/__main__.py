"""Run one node: ``python -m penstock.broker --config FILE``."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import faulthandler
import gc
import io
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

try:
    from penstock.wire.transport import quiet_grpc, tune_malloc

    quiet_grpc()

    import structlog
    import uvloop

    from penstock.broker.config import NodeConfig
    from penstock.broker.journal import goes_to_journal, leveled
    from penstock.broker.logs import configure_logs
    from penstock.broker.node import Node
    from penstock.broker.service_manager import ServiceManager
    from penstock.broker.stopping import ForcedEnd
    from penstock.wire.errors import (
        ConfigurationError,
        DataDirectoryError,
        InconsistentClusterIdError,
        PenstockError,
    )
except ModuleNotFoundError as missing:
    if __name__ != "__main__":
        raise
    sys.stderr.write(
        f"error: a node needs the package {missing.name!r}, which is not installed\n"
        'next: pip install "penstock[broker]"\n'
    )
    sys.exit(2)

EXIT_FAILED = 1
EXIT_UNUSABLE = 2
"""A setting or a directory must be mended first, so that starting again is of no use. A port that
another process holds, or an address that the machine does not have yet, may pass by itself."""

_UNUSABLE = (ConfigurationError, DataDirectoryError, InconsistentClusterIdError)

_GC_THRESHOLDS = (5_000, 10, 10)
"""Collect after 5,000 new objects rather than 700, and the old as much more seldom.

What a node keeps are its metadata, hundreds of thousands of objects that hold no cycles; Python's
defaults look at all of them while they are being made, and nothing is served meanwhile.
"""

_SWITCH_INTERVAL_S = 0.0005
"""A thread that computes in Python gives way after half a millisecond rather than Python's five.

The event loop asks for its turn anew each time that it has waited for something, and so does a
flush thread after each fdatasync: with a compaction or a scrub beside them, each turn would begin
up to five milliseconds late.
"""

_CALLS_END_S = 2.0
"""How long a stopped node waits for the tasks of calls that its servers ended by force."""

_FORCE_S = 5.0
"""How long beyond its stop's own bound a process may live: a thread that a disk holds up would
have the interpreter wait for it, until whoever sent SIGTERM sends SIGKILL."""

log = structlog.get_logger()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a node until SIGTERM or SIGINT; the exit status."""
    parser = argparse.ArgumentParser(
        prog="penstock node", description="Run one node: a controller, a broker, or both."
    )
    parser.add_argument("--config", type=Path, help="the node's settings, as TOML")
    parser.add_argument(
        "--set",
        dest="overrides",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a setting that wins over the file and the environment; may be repeated",
    )
    options = parser.parse_args(arguments)
    return run(options.config, options.overrides)


def _describe(error: PenstockError) -> str:
    return f"error: {error.message}"


def run(
    config_file: Path | None,
    overrides: Sequence[str],
    describe: Callable[[PenstockError], str] = _describe,
) -> int:
    """Load the settings and run the node; the exit status.

    An error is written to stderr as ``describe`` puts it: one line, unless it is given.
    """
    tune_malloc()
    with contextlib.suppress(io.UnsupportedOperation, RuntimeError):  # Standard error is no file.
        faulthandler.enable()  # A watchdog's SIGABRT then shows where each thread was.
    end = ForcedEnd(EXIT_FAILED)
    manager = ServiceManager()
    try:
        config = NodeConfig.load(config_file, os.environ, overrides)
        configure_logs(config.log_format, config.log_level, node=config.node_id)
        uvloop.run(_serve(config, end, manager))
    except PenstockError as error:
        _tell(describe(error))
        manager.failed(error.message)
        return EXIT_UNUSABLE if isinstance(error, _UNUSABLE) else EXIT_FAILED
    except Exception as error:
        log.exception("the node failed and stops")
        manager.failed(f"{type(error).__name__}: {error}")
        return EXIT_FAILED
    finally:
        end.called_off()
        manager.close()
    return 0


def _tell(text: str) -> None:
    """Say why the node ends, after its log or before there is one."""
    text = leveled(text, "error") if goes_to_journal(sys.stderr) else text
    sys.stderr.write(f"{text}\n")


async def _serve(config: NodeConfig, end: ForcedEnd, manager: ServiceManager) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    node = Node(config)
    telling = asyncio.create_task(manager.keep_told(node.state))
    if not await _is_started(node, stop, end, manager):
        log.info("stopped")
        end.now(0)
        return
    manager.ready(node.state)
    # What was made at start lives as long as the process: collections need not look at it.
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_GC_THRESHOLDS)
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    try:
        await node.run(stop)
    finally:
        _begin_stop(node, end, manager)
        await node.stop()
        telling.cancel()
        await calls_end(_CALLS_END_S)
        log.info("stopped")


async def _is_started(
    node: Node, stop: asyncio.Event, end: ForcedEnd, manager: ServiceManager
) -> bool:
    """Start it. False: ``stop`` was set meanwhile, and what had been begun is stopped.

    But a thread may recover logs still. They were not closed, and the next start recovers them.
    """
    starting = asyncio.create_task(node.start())
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    # One that has failed by itself ends with what it failed by, when it has cleared up.
    gives_up = not starting.done() and not node.has_failed
    if not starting.done():
        _begin_stop(node, end, manager)
    if gives_up:
        starting.cancel()
    try:
        await starting
    except asyncio.CancelledError:
        if not gives_up:
            raise
        return False
    return True


def _begin_stop(node: Node, end: ForcedEnd, manager: ServiceManager) -> None:
    log.info("stopping")
    manager.stopping("the node stops")
    end.by(node.stop_timeout_s + _FORCE_S)


async def calls_end(timeout_s: float) -> None:
    """Return when every other task of the loop has ended, or after so long.

    A gRPC server has stopped before the tasks of the calls that it ended by force have: a loop that
    closes meanwhile cancels them, and gRPC tells of each with a traceback, as if it were a fault.
    """
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    if tasks:
        await asyncio.wait(tasks, timeout=timeout_s)


if __name__ == "__main__":
    sys.exit(main())
