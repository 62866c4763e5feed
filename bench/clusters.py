"""Local clusters for benchmarks: real node processes in a directory that is gone afterwards."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from penstock.cli.cluster_layout import find_base_port, prepare_layout
from penstock.cli.local_cluster import LocalCluster

_FIRST_PORT: Final = 25_000


@contextmanager
def local_cluster(nodes: int, settings: Mapping[str, str]) -> Iterator[tuple[LocalCluster, Path]]:
    """So many nodes that are ready, and a directory for what else is written.

    Both go at the end. TMPDIR chooses the disk.
    """
    work = Path(tempfile.mkdtemp(prefix="penstock-bench-"))
    try:
        layout = prepare_layout(
            work / "cluster",
            nodes=nodes,
            base_port=find_base_port(nodes, first=_FIRST_PORT),
            settings=settings,
        )
        with LocalCluster(layout) as cluster:
            cluster.start()
            cluster.wait_ready()
            yield cluster, work
    finally:
        shutil.rmtree(work, ignore_errors=True)


def node_pids(cluster: LocalCluster) -> list[int]:
    """The processes of all nodes."""
    return [cluster.pid(plan.node_id) for plan in cluster.layout.plans]
