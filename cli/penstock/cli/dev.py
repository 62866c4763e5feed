"""`penstock dev`: a whole cluster on this machine, for as long as the command runs."""

from __future__ import annotations

import os
import select
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.errors import EXIT_FAILED, report
from penstock.cli.installation import require_broker
from penstock.cli.interrupts import handled

if TYPE_CHECKING:
    from penstock.cli.local_cluster import LocalCluster


def dev(
    nodes: Annotated[
        int | None,
        typer.Option(
            "--nodes",
            min=1,
            help="How many nodes, each a controller and a broker.",
            show_default="3, or as the directory has",
        ),
    ] = None,
    data_dir: Annotated[
        Path | None,
        typer.Option(
            "--data-dir",
            help="Where the data is, and stays.",
            show_default="a temporary directory",
        ),
    ] = None,
    base_port: Annotated[
        int | None,
        typer.Option(
            "--base-port",
            min=1,
            max=65_535,
            help="The first broker's port; controllers listen 1000 above.",
            show_default="9092, or as the directory has",
        ),
    ] = None,
    tls: Annotated[
        bool,
        typer.Option(
            "--tls",
            help="Make certificates, and let nobody in without one.",
            show_default="as the directory has",
        ),
    ] = False,
) -> None:
    """Start a cluster of real processes here, and stop it with Ctrl-C.

    Prints one line, `ready: HOST:PORT,...`, once clients can use it.

    A directory that holds a cluster already is started again with its data.
    """
    require_broker()
    # Imported here: gRPC would slow every other command down.
    from penstock.cli.cluster_layout import prepare_layout  # noqa: PLC0415 - see above.
    from penstock.cli.local_cluster import LocalCluster  # noqa: PLC0415 - see above.

    with handled(_interrupt), _directory(data_dir) as directory:
        layout = prepare_layout(directory, nodes=nodes, base_port=base_port, tls=tls)
        cluster = LocalCluster(layout)
        try:
            cluster.start()
            for plan in layout.plans:
                report(
                    f"node {plan.node_id}: pid {cluster.pid(plan.node_id)}, "
                    f"{plan.address}, log in {plan.log_path}"
                )
            if (files := layout.client_tls) is not None:
                report(
                    f"clients need: --tls-ca {files.ca} --tls-cert {files.certificate} "
                    f"--tls-key {files.key}"
                )
            cluster.wait_ready(on_wait=lambda reason: report(f"waiting: {reason}"))
            print(f"ready: {cluster.bootstrap}", flush=True)
            status = _supervise(cluster)
        except KeyboardInterrupt:
            report("stopping the nodes")
            status = 0
        finally:
            forced = cluster.stop()
        if forced:
            names = ", ".join(str(node_id) for node_id in forced)
            report(f"error: these nodes did not stop in time and were killed: {names}")
            status = EXIT_FAILED
    raise typer.Exit(status)


@contextmanager
def _directory(chosen: Path | None) -> Iterator[Path]:
    """The data directory: the chosen one, or a temporary one that goes with the command."""
    if chosen is not None:
        yield chosen.resolve()
        return
    temporary = Path(tempfile.mkdtemp(prefix="penstock-dev-"))
    report(f"data is in {temporary} and goes when this ends; keep it with --data-dir DIR")
    try:
        yield temporary
    finally:
        # Not to be cut short: the nodes have stopped, and nothing else would remove it.
        with handled(lambda _number, _frame: None):
            shutil.rmtree(temporary, ignore_errors=True)


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    """Every stop signal ends the command as Ctrl-C does."""
    raise KeyboardInterrupt


def _supervise(cluster: LocalCluster) -> int:
    """Report nodes that end, until none is left or Ctrl-C comes. Idle while nothing happens."""
    with _child_signals() as wakeup:
        while True:
            for ended in cluster.take_exits():
                report(
                    f"{cluster.explain_exit(ended)}\nthe other nodes go on; to start it again: "
                    f"penstock node --config {ended.plan.config_path}"
                )
            if not cluster.running:
                report(
                    "error: no node is left of those that this command started\n"
                    "next: stop what was started by hand, and start the same directory again"
                )
                return EXIT_FAILED
            select.select([wakeup], [], [])
            os.read(wakeup, 4096)


@contextmanager
def _child_signals() -> Iterator[int]:
    """A descriptor that becomes readable when a child ends."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    # A handler must exist for the wake-up byte to be written; the byte is all that is wanted.
    previous = signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
    previous_fd = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    try:
        yield reader
    finally:
        signal.set_wakeup_fd(previous_fd)
        signal.signal(signal.SIGCHLD, previous)
        os.close(reader)
        os.close(writer)
