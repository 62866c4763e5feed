"""A worker: one process of the harness that runs logical clients and writes their history.

``python -m penstock.chaos.worker`` reads lines of JSON on its standard input and writes lines of
JSON to its standard output:

| line in | |
|---|---|
| a ``WorkerSpec`` | what to run; the first line |
| ``{"go": EPOCH_NS}`` | begin, with the history's clock at 0 when the monotonic one shows that |
| ``{"stop": true}`` | end the clients and leave; so does the end of the input |

| line out | |
|---|---|
| ``{"ready": true}`` | everything is loaded, and the go is waited for |
| ``{"progress": {...}}`` | twice a second, what was done since the line before; see ``Tally`` |
| ``{"finished": true}`` | of a worker for final reads: all clients have finished |
| ``{"failed": "..."}`` | the harness is broken, and the worker ends with status 1 |

What clients do is in the file at most 100 ms later, also when the worker is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any, Final

from penstock.chaos.history import FINAL, Event, HistoryWriter, Type
from penstock.chaos.recorder import Recorder
from penstock.chaos.workloads import Client, ClientSpec, Plan, Surroundings, Workload
from penstock.chaos.workloads.values import DAMAGED
from penstock.wire.transport import quiet_grpc, tune_malloc

FLUSH_S: Final = 0.1
PROGRESS_S: Final = 0.5
_CANCEL_S: Final = 10.0
"""Clients have so long to close what they hold; what they asked for is ambiguous then anyway."""


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """What one worker runs."""

    workload: str
    bootstrap: str
    plan: Plan
    clients: Sequence[ClientSpec]
    history: str
    """The path of its history."""
    is_final: bool = False
    """Whether it awaits ``finish`` of the clients, and then ends, instead of ``run``."""

    def line(self) -> str:
        """As JSON on one line."""
        return json.dumps(asdict(self))

    @classmethod
    def of(cls, line: str) -> WorkerSpec:
        """Of what ``line`` made."""
        fields: dict[str, Any] = json.loads(line)
        return cls(
            fields["workload"],
            fields["bootstrap"],
            Plan(**fields["plan"]),
            [ClientSpec(**one) for one in fields["clients"]],
            fields["history"],
            fields["is_final"],
        )


class Tally:
    """What was done since the last look: operations by what came of them, records, latencies."""

    def __init__(self) -> None:
        self._begun: dict[str, int] = {}
        self._clear()

    def _clear(self) -> None:
        self._counts = dict.fromkeys(("ok", "fail", "info"), 0)
        self._records = self._damaged = 0
        self._latencies_ms: list[float] = []

    def add(self, event: Event) -> None:
        """Count an event."""
        if event.type is Type.INVOKE:
            self._begun[event.p] = event.t
            return
        self._counts[event.type.value] += 1
        began = self._begun.pop(event.p, event.t)
        if event.type is Type.OK:
            self._records += records_in(event.f, event.value)
            if event.f == "poll":
                self._damaged += sum(run[2].startswith(DAMAGED) for run in event.value["runs"])
            if event.f != "poll":  # It waits for what there is not: its time says nothing.
                self._latencies_ms.append((event.t - began) / 1e6)

    def take(self) -> dict[str, Any]:
        """Everything since the last call."""
        found = {
            **self._counts,
            "records": self._records,
            "damaged": self._damaged,
            "latencies_ms": [round(one, 2) for one in self._latencies_ms],
        }
        self._clear()
        return found


def records_in(f: str, value: Any) -> int:
    """How many operations the event of one stands for: records where it is about records."""
    if f == "append":
        return int(value["count"])
    if f == "poll":
        return sum(run[4] for run in value["runs"])
    return 1


class _CountingWriter(HistoryWriter):
    def __init__(self, path: Path, tally: Tally) -> None:
        super().__init__(path)
        self._tally: Final = tally

    def add(self, event: Event) -> None:
        super().add(event)
        self._tally.add(event)


class Worker:
    """The clients of one worker, in the running event loop."""

    def __init__(self, spec: WorkerSpec, workload: Workload) -> None:
        self._spec: Final = spec
        self._workload: Final = workload
        self._tally: Final = Tally()
        self._writer: Final = _CountingWriter(Path(spec.history), self._tally)

    async def run(self, epoch_ns: int, stopped: asyncio.Event) -> None:
        """Run the clients until ``stopped``, or until all have finished.

        Raises what a client raises: that is a fault of the harness.
        """
        clients = [self._client(spec, epoch_ns) for spec in self._spec.clients]
        running: list[asyncio.Task[None]] = [
            asyncio.create_task(self._drive(client)) for client in clients
        ]
        flushing = asyncio.ensure_future(self._flush())
        telling = asyncio.ensure_future(self._tell())
        stopping: asyncio.Task[Any] = asyncio.create_task(stopped.wait())
        everyone = asyncio.gather(*running)
        try:
            done: set[asyncio.Future[Any]] = {everyone, stopping}
            await asyncio.wait(done, return_when=asyncio.FIRST_COMPLETED)
            if everyone.done():
                everyone.result()
        finally:
            for task in (*running, stopping, telling):
                task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait(running, timeout=_CANCEL_S)
            everyone.cancel()
            await asyncio.gather(everyone, return_exceptions=True)
            flushing.cancel()
            self._writer.close()
            say(progress=self._tally.take())

    def _client(self, spec: ClientSpec, epoch_ns: int) -> Client:
        phase = FINAL if self._spec.is_final else ""
        recorder = Recorder(self._writer, spec.process, epoch_ns, phase=phase)
        random = Random(f"{self._spec.plan.seed}/{spec.process}")
        return self._workload.client(
            Surroundings(self._spec.bootstrap, self._spec.plan, spec, random, recorder)
        )

    async def _drive(self, client: Client) -> None:
        if self._spec.is_final:
            await client.finish()
        else:
            await client.run()

    async def _flush(self) -> None:
        while True:
            await asyncio.sleep(FLUSH_S)
            self._writer.flush()

    async def _tell(self) -> None:
        while True:
            await asyncio.sleep(PROGRESS_S)
            say(progress=self._tally.take())


def say(**what: Any) -> None:
    """Write a line to the runner. It may be gone: then the end of the input says so too."""
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.write(json.dumps(what) + "\n")
        sys.stdout.flush()


async def _serve(spec: WorkerSpec, workload: Workload) -> None:
    loop = asyncio.get_running_loop()
    stopped = asyncio.Event()
    go: asyncio.Future[int] = loop.create_future()

    def hear(order: Mapping[str, Any]) -> None:
        if "go" in order and not go.done():
            go.set_result(int(order["go"]))
        if "stop" in order:
            stopped.set()
            go.cancel()

    def listen() -> None:
        for line in sys.stdin:
            loop.call_soon_threadsafe(hear, json.loads(line))
        with contextlib.suppress(RuntimeError):  # The loop has ended already.
            loop.call_soon_threadsafe(hear, {"stop": True})

    # A daemon: it must not keep the process alive that waits for nobody else.
    threading.Thread(target=listen, name="orders", daemon=True).start()
    say(ready=True)
    try:
        epoch_ns = await go
    except asyncio.CancelledError:
        return
    await Worker(spec, workload).run(epoch_ns, stopped)
    if spec.is_final and not stopped.is_set():
        say(finished=True)


def main() -> int:
    """Serve one runner; the exit status."""
    tune_malloc()
    quiet_grpc()
    line = sys.stdin.readline()
    if not line:
        return 0
    # Imported here: workloads import gRPC, which was to be quieted first.
    from penstock.chaos.workloads.registry import find_workload  # noqa: PLC0415 - see above.

    spec = WorkerSpec.of(line)
    try:
        asyncio.run(_serve(spec, find_workload(spec.workload)))
    except Exception:
        say(failed=traceback.format_exc())
        return 1
    return 0


if __name__ == "__main__":
    # The orders' thread may hold the lock of standard input, for which the interpreter would wait.
    status = main()
    sys.stdout.flush()
    os._exit(status)
