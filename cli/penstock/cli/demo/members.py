"""The demo's readers: `penstock consume` processes in one group."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Sequence
from types import TracebackType
from typing import Final, Self

from penstock.cli.demo.verdict import Read

LINE_HEADER: Final = "line"
_STOP_SECONDS: Final = 20.0


class Members:
    """Processes of one group, and what they have printed so far. Use as a context manager."""

    def __init__(self, bootstrap: str, topic: str, group: str, names: Sequence[str]) -> None:
        self._lock = threading.Lock()
        self._reads: list[Read] = []
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._threads: list[threading.Thread] = []
        for name in names:
            process = subprocess.Popen(  # noqa: S603 - our own command, by our own interpreter.
                [
                    *(sys.executable, "-m", "penstock.cli", "-b", bootstrap),
                    *("consume", topic, "--group", group, "--from-beginning", "--format", "json"),
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                # Ctrl-C reaches us alone; we stop the members in order.
                process_group=0,
            )
            self._processes[name] = process
            thread = threading.Thread(target=self._collect, args=(name, process), daemon=True)
            thread.start()
            self._threads.append(thread)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def reads(self) -> list[Read]:
        """Everything printed until now, in the order in which it arrived here."""
        with self._lock:
            return list(self._reads)

    def count(self) -> int:
        """How many lines were printed until now."""
        with self._lock:
            return len(self._reads)

    def ended(self) -> list[str]:
        """The names of members whose process ended."""
        return [name for name, process in self._processes.items() if process.poll() is not None]

    def stop(self) -> None:
        """Stop every member in order, and read what it still had to say. Idempotent."""
        for process in self._processes.values():
            if process.poll() is None:
                process.terminate()
        for process in self._processes.values():
            try:
                process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for thread in self._threads:
            thread.join()

    def _collect(self, name: str, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        with process.stdout as lines:
            for line in lines:
                read = parse_read(name, line)
                with self._lock:
                    self._reads.append(read)


def parse_read(member: str, line: bytes) -> Read:
    """One line of `penstock consume --format json`; the line's number is in a header."""
    record = json.loads(line)
    number = next(
        int(header["value"]) for header in record["headers"] if header["key"] == LINE_HEADER
    )
    return Read(member, number, record["partition"], record["offset"], record["value"])
