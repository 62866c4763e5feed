"""What a run is asked to be, kept as ``plan.json`` so that it can be repeated."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from penstock.chaos.errors import PlanError, reason_of
from penstock.chaos.workloads import Plan

PLAN_FILE: Final = "plan.json"
RECOVERY_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class RunPlan:
    """Everything that a run is made of. The same plan makes the same schedule and operations."""

    workload: str
    nemesis: str
    """Names with commas, several at a time with ``+``; empty for none."""
    nodes: int
    duration_s: float
    seed: int
    rate: float
    interval_s: float
    """From the beginning of a fault to that of the next one."""
    recovery_s: float = RECOVERY_S
    """So long the cluster may take to be whole again once everything is healed."""
    backend: str = "local"
    bug: str = ""
    """A known bug that is put into the nodes, to see it found; empty for none."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """The workload's own."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Of what took part; filled in when it runs."""
    backend_options: Mapping[str, str] = field(default_factory=dict)
    """The backend's own, such as an image."""
    objective: Mapping[str, int] = field(default_factory=dict)
    """Of availability, in milliseconds: the names of ``penstock.chaos.checkers.availability``."""
    schedule: str = ""
    """The file with the faults, where they are not those that the seed makes."""

    def for_workload(self) -> Plan:
        """As far as workloads are concerned."""
        return Plan(self.seed, self.nodes, self.duration_s, self.rate, self.options)

    def command(self) -> str:
        """The command line that repeats it."""
        words = ["penstock", "chaos", "run", "--workload", self.workload]
        # The faults of a schedule are those of its nemeses, which need no naming.
        words += [] if self.schedule else ["--nemesis", self.nemesis or "none"]
        words += ["--nodes", str(self.nodes)]
        words += ["--duration", f"{self.duration_s:g}", "--seed", str(self.seed)]
        words += ["--rate", f"{self.rate:g}", "--interval", f"{self.interval_s:g}"]
        if self.recovery_s != RECOVERY_S:
            words += ["--recovery", f"{self.recovery_s:g}"]
        if self.backend != "local":
            words += ["--backend", self.backend]
        for name, text in self.backend_options.items():
            words += ["--backend-set", f"{name}={text}"]
        if self.bug:
            words += ["--bug", self.bug]
        for name, value in self.options.items():
            words += ["--set", f"{name}={value}"]
        for name, most_ms in self.objective.items():
            words += ["--objective", f"{name}={most_ms}"]
        if self.schedule:
            words += ["--schedule", self.schedule]
        return shlex.join(words)

    def write(self, directory: Path) -> None:
        """Keep it."""
        text = json.dumps({**asdict(self), "command": self.command()}, indent=1) + "\n"
        (directory / PLAN_FILE).write_text(text, encoding="utf-8")


def read_plan(directory: Path) -> RunPlan:
    """What ``RunPlan.write`` wrote. Raises PlanError."""
    path = directory / PLAN_FILE
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        fields.pop("command", None)
        return RunPlan(**fields)
    except (OSError, AttributeError, TypeError, ValueError) as error:
        raise PlanError(
            f"{path} is no plan of a run ({reason_of(error)}); next: name the directory of a run"
        ) from None
