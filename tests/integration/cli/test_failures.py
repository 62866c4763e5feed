"""`penstock dev` through kills, restarts and stops: what was acknowledged is there."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.integration.cli.dev_cluster import COMMAND, DevCluster, gone
from tests.integration.cluster import environment_without_penstock
from tests.support import wait_until

pytestmark = pytest.mark.integration


@pytest.fixture
def dev(tmp_path: Path) -> Iterator[DevCluster]:
    cluster = DevCluster(tmp_path / "data", 28_500)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.close()


def lines(first: int, last: int) -> bytes:
    return b"".join(b"%d\n" % number for number in range(first, last))


def test_any_node_may_die_and_then_all_of_them(dev: DevCluster) -> None:
    dev.ok("topics", "create", "kept", "--partitions", "3", "--replication-factor", "3")
    dev.ok("topics", "create", "strict", "--config", "min.insync.replicas=3")
    dev.ok("produce", "kept", "--key-regex", "[0-9]+", stdin=lines(0, 300))
    dev.ok("consume", "kept", "--group", "g", "--from-beginning", "--max-records", "300")

    dev.ok("topics", "create", "alone", "--partitions", "3", "--replication-factor", "1")
    dev.ok("produce", "alone", "--key-regex", "[0-9]+", stdin=lines(0, 30))
    (alone,) = dev.json("topics", "describe", "alone")
    dead = next(p["partition"] for p in alone["partitions"] if p["replicas"] == [2])

    # One node dies: it is reported, and everything goes on.
    dev.node(2).kill()
    wait_until(lambda: "killed by SIGKILL" in dev.messages, "the death is reported", 10.0)
    config = dev.directory / "node-2" / "node.toml"
    assert f"penstock node --config {config}" in dev.messages
    dev.ok("produce", "kept", "--key-regex", "[0-9]+", stdin=lines(300, 600))
    assert sorted(map(int, dev.consumed("kept"))) == list(range(600))
    assert sorted(map(int, dev.consumed("kept", "--group", "g"))) == list(range(300, 600))
    dev.wait_in_sync("strict", 2)
    errors = dev.refused("produce", "strict", "--timeout", "3", stdin=b"never\n")
    assert "0 records" in errors
    assert "strict-0" in errors
    assert "min.insync.replicas" in errors
    assert "next: start the missing brokers" in errors

    # What it alone held is not taken for empty; the rest is read.
    partial = dev.run("consume", "alone", "--from-beginning", "--timeout", "3")
    assert partial.status == 1
    assert 0 < len(partial.stdout.splitlines()) < 30
    assert f"error: partition alone-{dead} has no leader" in partial.stderr
    assert "next: start the brokers that hold it: `penstock topics describe alone`" in (
        partial.stderr
    )

    # It comes back by the command that was printed, and catches up.
    restarted = subprocess.Popen(
        [*COMMAND, *("node", "--config", str(config))],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=environment_without_penstock(),
    )
    try:
        dev.wait_in_sync("kept")
        dev.wait_in_sync("strict")
        dev.ok("produce", "strict", stdin=b"now\n")
        dev.ok("produce", "kept", "--key-regex", "[0-9]+", stdin=lines(600, 900))
    finally:
        # All three at once.
        restarted.kill()
        restarted.wait()
        for node in dev.nodes():
            node.kill()
    assert dev.process.wait(20) == 1
    assert "no node is left" in dev.messages

    # The same directory, started again, has everything that was acknowledged.
    dev.start()
    assert sorted(map(int, dev.consumed("kept"))) == list(range(900))
    assert dev.consumed("strict") == ["now"]
    (group,) = dev.json("groups", "describe", "g")
    assert sum(entry["lag"] for entry in group["partitions"]) == 300
    dev.ok("produce", "kept", "--key-regex", "[0-9]+", stdin=lines(900, 910))
    assert sorted(map(int, dev.consumed("kept", "--group", "g"))) == list(range(600, 910))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_is_clean_and_the_next_start_finds_everything(
    dev: DevCluster, number: signal.Signals
) -> None:
    dev.ok("topics", "create", "kept")
    dev.ok("produce", "kept", "--key-regex", "[0-9]+", stdin=lines(0, 50))
    pids = [node.pid for node in dev.nodes()]
    assert len(pids) == 3
    first_ready = dev.bootstrap
    assert dev.stop(number) == 0
    assert not any(psutil.pid_exists(pid) for pid in pids)
    assert "Traceback" not in dev.messages
    assert all("stopped" in text for text in dev.log_tails().split("--- ")[1:])
    dev.start()
    assert dev.bootstrap == first_ready
    assert dev.consumed("kept") == [str(number) for number in range(50)]


def test_a_producer_that_waits_for_hanging_nodes_is_stopped_in_time(dev: DevCluster) -> None:
    dev.ok("topics", "create", "held")
    producer = subprocess.Popen(
        [*COMMAND, "produce", "held"],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment_without_penstock() | {"PENSTOCK_BOOTSTRAP": dev.bootstrap},
    )
    assert producer.stdin is not None
    assert producer.stderr is not None
    producer.stdin.write(b"acknowledged\n")
    producer.stdin.flush()
    wait_until(lambda: dev.consumed("held") == ["acknowledged"], "the first record is written")
    for node in dev.nodes():
        node.suspend()
    try:
        producer.stdin.write(b"on its way\n")
        producer.stdin.flush()
        # The line is in the pipe: it is read before end of input, which begins the waiting.
        producer.stdin.close()
        wait_until(lambda: _is_idle(producer.pid), "the producer waits for the nodes")
        producer.send_signal(signal.SIGINT)
        message = producer.stderr.readline()
        assert message == b"stopping: flushing 1 record, Ctrl-C again to give up\n"
        producer.send_signal(signal.SIGINT)
        summary = producer.stderr.read()
        assert summary.startswith(b"1 record, 12 B in ")
        assert summary.endswith(b"; 1 not acknowledged, which may be there or not\n")
        assert producer.wait(20) == 130
    finally:
        producer.stderr.close()
        for node in dev.nodes():
            node.resume()


def _is_idle(pid: int) -> bool:
    """Whether a process has read all of its standard input and waits."""
    used = psutil.Process(pid).cpu_times().user
    time.sleep(0.3)  # What is used meanwhile is the measurement.
    return psutil.Process(pid).cpu_times().user - used < 0.02


def test_nodes_end_with_a_killed_parent(dev: DevCluster) -> None:
    pids = [node.pid for node in dev.nodes()]
    assert len(pids) == 3
    dev.process.kill()
    dev.process.wait()
    wait_until(lambda: all(gone(pid) for pid in pids), "the nodes end with their parent", 30.0)


def test_a_node_that_cannot_start_shows_why(tmp_path: Path) -> None:
    cluster = DevCluster(tmp_path / "data", 28_500)
    cluster.start()
    assert cluster.stop() == 0
    with (cluster.directory / "node-3" / "node.toml").open("a") as file:
        file.write('flush.polcy = "os"\n')
    result = cluster.run("dev", "--data-dir", str(cluster.directory))
    errors = result.stderr
    assert result.status == 1
    assert result.stdout == ""
    assert "node 3 (pid " in errors
    assert "unknown setting 'flush.polcy'; did you mean 'flush.policy'?" in errors


@pytest.fixture
def hangups_end() -> Iterator[None]:
    """SIGHUP as it is by default, for processes started meanwhile: under nohup it is ignored."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("hangups_end")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_one_node_alone_is_a_cluster_in_a_directory_that_goes(
    tmp_path: Path, number: signal.Signals
) -> None:
    cluster = DevCluster(tmp_path / "unused", 28_500)
    with subprocess.Popen(
        [*COMMAND, "dev", "--nodes", "1", "--base-port", str(cluster.base_port)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment_without_penstock() | {"TMPDIR": str(tmp_path)},
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready: 127.0.0.1:%d\n" % cluster.base_port
        (directory,) = tmp_path.glob("penstock-dev-*")
        cluster.bootstrap = f"127.0.0.1:{cluster.base_port}"
        cluster.ok("topics", "create", "small")
        cluster.ok("produce", "small", stdin=b"one\n")
        assert cluster.consumed("small", "--group", "g", "--max-records", "1") == ["one"]
        process.send_signal(number)
        _, errors = process.communicate(timeout=30)
    assert process.returncode == 0
    assert str(directory).encode() in errors
    assert not directory.exists()
