"""Three nodes, a killed leader, and whether all lines of an access log arrived exactly once."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from penstock.cli.demo.access_log import SAMPLE, count_with_awk, read_lines
from penstock.cli.demo.members import Members
from penstock.cli.demo.report import Report, print_report, say, start_clock
from penstock.cli.demo.stage import run_in_temporary, three_nodes, wait_until
from penstock.cli.demo.verdict import judge, standstill_seconds
from penstock.cli.demo.writer import Writer
from penstock.cli.errors import report
from penstock.cli.groups import partition_lags
from penstock.cli.installation import require_broker
from penstock.cli.local_cluster import LocalCluster
from penstock.client import AdminClient
from penstock.wire.errors import RequestTimedOutError

TOPIC: Final = "access-log"
GROUP: Final = "demo"
PARTITIONS: Final = 6
REPLICAS: Final = 3
MIN_ISR: Final = 2
MEMBERS: Final = ("member-1", "member-2")


@dataclass(frozen=True, slots=True)
class Kill:
    """The node that was killed, what it led, and when."""

    node_id: int
    partitions: tuple[int, ...]
    was_controller: bool
    at: float


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo; the exit status."""
    parser = argparse.ArgumentParser(
        prog="penstock demo",
        description="Send an access log through three nodes, one of which is killed.",
    )
    parser.add_argument("--data", type=Path, default=SAMPLE, help="a gzip access log")
    options = parser.parse_args(arguments)
    require_broker()
    return run_in_temporary(lambda work: run(options.data, work))


def run(data: Path, work: Path) -> bool:
    """Everything from the first node to the table; whether all lines arrived exactly once."""
    start_clock()
    lines = read_lines(data)
    expected, counted_by = count_with_awk(data, work)
    say(f"{len(lines):,} lines in {data.name}")
    with (
        three_nodes(work) as cluster,
        AdminClient(cluster.bootstrap, client_id="demo-admin") as admin,
    ):
        admin.create_topic(TOPIC, PARTITIONS, REPLICAS, {"min.insync.replicas": str(MIN_ISR)})
        say(f"topic {TOPIC}: {PARTITIONS} partitions, {REPLICAS} replicas, min ISR {MIN_ISR}")
        with Members(cluster.bootstrap, TOPIC, GROUP, MEMBERS) as members:
            wait_until(lambda: _unshared(admin), "both members to have their partitions")
            say("two members share the partitions")
            with Writer(cluster.bootstrap, TOPIC) as writer:
                kill = _write_and_kill(cluster, admin, writer, lines)
            sent = writer.sent()
            for failure in writer.failures()[:3]:
                report(f"not delivered: {failure}")
            wait_until(lambda: _out_of_sync(admin), f"node {kill.node_id} to be in sync again")
            say(f"node {kill.node_id} is in sync again")
            wait_until(lambda: _unread(admin, members, len(sent)), "everything to be read")
            say("everything was read and committed")
        reads = members.reads()
    verdict = judge(lines, sent, reads, expected)
    stood_still = standstill_seconds(sent, kill.partitions, kill.at)
    print_report(Report(verdict, kill.node_id, kill.was_controller, stood_still, counted_by))
    return verdict.ok


def _write_and_kill(
    cluster: LocalCluster, admin: AdminClient, writer: Writer, lines: Sequence[str]
) -> Kill:
    """Write all lines; kill a leader after half of them, start it again after most of them."""
    half, most = len(lines) // 2, len(lines) * 9 // 10
    writer.send(lines, 0, half, lambda _done: None)
    kill = _kill_leader(cluster, admin)
    say(
        f"killed node {kill.node_id} (SIGKILL) after {half:,} lines; it led partitions "
        + ", ".join(map(str, kill.partitions))
        + (" and was the active controller" if kill.was_controller else "")
    )
    writer.send(lines, half, most, lambda _done: None)
    cluster.start_node(kill.node_id)
    say(f"started node {kill.node_id} again after {most:,} lines")
    writer.send(lines, most, len(lines), lambda _done: None)
    writer.flush()
    say(f"{len(writer.sent()):,} lines are acknowledged")
    return kill


def _kill_leader(cluster: LocalCluster, admin: AdminClient) -> Kill:
    """Kill the leader of partition 0."""
    (topic,) = admin.describe_topics([TOPIC])
    leader = topic.partitions[0].leader
    controller = admin.describe_cluster().controller_id
    led = tuple(entry.partition for entry in topic.partitions if entry.leader == leader)
    at = time.monotonic()
    cluster.kill_node(leader)
    return Kill(leader, led, controller == leader, at)


def _unshared(admin: AdminClient) -> str:
    """What is missing until both members hold partitions and all partitions are held."""
    if GROUP not in {group.group_id for group in admin.list_groups()}:
        return "there is no group yet"
    (group,) = admin.describe_groups([GROUP])
    held = [len(member.assigned) for member in group.members]
    if group.state == "stable" and len(held) == len(MEMBERS) and sum(held) == PARTITIONS:
        return ""
    return f"the group is {group.state}; its members hold {held} partitions"


def _out_of_sync(admin: AdminClient) -> str:
    """Partitions that lack an in-sync replica; empty when none does."""
    (topic,) = admin.describe_topics([TOPIC])
    return ", ".join(
        f"partition {entry.partition} has only {list(entry.isr)} in sync"
        for entry in topic.partitions
        if len(entry.isr) < REPLICAS
    )


def _unread(admin: AdminClient, members: Members, acknowledged: int) -> str:
    """What the members still have to print or to commit; empty when there is nothing.

    After that nothing is left that could be read twice.
    """
    if ended := members.ended():
        raise RequestTimedOutError(f"{', '.join(ended)} ended before everything was read")
    if members.count() < acknowledged:
        return f"{members.count():,} of {acknowledged:,} lines were read"
    (group,) = admin.describe_groups([GROUP])
    behind = [lag for lag in partition_lags(admin, group) if lag.lag != 0]
    return ", ".join(
        f"partition {lag.partition} is committed up to {lag.committed_offset} of "
        f"{lag.log_end_offset}"
        for lag in behind
    )
