"""What a commit costs in the metadata quorum: time, CPU, and writes to the disk.

Three voters, each a process with its own journal on this disk (every commit is fdatasync-ed on a
majority before it is one), speaking gRPC over loopback. Commands of 100 bytes are proposed in
the leader: by one client that waits for each, and by 64 and 1,000 at once; over plain
connections, then over mutual TLS. The median of the rounds counts. Exit status 1 when a goal is
missed.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from children import HOST, Child, cpu_seconds, free_ports, percentile, stopping

from penstock.cli.certificates import Authority, issue_node, write_files
from penstock.cli.output import print_json, print_table

CLUSTER_ID: Final = "bench"
VOTERS: Final = 3
GOAL_P50_MS: Final = 3.0
GOAL_P99_MS: Final = 30.0
GOAL_COMMITS_A_SECOND: Final = 15_000
_PATIENCE_SECONDS: Final = 30.0


@dataclass(frozen=True, slots=True)
class Round:
    """One round of load. The CPU is that of all voters, the syncs are the leader's."""

    tls: bool
    clients: int
    commits_a_second: float
    p50_ms: float
    p99_ms: float
    cpu_us_a_commit: float
    syncs_a_commit: float


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 64, 1000])
    parser.add_argument("--tls", choices=["off", "on", "both"], default="both")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    options = parser.parse_args(arguments)
    rounds = []
    for tls in {"off": [False], "on": [True], "both": [False, True]}[options.tls]:
        rounds += run(options.clients, options.rounds, options.seconds, tls=tls)
    return show(rounds, as_json=options.json)


def run(clients: Sequence[int], rounds: int, seconds: float, *, tls: bool) -> list[Round]:
    """All rounds on one quorum."""
    work = Path(tempfile.mkdtemp(prefix="penstock-bench-"))
    children: dict[int, Child] = {}
    try:
        with stopping(children.values()):
            children.update(start(work, tls=tls))
            return [
                measure(children, count, seconds, tls=tls)
                for _ in range(rounds)
                for count in clients
            ]
    finally:
        shutil.rmtree(work, ignore_errors=True)


def start(directory: Path, *, tls: bool) -> dict[int, Child]:
    """Three voters, one of which leads when this returns."""
    ports = dict(enumerate(free_ports(VOTERS), start=1))
    voters = {str(node): [HOST, port] for node, port in ports.items()}
    authority = Authority()

    def credentials(node: int) -> list[str] | None:
        if not tls:
            return None
        issued = issue_node(authority, node, CLUSTER_ID, [HOST])
        files = write_files(directory, f"voter-{node}", authority, issued)
        return [str(files.ca), str(files.certificate), str(files.key)]

    children = {
        node: Child(
            "voter.py",
            {
                "node_id": node,
                "cluster_id": CLUSTER_ID,
                "data_dir": str(directory / f"voter-{node}"),
                "listen": [HOST, port],
                "voters": voters,
                "tls": credentials(node),
            },
            directory / f"voter-{node}.log",
        )
        for node, port in ports.items()
    }
    find_leader(children)
    return children


def find_leader(children: dict[int, Child]) -> int:
    """Who all voters agree leads."""
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while time.monotonic() < deadline:
        leaders = {child.ask("status")["leader"] for child in children.values()}
        if len(leaders) == 1 and -1 not in leaders:
            return int(leaders.pop())
        time.sleep(0.1)
    raise SystemExit(f"no leader within {_PATIENCE_SECONDS:.0f} s")


def measure(children: dict[int, Child], clients: int, seconds: float, *, tls: bool) -> Round:
    """One round of load in the leader."""
    leader = children[find_leader(children)]
    pids = [child.pid for child in children.values()]
    leader.ask("load", clients=clients, seconds=min(1.0, seconds))  # Warm.
    syncs, cpu = leader.ask("status")["syncs"], cpu_seconds(pids)
    answer = leader.ask("load", clients=clients, seconds=seconds)
    cpu = cpu_seconds(pids) - cpu
    syncs = leader.ask("status")["syncs"] - syncs
    latencies = answer["latencies_ms"]
    return Round(
        tls=tls,
        clients=clients,
        commits_a_second=len(latencies) / answer["seconds"],
        p50_ms=statistics.median(latencies),
        p99_ms=percentile(latencies, 99),
        cpu_us_a_commit=cpu / len(latencies) * 1e6,
        syncs_a_commit=syncs / len(latencies),
    )


def summarise(rounds: Sequence[Round]) -> list[Round]:
    """The median of each figure for each kind of connection and number of clients."""
    medians = []
    for tls, clients in sorted({(each.tls, each.clients) for each in rounds}):
        group = [each for each in rounds if (each.tls, each.clients) == (tls, clients)]
        figures = {
            name: statistics.median(getattr(each, name) for each in group)
            for name in Round.__slots__[2:]
        }
        medians.append(Round(tls, clients, **figures))
    return medians


def show(rounds: Sequence[Round], *, as_json: bool) -> int:
    """Print the medians; the exit status."""
    medians = summarise(rounds)
    missed = []
    for each in medians:
        secured = " over TLS" if each.tls else ""
        if each.clients == 1 and (each.p50_ms > GOAL_P50_MS or each.p99_ms > GOAL_P99_MS):
            missed.append(f"1 client{secured}: {GOAL_P50_MS:g} / {GOAL_P99_MS:g} ms")
        if each.clients >= 1000 and each.commits_a_second < GOAL_COMMITS_A_SECOND:
            missed.append(f"{each.clients} clients{secured}: {GOAL_COMMITS_A_SECOND} commits/s")
    if as_json:
        print_json(
            {
                "medians": [asdict(each) for each in medians],
                "rounds": [asdict(each) for each in rounds],
                "missed": missed,
            }
        )
    else:
        columns = (
            "TLS",
            "Clients",
            "Commits/s",
            "p50 ms",
            "p99 ms",
            "CPU µs a commit",
            "Syncs a commit",
        )
        print_table(
            columns,
            [
                (
                    "mutual" if each.tls else "no",
                    each.clients,
                    f"{each.commits_a_second:.0f}",
                    f"{each.p50_ms:.2f}",
                    f"{each.p99_ms:.2f}",
                    f"{each.cpu_us_a_commit:.0f}",
                    f"{each.syncs_a_commit:.3f}",
                )
                for each in medians
            ],
            title="commits of 100 bytes by three fsyncing voters",
            right=columns[1:],
        )
        for goal in missed:
            print(f"missed: {goal}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
