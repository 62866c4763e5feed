"""How `penstock chaos` ends: its exit statuses, its errors, and the table of verdicts."""

from __future__ import annotations

import os
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import typer

from penstock.cli.errors import EXIT_FAILED, OWN_STEP, explain, report
from penstock.cli.installation import missing_for_chaos
from penstock.cli.output import format_count, print_json, print_table
from penstock.cli.standard_streams import OutputError
from penstock.wire.errors import PenstockError

if TYPE_CHECKING:
    from penstock.chaos.judging import Judgement
    from penstock.chaos.verdict import Valid

EXIT_UNKNOWN: Final = 3
"""Nothing was found, but not everything could be judged, or nothing at all."""
_EXIT_USAGE: Final = 2
_SHOWN_ANOMALIES: Final = 3
"""Of each checker, at a terminal."""


def exit_status(valid: Valid) -> int:
    """0 for true alone, 1 for false, 3 for unknown."""
    return {"true": 0, "false": EXIT_FAILED, "unknown": EXIT_UNKNOWN}[valid.value]


@contextmanager
def harness_errors() -> Iterator[None]:
    """Turn what goes wrong in the harness into a line and an exit status.

    A plan that cannot be is a mistake of usage (2); of anything else nothing can be said (3).
    Whatever is raised, it is never the 1 of a promise that was broken.
    """
    from penstock.chaos.errors import (  # noqa: PLC0415 - not for --help.
        ChaosError,
        PlanError,
        reason_of,
    )

    try:
        yield
    except ChaosError as error:
        message, separator, step = str(error).partition(OWN_STEP)
        report(f"error: {message}" + (f"\nnext: {step}" if separator else ""))
        is_usage = isinstance(error, PlanError)
        raise typer.Exit(_EXIT_USAGE if is_usage else EXIT_UNKNOWN) from error
    except (typer.Exit, typer.Abort, typer.BadParameter, OutputError):
        raise  # They say themselves how this ends.
    except PenstockError as error:
        report(explain(error))
        raise typer.Exit(EXIT_UNKNOWN) from error
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        report(f"error: {where}{reason_of(error)}\nnext: see that files there can be used")
        raise typer.Exit(EXIT_UNKNOWN) from error
    except ModuleNotFoundError as error:
        missing = missing_for_chaos()
        if error.name not in missing:
            _report_broken(error)
        else:
            report(
                f"error: the harness needs packages that are not installed: {', '.join(missing)}\n"
                'next: pip install "penstock[chaos]"; an image has them that was made by '
                "`make image EXTRAS=broker,chaos`"
            )
        raise typer.Exit(EXIT_UNKNOWN) from error
    except Exception as error:  # Nobody expected it: of the run nothing is known.
        _report_broken(error)
        raise typer.Exit(EXIT_UNKNOWN) from error


def _report_broken(error: Exception) -> None:
    report(
        f"error: the harness broke: {type(error).__name__}: {error}\n"
        f"next: {_keep_traceback()} says where; please tell Penstock's makers"
    )


def _keep_traceback() -> str:
    """The file that has that of what is handled just now."""
    descriptor, path = tempfile.mkstemp(prefix="penstock-chaos-", suffix=".log")
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        traceback.print_exc(file=file)
    return path


def show_judgement(
    judgement: Judgement, *, as_json: bool, directory: Path | None, report_path: Path | None
) -> None:
    """Print what all checkers say."""
    if as_json:
        print_json(judgement_json(judgement, directory=directory, report_path=report_path))
        return
    figures = judgement.figures
    rows: list[tuple[object, ...]] = [
        (one.checker, one.valid.value, format_count(one.looked_at), one.found, one.reason or "")
        for one in judgement.verdicts
    ]
    rows += [
        (name, "not judged", "-", "-", reason)
        for name, reason in (figures.get("not_judged") or {}).items()
    ]
    print_table(
        ("Checker", "Verdict", "LookedAt", "Anomalies", "Reason"),
        rows,
        right=("LookedAt", "Anomalies"),
    )
    for verdict in judgement.verdicts:
        for anomaly in verdict.anomalies[:_SHOWN_ANOMALIES]:
            print(f"{verdict.checker}: {anomaly.what}")
        if verdict.found > _SHOWN_ANOMALIES:
            more = verdict.found - _SHOWN_ANOMALIES
            where = "" if report_path is None else ", of which the report shows some"
            print(f"{verdict.checker}: and {more:,} more{where}")
    if (ended := figures.get("interrupted_after_s")) is not None:
        print(f"ended by Ctrl-C after {ended:g} s of load")
    if (faults := figures.get("faults")) is not None:
        planned = faults["planned"]
        print(f"faults: {faults['held']} of {planned}" if planned else "faults: none were planned")
    print(f"verdict: {judgement.valid.value}")
    if report_path is not None:
        print(f"report: {report_path}")


def judgement_json(
    judgement: Judgement, *, directory: Path | None, report_path: Path | None
) -> dict[str, Any]:
    """The same for programs."""
    return {
        "valid": judgement.valid.value,
        "anomalies": judgement.anomalies,
        "figures": dict(judgement.figures),
        "directory": None if directory is None else str(directory),
        "report": None if report_path is None else str(report_path),
        "verdicts": [
            {
                "checker": one.checker,
                "valid": one.valid.value,
                "looked_at": one.looked_at,
                "found": one.found,
                "reason": one.reason,
                "anomalies": [anomaly.what for anomaly in one.anomalies],
            }
            for one in judgement.verdicts
        ],
    }


def new_directory(base: Path, names: Sequence[str]) -> Path:
    """A directory of a run that is not there yet, named by what it is of and the time."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    stem = "-".join([*(name for name in names if name), stamp])
    path = base / stem
    number = 2
    while path.exists():
        path = base / f"{stem}-{number}"
        number += 1
    return path
