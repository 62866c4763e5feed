"""What demos stand on: a directory for as long as they run, nodes, Spark, and how they end."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from penstock.cli.cluster_layout import find_base_port, prepare_layout
from penstock.cli.demo.report import say
from penstock.cli.errors import EXIT_FAILED, explain, report
from penstock.cli.interrupts import handled
from penstock.cli.local_cluster import LocalCluster
from penstock.pipeline import PipelineError, session
from penstock.wire.errors import PenstockError, RequestTimedOutError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def run_in_temporary(run: Callable[[Path], bool]) -> int:
    """Run a demo in a directory of its own; the exit status: 0 if it returned True.

    The directory is removed after that, and after Ctrl-C. After a failure it is kept, and named.
    """
    work = Path(tempfile.mkdtemp(prefix="penstock-demo-"))
    kept = f"the nodes' data and logs are kept in {work}"
    try:
        with handled(_interrupt):
            ok = run(work)
    except KeyboardInterrupt as interrupt:
        shutil.rmtree(work, ignore_errors=True)
        report("stopped; the nodes and their data are gone")
        return 128 + int(interrupt.args[0])
    except (PenstockError, PipelineError) as error:
        report(explain(error) if isinstance(error, PenstockError) else f"error: {error}")
        report(kept)
        return EXIT_FAILED
    except Exception:
        report(kept)
        raise
    if not ok:
        report(kept)
        return EXIT_FAILED
    shutil.rmtree(work, ignore_errors=True)
    return 0


def _interrupt(number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt(number)


@contextlib.contextmanager
def three_nodes(work: Path) -> Iterator[LocalCluster]:
    """A cluster that is ready, for as long as the block lasts."""
    layout = prepare_layout(work / "cluster", nodes=3, base_port=find_base_port(3))
    with LocalCluster(layout) as cluster:
        cluster.start()
        cluster.wait_ready()
        say(f"three nodes are ready at {cluster.bootstrap}")
        yield cluster


@contextlib.contextmanager
def quiet_spark(name: str, work: Path, settings: Mapping[str, str]) -> Iterator[SparkSession]:
    """A session for as long as the block lasts; what it logs goes to ``spark.log`` in ``work``.

    At the end all queries are stopped. Raises JavaMissingError and SparkMissingError.
    """
    with _errors_to(work / "spark.log"):
        spark = session(
            name,
            settings={
                "spark.driver.memory": "1g",
                # A demo is over before Java's better compiler would have paid: a fifth of the time.
                "spark.driver.extraJavaOptions": (
                    f"-Djava.io.tmpdir={work} -XX:-UsePerfData -XX:TieredStopAtLevel=1"
                ),
                "spark.local.dir": str(work),
                "spark.sql.warehouse.dir": str(work / "warehouse"),
                **settings,
            },
        )
    say(f"Spark {spark.version} is ready")
    try:
        yield spark
    finally:
        for query in spark.streams.active:
            query.stop()
        spark.stop()


@contextlib.contextmanager
def _errors_to(path: Path) -> Iterator[None]:
    """Have processes that are started in the block write their errors to a file, for good."""
    sys.stderr.flush()
    terminal = os.dup(2)
    with path.open("ab") as log:
        os.dup2(log.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(terminal, 2)
        os.close(terminal)


def wait_until(missing: Callable[[], str], what: str, timeout_seconds: float = 30.0) -> None:
    """Wait until nothing is missing; RequestTimedOutError says what still was."""
    deadline = time.monotonic() + timeout_seconds
    while reason := missing():
        if time.monotonic() > deadline:
            raise RequestTimedOutError(
                f"waited {timeout_seconds:.0f} s in vain for {what}: {reason}"
            )
        time.sleep(0.05)
