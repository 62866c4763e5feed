"""A cluster of real node processes on this machine: its directories, its ports, its processes.

``penstock dev``, the demo and the benchmarks stand on it. Nothing here restarts a node by
itself: who wants that calls :meth:`LocalCluster.start_node`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Final

from penstock.cli.cluster_layout import ClusterLayout, NodePlan, check_ports
from penstock.cli.readiness import describe_unready
from penstock.wire.errors import RequestTimedOutError, UnknownServerError

READY_TIMEOUT_SECONDS: Final = 60.0
STOP_TIMEOUT_SECONDS: Final = 20.0
_POLL_SECONDS: Final = 0.05
_TAIL_LINES: Final = 20


@dataclass(frozen=True, slots=True)
class NodeExit:
    """A node process that ended without being asked to."""

    plan: NodePlan
    pid: int
    returncode: int

    @property
    def how(self) -> str:
        """``killed by SIGKILL`` or ``exit status 1``."""
        if self.returncode >= 0:
            return f"exit status {self.returncode}"
        try:
            return f"killed by {signal.Signals(-self.returncode).name}"
        except ValueError:
            return f"killed by signal {-self.returncode}"


@dataclass(slots=True)
class _Child:
    plan: NodePlan
    process: subprocess.Popen[bytes]
    output: IO[bytes]
    stopping: bool = field(default=False)


def node_command_of(plan: NodePlan) -> list[str]:
    """`penstock.broker` as a process that ends with ours."""
    return [sys.executable, "-m", "penstock.cli.child", "--config", str(plan.config_path)]


class LocalCluster:
    """The nodes of one directory, run as children of this process.

    Use as a context manager: leaving it stops every node, by force where it must. The children
    also stop when this process dies. Not safe to share between threads.
    """

    def __init__(
        self,
        layout: ClusterLayout,
        node_command: Callable[[NodePlan], list[str]] = node_command_of,
        environment: Callable[[NodePlan], Mapping[str, str]] = lambda _plan: {},
    ) -> None:
        self.layout = layout
        self._node_command = node_command
        self._environment = environment
        self._children: dict[int, _Child] = {}

    def __enter__(self) -> LocalCluster:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.stop()

    @property
    def bootstrap(self) -> str:
        """Every broker's address, with commas, as clients are told."""
        return ",".join(plan.advertised for plan in self.layout.plans)

    @property
    def running(self) -> list[int]:
        """The ids of nodes whose process lives."""
        return [
            node_id for node_id, child in self._children.items() if child.process.poll() is None
        ]

    def pid(self, node_id: int) -> int:
        """The process id of a node that was started."""
        return self._children[node_id].process.pid

    def start(self) -> None:
        """Start every node that does not run. Raises AddressInUseError before starting any."""
        missing = [plan for plan in self.layout.plans if plan.node_id not in self.running]
        check_ports(missing)
        for plan in missing:
            self.start_node(plan.node_id)

    def wait_end(self, node_id: int) -> None:
        """Return when a node that was killed has ended; for as long as it takes."""
        self._children[node_id].process.wait()

    def start_node(self, node_id: int) -> None:
        """Start one node; its output is appended to its ``node.log``."""
        plan = self.layout.plan(node_id)
        self._close_output(node_id)
        output = plan.log_path.open("ab")
        process = subprocess.Popen(  # noqa: S603 - our own module, by our own interpreter.
            self._node_command(plan),
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**_node_environment(self.layout.environment_names), **self._environment(plan)},
            # A group of its own: Ctrl-C in the terminal reaches us alone, and we stop the nodes.
            process_group=0,
        )
        self._children[node_id] = _Child(plan, process, output)

    def wait_ready(
        self,
        timeout_seconds: float = READY_TIMEOUT_SECONDS,
        *,
        on_wait: Callable[[str], None] = lambda _reason: None,
    ) -> None:
        """Return when every broker knows an active controller and every broker as unfenced.

        ``on_wait`` hears what is still missing each time that it changes. Raises
        UnknownServerError, with the end of its log as a note, when a node ends meanwhile, and
        RequestTimedOutError that says what is missing when the time is over.
        """
        deadline = time.monotonic() + timeout_seconds
        last_reason = ""
        while True:
            for ended in self.take_exits():
                headline, *log = self.explain_exit(ended).splitlines()
                failure = UnknownServerError(headline)
                for line in log:
                    failure.add_note(line)
                raise failure
            reason = describe_unready(self.layout.plans, self.layout.client_tls)
            if not reason:
                return
            if reason != last_reason:
                on_wait(reason)
                last_reason = reason
            if time.monotonic() > deadline:
                raise RequestTimedOutError(
                    f"the cluster is not ready after {timeout_seconds:.0f} s: {reason}; "
                    f"see {self.layout.directory}/node-*/node.log"
                )
            time.sleep(_POLL_SECONDS)

    def take_exits(self) -> Iterator[NodeExit]:
        """The nodes that ended by themselves since the last call, each once."""
        for node_id, child in list(self._children.items()):
            returncode = child.process.poll()
            if returncode is None or child.stopping:
                continue
            self._close_output(node_id)
            del self._children[node_id]
            yield NodeExit(child.plan, child.process.pid, returncode)

    def explain_exit(self, ended: NodeExit) -> str:
        """What ended, how, and the end of its log, for a person to read."""
        message = f"node {ended.plan.node_id} (pid {ended.pid}) ended: {ended.how}"
        if ended.returncode > 0:
            message += f"; the end of {ended.plan.log_path}:"
            for line in read_tail(ended.plan.log_path, _TAIL_LINES).splitlines():
                message += f"\n  {line}"
        return message

    def kill_node(self, node_id: int, signal_number: int = signal.SIGKILL) -> None:
        """Send a signal to one node and, when it is SIGKILL, wait until it is gone."""
        child = self._children[node_id]
        child.stopping = True
        child.process.send_signal(signal_number)
        if signal_number == signal.SIGKILL:
            child.process.wait()
            self._close_output(node_id)

    def stop_node(self, node_id: int, timeout_seconds: float = STOP_TIMEOUT_SECONDS) -> bool:
        """Stop one node cleanly, or by force after the time; whether it stopped by itself."""
        child = self._children[node_id]
        child.stopping = True
        child.process.terminate()
        try:
            child.process.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            self.kill_node(node_id)
            return False
        self._close_output(node_id)
        return True

    def stop(self, timeout_seconds: float = STOP_TIMEOUT_SECONDS) -> list[int]:
        """Stop every node cleanly; the ids of those that had to be killed after the time.

        All are asked at once, so that they need not wait for one another's timeouts.
        """
        for child in self._children.values():
            child.stopping = True
            child.process.terminate()
        deadline = time.monotonic() + timeout_seconds
        forced: list[int] = []
        try:
            for node_id, child in self._children.items():
                try:
                    child.process.wait(max(0.0, deadline - time.monotonic()))
                except subprocess.TimeoutExpired:
                    forced.append(node_id)
        finally:
            # Also when a second Ctrl-C ends the waiting: nobody is left behind.
            for child in self._children.values():
                child.process.kill()
                child.process.wait()
            for node_id in list(self._children):
                self._close_output(node_id)
            self._children.clear()
        return forced

    def _close_output(self, node_id: int) -> None:
        child = self._children.get(node_id)
        if child is None:
            return
        child.output.close()
        if child.process.stdin is not None:
            with contextlib.suppress(OSError):
                child.process.stdin.close()


def read_tail(path: Path, lines: int) -> str:
    """The last ``lines`` lines of a log; empty when there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 65_536))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    return "\n".join(text.splitlines()[-lines:])


def _node_environment(stated: frozenset[str]) -> Mapping[str, str]:
    """Our environment without what each node's own file states: the file must win there."""
    return {name: value for name, value in os.environ.items() if name not in stated}
