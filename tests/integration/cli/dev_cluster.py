"""`penstock dev` as a user runs it, and the other commands from a second terminal."""

from __future__ import annotations

import json
import selectors
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import psutil
from typer.testing import CliRunner

from penstock.cli.app import app
from penstock.cli.cluster_layout import find_base_port
from tests.integration.cluster import environment_without_penstock
from tests.support import wait_until

COMMAND = [sys.executable, "-m", "penstock.cli"]
READY_S = 40.0


class Finished(NamedTuple):
    """How a command ended."""

    status: int
    stdout: str
    stderr: str


class DevCluster:
    """One directory with its `penstock dev`, started and stopped as often as a test wants."""

    def __init__(self, directory: Path, first_port: int) -> None:
        self.directory = directory
        self.base_port = find_base_port(3, first=first_port)
        self.bootstrap = ""
        self._process: subprocess.Popen[bytes] | None = None
        self._messages = directory.with_name(f"{directory.name}-dev.err")

    @property
    def process(self) -> subprocess.Popen[bytes]:
        assert self._process is not None
        return self._process

    @property
    def messages(self) -> str:
        """Everything that `penstock dev` wrote to standard error."""
        return self._messages.read_text(errors="replace")

    def start(self, *options: str) -> str:
        """Run `penstock dev`; the one line that it prints."""
        self._close_output()
        with self._messages.open("ab") as errors:
            self._process = subprocess.Popen(
                [
                    *COMMAND,
                    *("dev", "--data-dir", str(self.directory)),
                    *self._port_option(),
                    *options,
                ],
                stdout=subprocess.PIPE,
                stderr=errors,
                env=environment_without_penstock(),
            )
        line = self._read_line(READY_S)
        assert line.startswith("ready: "), f"{line!r}\n{self.messages}\n{self.log_tails()}"
        self.bootstrap = line.removeprefix("ready: ").strip()
        return line

    def _port_option(self) -> list[str]:
        return [] if self.directory.exists() else ["--base-port", str(self.base_port)]

    def _read_line(self, timeout_s: float) -> str:
        assert self.process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            if not selector.select(timeout_s):
                raise AssertionError(
                    f"no line within {timeout_s} s\n{self.messages}\n{self.log_tails()}"
                )
        return self.process.stdout.readline().decode()

    def node(self, node_id: int) -> psutil.Process:
        """The process of a node that `penstock dev` started."""
        config = str(self.directory / f"node-{node_id}" / "node.toml")
        for child in psutil.Process(self.process.pid).children():
            if config in child.cmdline():
                return child
        raise AssertionError(f"node {node_id} does not run under penstock dev")

    def nodes(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children()

    def stop(self, number: signal.Signals = signal.SIGINT) -> int:
        """End `penstock dev`; its exit status."""
        self.process.send_signal(number)
        status = self.process.wait(30)
        self._close_output()
        return status

    def close(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self.stop()
        self._close_output()

    def _close_output(self) -> None:
        if self._process is not None and self._process.stdout is not None:
            self._process.stdout.close()

    def run(self, *arguments: str, stdin: bytes = b"") -> Finished:
        """One `penstock` command, as from a second terminal.

        It runs in this process, which saves Python's start, unless it makes a node of it.
        """
        environment = {"PENSTOCK_BOOTSTRAP": self.bootstrap}
        if arguments[0] in ("dev", "node"):
            result = subprocess.run(
                [*COMMAND, *arguments],
                input=stdin,
                capture_output=True,
                timeout=60,
                env=environment_without_penstock() | environment,
                check=False,
            )
            return Finished(result.returncode, result.stdout.decode(), result.stderr.decode())
        done = CliRunner().invoke(app, arguments, input=stdin, env=environment)
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            raise done.exception
        return Finished(done.exit_code, done.stdout, done.stderr)

    def ok(self, *arguments: str, stdin: bytes = b"") -> str:
        """The same, for a command that must succeed; its standard output."""
        result = self.run(*arguments, stdin=stdin)
        assert result.status == 0, (
            f"{' '.join(arguments)}: status {result.status}\n"
            f"{result.stdout}\n{result.stderr}\n{self.log_tails()}"
        )
        return result.stdout

    def json(self, *arguments: str) -> Any:
        return json.loads(self.ok(*arguments, "--output", "json"))

    def refused(self, *arguments: str, stdin: bytes = b"", status: int = 1) -> str:
        """The same, for a command that must fail; its standard error."""
        result = self.run(*arguments, stdin=stdin)
        assert result.status == status, result.stderr
        assert "Traceback" not in result.stderr
        return result.stderr

    def consumed(self, topic: str, *options: str) -> list[str]:
        """The values of a topic from its beginning."""
        return self.ok(
            "consume", topic, "--from-beginning", "--timeout", "2", *options
        ).splitlines()

    def wait_in_sync(self, topic: str, replicas: int = 3) -> None:
        """Wait until every partition has so many replicas in sync."""
        wait_until(
            lambda: all(
                len(partition["isr"]) == replicas
                for partition in self.json("topics", "describe", topic)[0]["partitions"]
            ),
            f"{topic} has {replicas} replicas in sync",
            30.0,
        )

    def log_tails(self) -> str:
        parts = []
        for log in sorted(self.directory.glob("node-*/node.log")):
            lines = log.read_text(errors="replace").splitlines()
            parts.append("\n".join([f"--- {log.parent.name}", *lines[-15:]]))
        return "\n".join(parts)


def gone(pid: int) -> bool:
    """Whether a process has ended, though its parent may not have heard yet."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
