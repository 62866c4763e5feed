"""What all checkers conclude of a run together, and the file that keeps it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from penstock.chaos.errors import PlanError, reason_of
from penstock.chaos.verdict import Anomaly, Valid, Verdict, compose

VERDICT_FILE: Final = "verdict.json"


@dataclass(frozen=True, slots=True)
class Judgement:
    """Of a whole run: what all checkers say, what that comes to, and figures of the run."""

    verdicts: Sequence[Verdict]
    figures: Mapping[str, Any] = field(default_factory=dict)

    @property
    def valid(self) -> Valid:
        """False where one is, else unknown where one is, else true."""
        return compose(self.verdicts)

    @property
    def anomalies(self) -> int:
        """How many were found in all."""
        return sum(verdict.found for verdict in self.verdicts)


def write_judgement(judgement: Judgement, directory: Path) -> None:
    """Keep it as ``verdict.json``."""
    value = {
        "valid": judgement.valid.value,
        "anomalies": judgement.anomalies,
        "figures": dict(judgement.figures),
        "verdicts": [asdict(verdict) for verdict in judgement.verdicts],
    }
    text = json.dumps(value, indent=1, default=str) + "\n"
    (directory / VERDICT_FILE).write_text(text, encoding="utf-8")


def read_judgement(directory: Path) -> Judgement:
    """What ``write_judgement`` wrote. Raises PlanError."""
    path = directory / VERDICT_FILE
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        verdicts = [
            Verdict(
                **{
                    **one,
                    "valid": Valid(one["valid"]),
                    "anomalies": [Anomaly(**anomaly) for anomaly in one["anomalies"]],
                }
            )
            for one in value["verdicts"]
        ]
        return Judgement(verdicts, value["figures"])
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise PlanError(
            f"{path} holds no verdict ({reason_of(error)}); next: remove it, and judge the run "
            "with `penstock chaos check`"
        ) from None
