"""``python -m tests.unit.chaos.paper_worker``: a worker whose clients need no cluster.

A client writes its records at once and then waits; what else it does its ``kind`` says.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence

from penstock.chaos import worker
from penstock.chaos.checkers import Checker
from penstock.chaos.recorder import Recorder
from penstock.chaos.workloads import Client, ClientSpec, Plan, Surroundings
from penstock.chaos.workloads.registry import WORKLOADS
from penstock.client import AdminClient

COMMAND = (sys.executable, "-m", "tests.unit.chaos.paper_worker")
RECORDS = 5


class Scribe:
    """Writes to nobody."""

    def __init__(self, surroundings: Surroundings) -> None:
        self._recorder: Recorder = surroundings.recorder
        self._spec: ClientSpec = surroundings.spec

    async def run(self) -> None:
        asked = {"topic": "paper", "partition": 0, "producer": self._spec.process, "acks": "all"}
        for number in range(RECORDS):
            value = {**asked, "first": number, "count": 1}
            self._recorder.invoke("append", value)
            self._recorder.ok({**value, "runs": [[number, 1, number]]})
        if self._spec.kind == "broken":
            raise ValueError("the pen is empty")
        self._recorder.invoke("append", {**asked, "first": RECORDS, "count": 1})
        await asyncio.Event().wait()

    async def finish(self) -> None:
        if self._spec.kind == "endless":
            await asyncio.Event().wait()
        self._recorder.invoke("poll", {"topic": "paper"})
        self._recorder.ok({"topic": "paper", "runs": [], "positions": {}, "ends": {}})


class Paper:
    """A workload of as many scribes as its options say, on two workers."""

    name = "paper"
    summary = "writes to nobody"

    def prepare(self, admin: AdminClient, plan: Plan) -> None:
        """Nothing."""

    def clients(self, plan: Plan) -> Sequence[ClientSpec]:
        kind = str(plan.options.get("kind", ""))
        return [ClientSpec(f"scribe-{number}", kind, number % 2) for number in range(3)]

    def client(self, surroundings: Surroundings) -> Client:
        return Scribe(surroundings)

    def checkers(self, plan: Plan) -> Sequence[Checker]:
        return []


if __name__ == "__main__":
    WORKLOADS["paper"] = Paper()  # type: ignore[index]  # For this process alone.
    status = worker.main()
    sys.stdout.flush()
    os._exit(status)
