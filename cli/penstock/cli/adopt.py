"""`penstock adopt`: take the disk that was mounted for a node, where no person looks at it.

`penstock format` is for people, who know whether a disk is new. What starts nodes by itself, as a
StatefulSet does, does not: an empty disk may be a new node's, or all that is left of an old one's.
So what disks a node had is remembered outside of them.

| the directory           | the node's record names it | what is done                 |
|-------------------------|----------------------------|------------------------------|
| is this node's          | yes or no                  | nothing; it is named then    |
| is another's, nobody's  | yes or no                  | refused                      |
| is empty                | no                         | formatted, then named        |
| is empty                | yes                        | refused: the disk is lost    |

The founder's directory is formatted with the permission to found once for a cluster, which its own
record remembers: that a node's record was removed never founds a second cluster. A record is
written after what it tells was done, and before the node runs.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from penstock.cli.installation import require_broker
from penstock.cli.output import print_json
from penstock.cli.settings import NodeConfigFile, NodeOverrides, Output, resolve
from penstock.wire.errors import (
    ConfigurationError,
    DataDirectoryError,
    InconsistentClusterIdError,
)

if TYPE_CHECKING:
    from penstock.broker.config import NodeConfig
    from penstock.cli.node_records import Records

PLACEHOLDER: Final = "CHANGE-ME"
"""What deploy/ has for the id of a cluster that is not yet anybody's."""


@dataclass(frozen=True, slots=True)
class Adopted:
    """What became of a node's directories."""

    formatted: tuple[Path, ...] = ()
    may_found: bool = False


def adopt_disks(
    directories: Sequence[Path], node_id: int, cluster_id: str, *, founder: bool, records: Records
) -> Adopted:
    """Make the directories this node's, or raise where one is lost, another's or nobody's.

    The first of them is data.dir. ``founder`` is the controller that founds a new cluster.
    """
    if cluster_id == PLACEHOLDER:
        # It is never changed later, and two clusters of one id would take each other's disks.
        raise ConfigurationError(
            f"the cluster's id is {PLACEHOLDER} still; next: put one of its own in its place, from "
            "`openssl rand -hex 11`, before the first start: in cluster-id.yaml of the overlay, or "
            "as clusterId of the chart"
        )
    name, cluster = f"node-{node_id}", "cluster"
    had = _known(records, name, cluster_id)
    founds = founder and not _is_founded(records, cluster, cluster_id) and not had
    how = records.how_to_forget(name)
    formatted = [
        path
        for path in directories
        if _take(path, node_id, cluster_id, had, founds and path == directories[0], how)
    ]
    if founder and not _is_founded(records, cluster, cluster_id):
        records.write(cluster, {"cluster_id": cluster_id, "founded": True})
    names = sorted({*had, *(str(path) for path in directories)})
    if names != sorted(had):
        records.write(name, {"cluster_id": cluster_id, "directories": names})
    return Adopted(tuple(formatted), founds and directories[0] in formatted)


def _known(records: Records, name: str, cluster_id: str) -> list[str]:
    """The directories that the node had."""
    record = records.read(name)
    if record is None:
        return []
    _check_cluster(str(record["cluster_id"]), cluster_id, records.how_to_forget(name))
    return [str(path) for path in record["directories"]]


def _is_founded(records: Records, name: str, cluster_id: str) -> bool:
    record = records.read(name)
    if record is None:
        return False
    _check_cluster(str(record["cluster_id"]), cluster_id, records.how_to_forget(name))
    return True


def _check_cluster(found: str, wanted: str, how: str) -> None:
    if found != wanted:
        raise InconsistentClusterIdError(
            f"the records here are those of cluster {found}, not of {wanted}; next: give the id "
            f"of the cluster whose disks these are; where that cluster is given up for good, with "
            f"its disks, remove each of its records, as with `{how}`"
        )


def _take(  # noqa: PLR0917 - called in one place.
    path: Path, node_id: int, cluster_id: str, had: Sequence[str], founds: bool, how: str
) -> bool:
    """Make one directory the node's; whether it was formatted for that."""
    from penstock.broker.datadir import (  # noqa: PLC0415 - the broker's.
        META_FILE,
        format_directory,
        holds_data,
    )

    was_formatted = _is_there(path / META_FILE)
    if str(path) in had and not was_formatted and not holds_data(path):
        raise DataDirectoryError(
            f"{path} is empty, and node {node_id} of cluster {cluster_id} had a disk there: it is "
            "not mounted, or lost. Nothing was formatted; next: bring the disk back. Where it is "
            f"lost for good, see that no partition has its only replica in sync on node {node_id} "
            "(`penstock topics describe`), `penstock quorum remove` it if it is a controller, and "
            f"permit an empty disk with `{how}`"
        )
    # What it may do was said when it was formatted.
    may_found = founds and not was_formatted
    return format_directory(path, cluster_id, node_id, may_found=may_found)


def _is_there(file: Path) -> bool:
    try:
        file.stat()
    except FileNotFoundError:
        return False
    except OSError as error:
        raise DataDirectoryError(f"cannot read {file}: {error.strerror}") from None
    return True


def _outside(config: NodeConfig) -> list[Path]:
    """data.dir, and what is on other disks; the rest gets its identity from data.dir."""
    root = Path(config.data_dir)
    others = [*config.log_directories] if "broker" in config.roles else []
    if "controller" in config.roles:
        others.append(config.metadata_directory)
    return [root, *(path for path in others if not path.is_relative_to(root))]


def adopt(  # noqa: PLR0917 - one parameter for each option.
    ctx: typer.Context,
    cluster_id: Annotated[
        str,
        typer.Option(
            "--cluster-id", envvar="PENSTOCK_CLUSTER_ID", help="The cluster's id, on every node."
        ),
    ],
    records: Annotated[
        str,
        typer.Option(
            "--records",
            metavar="DIR|kubernetes",
            help="Where it is remembered which disks nodes had: a directory that is on none of "
            "them, or ConfigMaps of the cluster of Kubernetes in which this runs.",
        ),
    ],
    name: Annotated[
        str, typer.Option("--name", help="What ConfigMaps are named after.")
    ] = "penstock",
    config: NodeConfigFile = None,
    settings: NodeOverrides = None,
    output: Output = None,
) -> None:
    """Prepare the disk of a node that is started by itself, as by Kubernetes.

    A disk of this node is taken as it is, one of another node or cluster is refused. An empty one
    is formatted when this node never had one; else it was lost, and nothing is done. The
    controller with the least node id may found the cluster, once.
    """
    shown = resolve(ctx, None, output)
    require_broker()
    from penstock.broker.config import NodeConfig  # noqa: PLC0415 - only some commands need it.
    from penstock.cli.node_records import open_records  # noqa: PLC0415 - as above.

    node = NodeConfig.load(config, os.environ, settings or [])
    done = adopt_disks(
        _outside(node),
        node.node_id,
        cluster_id,
        founder="controller" in node.roles and node.node_id == min(node.voters),
        records=open_records(records, name),
    )
    if shown.as_json:
        print_json(
            {
                "cluster_id": cluster_id,
                "node_id": node.node_id,
                "formatted": [str(path) for path in done.formatted],
                "may_found": done.may_found,
            }
        )
        return
    for path in done.formatted:
        print(f"formatted {path}: node {node.node_id} of cluster {cluster_id}")
    if not done.formatted:
        print(f"the disk of node {node.node_id} of cluster {cluster_id} is there")
    if done.may_found:
        print("its first start may found the cluster")
