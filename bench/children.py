"""Child processes of a benchmark: started with settings, asked over pipes, ended with their parent.

A child is a module of bench/ that calls :func:`serve`. Requests and answers are JSON documents,
one a line; what a child logs goes to a file.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import psutil

HOST: Final = "127.0.0.1"
_STOP_SECONDS: Final = 20.0
_ANSWERS: Final = 9
"""The descriptor to which a child writes its answers."""

Answer = dict[str, Any]


class Child:
    """One child. Not safe to share between threads."""

    def __init__(self, script: str, settings: Answer, log: Path) -> None:
        self._log = log
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name(script)), json.dumps(settings)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                process_group=0,
            )

    @property
    def pid(self) -> int:
        """The process."""
        return self._process.pid

    def ask(self, what: str, **arguments: object) -> Answer:
        """Put a request and wait for the answer."""
        self.tell(what, **arguments)
        return self.answer()

    def tell(self, what: str, **arguments: object) -> None:
        """Put a request; ``answer`` is to be called for it later."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"what": what, **arguments}).encode() + b"\n")
        self._process.stdin.flush()

    def answer(self) -> Answer:
        """The next answer. Ends the benchmark when the child is gone."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            tail = self._log.read_text(errors="replace").splitlines()[-15:]
            raise SystemExit("\n".join([f"{self._log.name}: the process ended", *tail]))
        answer: Answer = json.loads(line)
        if "failure" in answer:
            raise SystemExit(f"{self._log.name}: {answer['failure']}")
        return answer

    def kill(self) -> None:
        """SIGKILL."""
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        """Ask the process to end, and make it."""
        with contextlib.suppress(OSError, ValueError):
            assert self._process.stdin is not None
            self._process.stdin.close()
        try:
            self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
        assert self._process.stdout is not None
        self._process.stdout.close()


@contextlib.contextmanager
def stopping(children: Iterable[Child]) -> Iterator[None]:
    """Stop the children in the end, whatever happens."""
    try:
        yield
    finally:
        for child in children:
            child.stop()


def settings() -> Answer:
    """In a child, first of all: what it was started with. What it prints is logged from here on."""
    os.dup2(1, _ANSWERS)
    os.dup2(2, 1)
    given: Answer = json.loads(sys.argv[1])
    return given


async def serve(handlers: dict[str, Callable[..., Awaitable[Answer]]]) -> None:
    """In a child: answer the parent's requests until it is gone."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        request = json.loads(line)
        try:
            answer = await handlers[request.pop("what")](**request)
        except Exception as error:
            answer = {"failure": f"{type(error).__name__}: {error}"}
        _write(json.dumps(answer).encode() + b"\n")


def _write(line: bytes) -> None:
    while line:
        line = line[os.write(_ANSWERS, line) :]


def free_ports(count: int) -> list[int]:
    """Ports that nobody uses now."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind((HOST, 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


def cpu_seconds(pids: Iterable[int]) -> float:
    """The CPU time that the processes have used, in sum."""
    return sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in pids)


def rss_mb(pid: int) -> float:
    """Resident memory of a process."""
    return psutil.Process(pid).memory_info().rss / 1e6


def percentile(values: Sequence[float], percent: int) -> float:
    """The value below which so many percent of the values lie."""
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]
