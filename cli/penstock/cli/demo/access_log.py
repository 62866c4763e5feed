"""The demo's input: the sample log, and what awk counts in it."""

from __future__ import annotations

import gzip
import shutil
import subprocess
from pathlib import Path
from typing import Final

from penstock.cli.demo.verdict import LogCounts, count_lines
from penstock.wire.errors import ConfigurationError

SAMPLE: Final = Path(__file__).resolve().parents[4] / "examples" / "data" / "access.log.gz"


def read_lines(path: Path) -> list[str]:
    """The lines of a gzip file without their ends."""
    try:
        with gzip.open(path, "rt", encoding="utf-8", newline="\n") as file:
            return file.read().removesuffix("\n").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(
            f"cannot read the access log {path}: {error}; it is part of the repository, "
            "under examples/data/; name another with --data"
        ) from None


def count_with_awk(path: Path, work: Path) -> tuple[LogCounts, str]:
    """Count statuses and paths in the file, and the name of what counted: awk where there is one.

    awk is a second opinion that shares no code with Penstock.
    """
    awk = shutil.which("awk")
    if awk is None:
        return count_lines(read_lines(path)), "Python (awk is not installed)"
    plain = work / "access.log"
    with gzip.open(path, "rb") as packed, plain.open("wb") as unpacked:
        shutil.copyfileobj(packed, unpacked)
    return LogCounts(_field_counts(awk, 9, plain), _field_counts(awk, 7, plain)), "awk"


def _field_counts(awk: str, field: int, plain: Path) -> dict[str, int]:
    program = f'{{ count[${field}]++ }} END {{ for (key in count) print count[key] "\\t" key }}'
    result = subprocess.run(  # noqa: S603 - a fixed program over our own file.
        [awk, program, str(plain)], check=True, capture_output=True, text=True
    )
    counts: dict[str, int] = {}
    for line in result.stdout.splitlines():
        count, _, key = line.partition("\t")
        counts[key] = int(count)
    return counts
