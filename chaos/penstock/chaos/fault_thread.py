"""Injects and heals a schedule's faults, one after the other, in a thread of its own."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any, Final

from penstock.chaos.checkers import HeldFault
from penstock.chaos.cluster import Cluster
from penstock.chaos.errors import FaultError
from penstock.chaos.evidence import readable
from penstock.chaos.nemeses import Fault, Nemesis, ScheduledFault
from penstock.chaos.roles import Picture, resolve
from penstock.client import AdminClient

_ADMIN_MS: Final = 10_000
"""So long each call of a fault's administration client may take."""


@dataclass(frozen=True, slots=True)
class FaultRecord:
    """What became of a scheduled fault; times in nanoseconds of the history's clock.

    ``error`` says why it could not be injected, or not be healed.
    """

    number: int
    fault: Fault
    began_t: int
    held_t: int
    healed_t: int
    held: Mapping[str, Any] | None
    error: str = ""

    def evidence(self) -> HeldFault | None:
        """As checkers see it; None for one that was never injected."""
        if self.held is None:
            return None
        details = {key: value for key, value in self.held.items() if key != "struck"}
        return HeldFault(
            self.fault.nemesis,
            self.fault.kind,
            self.began_t,
            self.held_t,
            self.healed_t,
            self.held["struck"],
            {"target": self.fault.target, **details},
        )

    def line(self) -> str:
        """As JSON on one line."""
        return json.dumps(asdict(self))

    @classmethod
    def of(cls, line: str) -> FaultRecord:
        """Of what ``line`` made."""
        fields = json.loads(line)
        return cls(**{**fields, "fault": Fault(**fields["fault"])})


def read_faults(path: Path) -> list[FaultRecord]:
    """What a run wrote into ``faults.jsonl``. Raises EvidenceError."""
    if not path.exists():
        return []
    with readable(path), path.open(encoding="utf-8") as file:
        return [FaultRecord.of(line) for line in file if line.endswith("\n")]


def _told(error: Exception) -> str:
    """For the report: of what nobody expected also its kind."""
    return str(error) if isinstance(error, FaultError) else f"{type(error).__name__}: {error}"


class _Scene:
    def __init__(
        self, cluster: Cluster, picture: Picture, random: Random, down: Sequence[int]
    ) -> None:
        self.cluster: Final = cluster
        self.random: Final = random
        self._picture: Final = picture
        self._down: Final = list(down)

    def resolve(self, target: str) -> Sequence[int]:
        found = resolve(target, self.cluster.nodes, self.down(), self._picture, self.random)
        if len(found) < len(self.cluster.nodes):
            # Whatever strikes beside it finds them held already; of all there is nobody else.
            self._down.extend(found)
        return found

    def down(self) -> Sequence[int]:
        running = set(self.cluster.running)
        return sorted({*self._down, *(node for node in self.cluster.nodes if node not in running)})

    def admin(self) -> AdminClient:
        return AdminClient(
            self.cluster.bootstrap, client_id="penstock-chaos", default_api_timeout_ms=_ADMIN_MS
        )


class FaultThread:
    """Carries out a schedule. ``stop`` has it heal what it holds, and end."""

    def __init__(
        self,
        faults: Sequence[ScheduledFault],
        nemeses: Mapping[str, Nemesis],
        cluster: Cluster,
        picture: Picture,
        *,
        seed: int,
        epoch_ns: int,
        path: Path,
        on_change: Callable[[Fault | None], object] = lambda _: None,
    ) -> None:
        self._faults: Final = sorted(faults, key=lambda one: one.at_ms)
        self._nemeses: Final = nemeses
        self._cluster: Final = cluster
        self._picture: Final = picture
        self._seed: Final = seed
        self._epoch_ns: Final = epoch_ns
        self._path: Final = path
        self._on_change: Final = on_change
        self._stop: Final = threading.Event()
        self.records: Final[list[FaultRecord]] = []
        self._thread: Final = threading.Thread(target=self._run, name="faults", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    @property
    def ended(self) -> bool:
        """Whether all of them are over."""
        return not self._thread.is_alive()

    def stop(self, timeout_s: float) -> bool:
        """Have what holds be healed now, and nothing more begin; whether that was done in time."""
        self._stop.set()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        for number, scheduled in enumerate(self._faults):
            if self._stop.wait(max(0.0, scheduled.at_ms / 1000 - self._now_ns() / 1e9)):
                return
            record = self._carry_out(number, scheduled)
            self.records.append(record)
            with self._path.open("a", encoding="utf-8") as file:
                file.write(record.line() + "\n")

    def _carry_out(self, number: int, scheduled: ScheduledFault) -> FaultRecord:
        fault = scheduled.fault
        nemesis = self._nemeses[fault.nemesis]
        random = Random(f"{self._seed}/fault/{number}")
        began = self._now_ns()
        self._on_change(fault)
        try:
            try:
                held = nemesis.invoke(fault, _Scene(self._cluster, self._picture, random, ()))
            except Exception as error:
                # Whatever it is, the run goes on and the report shows it.
                now = self._now_ns()
                return FaultRecord(number, fault, began, now, now, None, _told(error))
            holds = self._now_ns()
            self._stop.wait(scheduled.hold_ms / 1000)
            why = ""
            try:
                scene = _Scene(self._cluster, self._picture, random, held["struck"])
                nemesis.heal(fault, scene, held)
            except Exception as error:
                why = f"not healed: {_told(error)}"
            return FaultRecord(number, fault, began, holds, self._now_ns(), held, why)
        finally:
            self._on_change(None)

    def _now_ns(self) -> int:
        return time.monotonic_ns() - self._epoch_ns
