"""Node processes of a local cluster: started, watched, stopped. The nodes here are stand-ins."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from penstock.cli import local_cluster
from penstock.cli.cluster_layout import NodePlan, find_base_port, prepare_layout
from penstock.cli.errors import explain
from penstock.cli.local_cluster import LocalCluster, read_tail
from penstock.wire.errors import AddressInUseError, RequestTimedOutError, UnknownServerError
from tests.support import wait_until

OBEDIENT = "import signal; print('up', flush=True); signal.sigwait({signal.SIGTERM})"
STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    "print('up', flush=True); time.sleep(60)"
)
DYING = "import sys; print('first'); print('error: the disk is upside down'); sys.exit(2)"


def cluster(directory: Path, *programs: str) -> LocalCluster:
    """A cluster whose node i runs ``programs[i - 1]`` instead of a broker."""
    nodes = len(programs)
    layout = prepare_layout(directory, nodes=nodes, base_port=find_base_port(nodes, first=26_000))

    def command(plan: NodePlan) -> list[str]:
        return [sys.executable, "-c", programs[plan.node_id - 1]]

    return LocalCluster(layout, command)


def wait_for(holds: Callable[[], bool]) -> None:
    wait_until(holds, "the nodes did what was expected")


def up(nodes: LocalCluster) -> bool:
    return all("up" in read_tail(plan.log_path, 5) for plan in nodes.layout.plans)


def test_nodes_run_and_stop_cleanly(tmp_path: Path) -> None:
    with cluster(tmp_path, OBEDIENT, OBEDIENT) as nodes:
        nodes.start()
        wait_for(lambda: up(nodes))
        assert nodes.running == [1, 2]
        pids = [nodes.pid(1), nodes.pid(2)]
        assert nodes.stop() == []
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_a_node_that_does_not_stop_is_killed(tmp_path: Path) -> None:
    with cluster(tmp_path, OBEDIENT, STUBBORN) as nodes:
        nodes.start()
        wait_for(lambda: up(nodes))
        assert nodes.stop(timeout_seconds=0.2) == [2]


def test_nodes_are_apart_from_the_terminal(tmp_path: Path) -> None:
    with cluster(tmp_path, OBEDIENT) as nodes:
        nodes.start()
        assert os.getpgid(nodes.pid(1)) == nodes.pid(1) != os.getpgid(0)


def test_a_node_that_ends_at_start_shows_the_end_of_its_log(tmp_path: Path) -> None:
    with cluster(tmp_path, OBEDIENT, DYING) as nodes:
        nodes.start()
        with pytest.raises(UnknownServerError) as caught:
            nodes.wait_ready(20)
    first, *log, step = explain(caught.value).splitlines()
    assert first.startswith("error: node 2 (pid ")
    assert "ended: exit status 2" in first
    assert log == ["  first", "  error: the disk is upside down"]
    assert step.startswith("next: ")


def test_a_cluster_that_does_not_become_ready_says_what_is_missing(tmp_path: Path) -> None:
    heard: list[str] = []
    with cluster(tmp_path, OBEDIENT) as nodes:
        nodes.start()
        with pytest.raises(RequestTimedOutError, match=r"node 1 does not answer at 127.0.0.1"):
            nodes.wait_ready(0.1, on_wait=heard.append)
    assert len(heard) == 1


def test_a_killed_node_is_reported_once(tmp_path: Path) -> None:
    with cluster(tmp_path, OBEDIENT, OBEDIENT) as nodes:
        nodes.start()
        wait_for(lambda: up(nodes))
        assert list(nodes.take_exits()) == []
        os.kill(nodes.pid(1), signal.SIGKILL)
        wait_for(lambda: nodes.running == [2])
        (ended,) = nodes.take_exits()
        assert (ended.plan.node_id, ended.how) == (1, "killed by SIGKILL")
        assert "killed by SIGKILL" in nodes.explain_exit(ended)
        assert list(nodes.take_exits()) == []


def test_a_node_that_we_killed_is_no_news_and_starts_again(tmp_path: Path) -> None:
    with cluster(tmp_path, OBEDIENT) as nodes:
        nodes.start()
        nodes.kill_node(1)
        assert list(nodes.take_exits()) == []
        assert nodes.running == []
        nodes.start_node(1)
        assert nodes.running == [1]


def test_nothing_starts_when_a_port_is_taken(tmp_path: Path) -> None:
    with cluster(tmp_path, OBEDIENT) as nodes:
        port = nodes.layout.plans[0].broker_port
        with socket.create_server(("127.0.0.1", port)):
            with pytest.raises(AddressInUseError, match=f"port {port} "):
                nodes.start()
            assert nodes.running == []


def test_the_environment_of_a_node_states_nothing_that_its_file_states(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_NODE_ID", "77")
    monkeypatch.setenv("PENSTOCK_BOOTSTRAP", "elsewhere:1")
    monkeypatch.setenv("PENSTOCK_LOG_LEVEL", "debug")
    layout = prepare_layout(tmp_path, nodes=1, base_port=find_base_port(1, first=26_000))
    environment = local_cluster._node_environment(layout.environment_names)
    assert "PENSTOCK_NODE_ID" not in environment
    assert "PENSTOCK_BOOTSTRAP" not in environment
    assert environment["PENSTOCK_LOG_LEVEL"] == "debug"


def test_a_node_ends_with_the_process_that_started_it() -> None:
    child = "from penstock.cli.child import watch_parent as w; import time; w(); time.sleep(60)"
    parent = (
        "import subprocess, sys, time\n"
        f"child = subprocess.Popen([sys.executable, '-c', {child!r}], stdin=subprocess.PIPE)\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        assert psutil.pid_exists(pid)
        process.kill()
    wait_for(lambda: not _lives(pid))


def _lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_stopping_does_not_wait_for_nodes_one_after_the_other(tmp_path: Path) -> None:
    with cluster(tmp_path, STUBBORN, STUBBORN, STUBBORN) as nodes:
        nodes.start()
        wait_for(lambda: up(nodes))
        begun = time.monotonic()
        assert nodes.stop(timeout_seconds=3.0) == [1, 2, 3]
        assert time.monotonic() - begun < 9.0, "one after the other takes no less"
