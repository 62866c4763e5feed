"""The runner's side of workers: it starts them, hears of their progress, and may break them."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, Final

from penstock.chaos.errors import ChaosError
from penstock.chaos.worker import WorkerSpec

READY_S: Final = 60.0
STOP_S: Final = 20.0
WORKER_COMMAND: Final = (sys.executable, "-m", "penstock.chaos.worker")


class WorkerError(ChaosError):
    """A worker of the harness failed: that is a fault of the harness, not of the cluster."""


class WorkerProcess:
    """One worker. Its methods are for one thread at a time; ``on_progress`` is called by others."""

    def __init__(
        self,
        spec: WorkerSpec,
        log: Path,
        on_progress: Callable[[Mapping[str, Any]], object] = lambda _: None,
        command: Sequence[str] = WORKER_COMMAND,
    ) -> None:
        self.spec: Final = spec
        self._log: Final = log
        self._on_progress: Final = on_progress
        self._heard: Final = threading.Condition()
        self._ready = False
        self._finished = False
        self._ended = False
        self._failure = ""
        self.was_asked_to_end = False
        with log.open("ab") as errors:
            self._process = subprocess.Popen(  # noqa: S603 - our own module, by our interpreter.
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                # Ctrl-C in the terminal reaches the runner alone, which ends its workers.
                process_group=0,
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._orders: Final[IO[str]] = self._process.stdin
        self._answers: Final[IO[str]] = self._process.stdout
        self._order(spec.line())
        self._listener = threading.Thread(target=self._listen, name="worker", daemon=True)
        self._listener.start()

    @property
    def pid(self) -> int:
        """Its process."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether its process lives, be it paused."""
        return self._process.poll() is None

    def wait_ready(self, timeout_s: float = READY_S) -> None:
        """Return when it has loaded everything. Raises WorkerError."""
        with self._heard:
            self._heard.wait_for(lambda: self._ready or self._ended, timeout_s)
            if self._ready:
                return
        self.complain(f"was not ready within {timeout_s:.0f} s")

    def go(self, epoch_ns: int) -> None:
        """Have its clients begin."""
        self._order(json.dumps({"go": epoch_ns}))

    def wait_finished(self, timeout_s: float) -> bool:
        """Whether all of its clients finished in time. Raises WorkerError where it failed."""
        with self._heard:
            self._heard.wait_for(lambda: self._finished or self._ended, timeout_s)
            if self._finished:
                return True
            if not self._ended:
                return False
        self.complain("ended before it had finished")
        return False

    def kill(self) -> None:
        """End it at once. What its clients were doing stays ambiguous. Idempotent."""
        self.was_asked_to_end = True
        self._process.kill()
        self._process.wait()
        self._close()

    def pause(self) -> None:
        """Stop it in its tracks. No-op where it is gone."""
        if self.alive:
            self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Have it go on. No-op where it is gone or was not paused."""
        if self.alive:
            self._process.send_signal(signal.SIGCONT)

    def ask_to_stop(self) -> None:
        """Ask it to end; ``stop`` waits for it."""
        self.was_asked_to_end = True
        self._order(json.dumps({"stop": True}))

    def stop(self, timeout_s: float = STOP_S) -> None:
        """Ask it to end and wait, by force after the time. Idempotent.

        Raises WorkerError where it has failed by itself, be it before.
        """
        self.ask_to_stop()
        with contextlib.suppress(OSError):
            self._orders.close()
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._close()
        if self._failure:
            self.complain("failed")

    def _order(self, line: str) -> None:
        # It may have ended, or been killed: whoever waits for it hears that otherwise.
        with contextlib.suppress(OSError, ValueError):
            self._orders.write(line + "\n")
            self._orders.flush()

    def _listen(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            for line in self._answers:
                try:
                    self._hear(json.loads(line))
                except ValueError:  # Cut when it was killed.
                    continue
        with self._heard:
            self._ended = True
            self._heard.notify_all()

    def _hear(self, said: Mapping[str, Any]) -> None:
        if "progress" in said:
            self._on_progress(said["progress"])
            return
        with self._heard:
            self._ready |= "ready" in said
            self._finished |= "finished" in said
            self._failure = said.get("failed", self._failure)
            self._heard.notify_all()

    def _close(self) -> None:
        self._listener.join(STOP_S)
        for stream in (self._orders, self._answers):
            with contextlib.suppress(OSError, ValueError):
                stream.close()

    def complain(self, what: str) -> None:
        """Raise WorkerError that says what, and the end of what it said itself."""
        self._listener.join(STOP_S if not self.alive else 0)
        why = self._failure or self._log.read_text(encoding="utf-8", errors="replace")
        last = "\n".join(why.strip().splitlines()[-20:])
        names = ", ".join(client.process for client in self.spec.clients[:4])
        raise WorkerError(
            f"the worker of clients {names} {what}; next: see {self._log}"
            + (f"\n{last}" if last else "")
        )


class Workers:
    """All workers of a phase of a run; workers that were killed come back under new names."""

    def __init__(
        self,
        specs: Mapping[int, WorkerSpec],
        directory: Path,
        on_progress: Callable[[Mapping[str, Any]], object] = lambda _: None,
        command: Sequence[str] = WORKER_COMMAND,
    ) -> None:
        self._directory: Final = directory
        self._on_progress: Final = on_progress
        self._command: Final = command
        self._lives: Final = dict.fromkeys(specs, 1)
        self._epoch_ns = 0
        self.histories: Final[list[Path]] = []
        self._specs: Final = dict(specs)
        self._workers: Final[dict[int, WorkerProcess]] = {}
        try:
            for number in specs:
                self._workers[number] = self._launch(number)
        except BaseException:
            self._kill_all()
            raise

    @property
    def numbers(self) -> Sequence[int]:
        """All of them."""
        return sorted(self._workers)

    def __getitem__(self, number: int) -> WorkerProcess:
        return self._workers[number]

    def begin(self, epoch_ns: int | None = None) -> int:
        """Wait until all are ready and have them begin; when the history's clock was 0."""
        try:
            for worker in self._workers.values():
                worker.wait_ready()
        except WorkerError:
            self._kill_all()
            raise
        self._epoch_ns = time.monotonic_ns() if epoch_ns is None else epoch_ns
        for worker in self._workers.values():
            worker.go(self._epoch_ns)
        return self._epoch_ns

    def check(self) -> None:
        """Raise WorkerError where one ended that nobody asked to."""
        for worker in self._workers.values():
            if not worker.alive and not worker.was_asked_to_end:
                worker.complain("ended by itself")

    def revive(self, number: int) -> None:
        """Start a worker that was killed anew: its clients are others by name. Idempotent."""
        if self._workers[number].alive:
            return
        self._lives[number] += 1
        worker = self._workers[number] = self._launch(number)
        worker.wait_ready()
        worker.go(self._epoch_ns)

    def wait_finished(self, timeout_s: float) -> bool:
        """Whether all clients of all of them finished in time."""
        deadline = time.monotonic() + timeout_s
        # Each is asked, also after one that has not: a failure is to be heard.
        finished = [
            worker.wait_finished(max(0.0, deadline - time.monotonic()))
            for worker in self._workers.values()
        ]
        return all(finished)

    def stop(self) -> None:
        """End all. Raises WorkerError, when all have ended, where one had failed."""
        failure: WorkerError | None = None
        for worker in self._workers.values():
            worker.resume()
            worker.ask_to_stop()
        for worker in self._workers.values():
            try:
                worker.stop()
            except WorkerError as error:
                failure = failure or error
        if failure is not None:
            raise failure

    def _launch(self, number: int) -> WorkerProcess:
        life, spec = self._lives[number], self._specs[number]
        name = f"{'final' if spec.is_final else 'load'}-{number}-{life}"
        history = self._directory / f"history-{name}.jsonl"
        clients = [
            client if life == 1 else replace(client, process=f"{client.process}~{life}")
            for client in spec.clients
        ]
        self.histories.append(history)
        history.touch()
        spec = replace(spec, clients=clients, history=str(history))
        log = self._directory / f"worker-{name}.log"
        return WorkerProcess(spec, log, self._on_progress, self._command)

    def _kill_all(self) -> None:
        for worker in self._workers.values():
            worker.kill()
