"""Carries out one plan, from its cluster to its report."""

from __future__ import annotations

import importlib.metadata
import platform
import shutil
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from penstock.cli.chaos.backends import CLUSTER_DIRECTORY, make_cluster
from penstock.cli.interrupts import handled

if TYPE_CHECKING:
    from penstock.chaos.live import Onlooker
    from penstock.chaos.nemeses import ScheduledFault
    from penstock.chaos.run_plan import RunPlan
    from penstock.chaos.runner import Outcome


def versions() -> dict[str, str]:
    """What takes part in a run."""
    return {
        "penstock": importlib.metadata.version("penstock"),
        "python": platform.python_version(),
        "grpcio": importlib.metadata.version("grpcio"),
        platform.system().lower(): platform.release(),
    }


class StopRequest:
    """The stop signals: the first one ends the load early, the second one everything."""

    def __init__(self) -> None:
        self.event = threading.Event()
        self.signal_number = 0

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Hear them inside the block."""
        with handled(self._handle):
            yield

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if self.event.is_set():
            raise KeyboardInterrupt
        self.signal_number = number
        self.event.set()


def as_scheduled(plan: RunPlan, path: Path, faults: Sequence[ScheduledFault]) -> RunPlan:
    """The plan of a run whose faults are those of a file, and not what its seed makes."""
    names = dict.fromkeys(one.fault.nemesis for one in faults)
    return replace(plan, schedule=str(path), nemesis=",".join(names))


def carry_out(
    plan: RunPlan,
    directory: Path,
    *,
    stop: StopRequest,
    onlooker: Onlooker | None = None,
    faults: Sequence[ScheduledFault] | None = None,
    keep_data: bool = False,
) -> tuple[Outcome, Path]:
    """Run, judge and report; what came of it, and the report. Raises ChaosError.

    The nodes' data are kept where the verdict is not true, or ``keep_data`` is set.
    """
    from penstock.chaos.runner import (  # noqa: PLC0415 - it imports gRPC.
        SCHEDULE_FILE,
        Runner,
        check_plan,
        plan_faults,
    )
    from penstock.chaos.stored_run import report_stored  # noqa: PLC0415 - as above.

    if faults is None:
        plan = replace(plan, schedule="")
    else:
        # As the run keeps them: where they came from may be another file by then.
        plan = as_scheduled(plan, directory / SCHEDULE_FILE, faults)
    check_plan(plan)
    faults = plan_faults(plan) if faults is None else faults
    with _made(directory):
        cluster = make_cluster(plan, directory, faults)
        plan = replace(plan, versions={**versions(), **cluster.versions})
        runner = Runner(plan, cluster, directory, faults=faults, onlooker=onlooker, stop=stop.event)
    outcome = runner.run()
    if outcome.valid.value == "true" and not keep_data:
        shutil.rmtree(directory / CLUSTER_DIRECTORY, ignore_errors=True)
    return outcome, report_stored(directory)


@contextmanager
def _made(directory: Path) -> Iterator[None]:
    """With the directory of a run, taken back where there can be no cluster. Raises PlanError.

    What a backend can do is known of one that was made, which has directories of its own.
    """
    from penstock.chaos.errors import (  # noqa: PLC0415 - not for --help.
        ChaosError,
        PlanError,
        reason_of,
    )

    missing = [path for path in (directory, *directory.parents) if not path.exists()]
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PlanError(
            f"{directory} cannot be made ({reason_of(error)}); next: name another with --out"
        ) from error
    try:
        yield
    except ChaosError:
        shutil.rmtree(directory / CLUSTER_DIRECTORY, ignore_errors=True)
        with suppress(OSError):  # Another run may have made its own beside it.
            for path in missing:
                path.rmdir()
        raise


def interrupted_status(stop: StopRequest) -> int:
    """What a shell reports for a program that the signal ended."""
    return 128 + (stop.signal_number or signal.SIGINT)
