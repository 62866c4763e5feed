"""Where the nodes of a local cluster live: directories, addresses, and each node's file."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

from penstock.broker.datadir import (
    META_FILE,
    DirectoryUnreadableError,
    format_directory,
    lock_directory,
    new_cluster_id,
)
from penstock.cli.certificates import files_in, make_cluster_files
from penstock.raft_meta.exposure import TlsFiles
from penstock.wire.errors import (
    AddressInUseError,
    ConfigurationError,
    DataDirectoryError,
)
from penstock.wire.transport import format_address

HOST: Final = "127.0.0.1"
DEFAULT_NODES: Final = 3
DEFAULT_BASE_PORT: Final = 9092
CONTROLLER_PORT_DISTANCE: Final = 1000
FRAMES_PORT_DISTANCE: Final = 2000
"""Where followers are served has a port that is known only in a cluster behind another host."""
MAX_NODES: Final = 99
_CLUSTER_FILE: Final = "cluster.json"
_TLS_DIRECTORY: Final = "tls"
_USUAL_REPLICATION: Final = 3
_HIGHEST_PORT: Final = 65_535
_HEADER: Final = """\
# Written by `penstock dev` when the directory was made. Add settings of your own; a later start
# keeps them, and rewrites this file only to move the node to other ports.
"""


@dataclass(frozen=True, slots=True)
class NodePlan:
    """One node of a local cluster."""

    node_id: int
    directory: Path
    broker_port: int
    controller_port: int
    advertised_host: str = HOST
    """Where others are told that it is. Whoever names another host passes on what comes there, to
    the same ports of ``host``."""
    has_files_beside: bool = False
    """Its settings and its log are beside its directory, which can then be lost without them."""
    host: str = HOST
    """Where it listens. Another host than HOST is in a network namespace of the node's own."""

    @property
    def address(self) -> str:
        """Where its broker listens."""
        return format_address(self.host, self.broker_port)

    @property
    def advertised(self) -> str:
        """Where clients are told to reach it."""
        return format_address(self.advertised_host, self.broker_port)

    @property
    def is_behind_another(self) -> bool:
        """Whether it is reached at another host than it listens at."""
        return self.advertised_host != self.host

    @property
    def frames_port(self) -> int:
        """Where it serves followers, if it is reached at another host; else they are told."""
        return self.broker_port + FRAMES_PORT_DISTANCE

    @property
    def config_path(self) -> Path:
        """Its settings."""
        return self._file("toml")

    @property
    def log_path(self) -> Path:
        """What the process prints."""
        return self._file("log")

    def _file(self, suffix: str) -> Path:
        if self.has_files_beside:
            return self.directory.with_name(f"{self.directory.name}.{suffix}")
        return self.directory / f"node.{suffix}"


@dataclass(frozen=True, slots=True)
class _ClusterFile:
    """What ``cluster.json`` holds; ``complete`` once every node's directory was formatted."""

    cluster_id: str
    nodes: int
    base_port: int
    complete: bool = False
    tls: bool = False
    advertised_host: str = HOST
    has_files_beside: bool = False
    hosts: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class ClusterLayout:
    """A directory with the nodes of one cluster, ready to be started."""

    directory: Path
    cluster_id: str
    plans: tuple[NodePlan, ...]
    environment_names: frozenset[str]
    client_tls: TlsFiles | None = None
    """What clients show and trust; None without TLS."""

    def plan(self, node_id: int) -> NodePlan:
        """The plan of one node."""
        return next(plan for plan in self.plans if plan.node_id == node_id)


def prepare_layout(
    directory: Path,
    *,
    nodes: int | None = None,
    base_port: int | None = None,
    tls: bool = False,
    settings: Mapping[str, str | int] | None = None,
    advertised_host: str = HOST,
    has_files_beside: bool = False,
    hosts: Sequence[str] = (),
) -> ClusterLayout:
    """Make or find the cluster of ``directory``; None means: as it was, or the defaults.

    A directory that holds a cluster keeps its id, its data and each node's own settings. Another
    number of nodes than it was made with is refused: the set of controllers is part of what the
    data means. Another base port moves it. With ``tls`` a new cluster has certificates of its own
    on every port; one that was made without is refused. ``settings`` go into the file of each new
    node. For a new cluster's ``advertised_host`` and ``has_files_beside`` see NodePlan. ``hosts``
    are its nodes' own, one each, where they are not all at HOST; they are behind no other host.

    Nothing is written while a node of the cluster runs (DataDirectoryError), or for a new cluster
    or a move where a port is taken (AddressInUseError).
    """
    found = _read_cluster_file(directory)
    if found is None:
        wanted = _ClusterFile(
            new_cluster_id(),
            DEFAULT_NODES if nodes is None else nodes,
            DEFAULT_BASE_PORT if base_port is None else base_port,
            tls=tls,
            advertised_host=advertised_host,
            has_files_beside=has_files_beside,
            hosts=hosts,
        )
        _refuse_unknown_contents(directory)
    else:
        wanted = _adapt(directory, found, nodes, base_port)
        if tls and not found.tls:
            raise DataDirectoryError(
                f"{directory} holds a cluster without TLS; start it without --tls, or choose "
                "another --data-dir"
            )
    plans = _plans(directory, wanted)
    with _not_running(directory, plans):
        if wanted.complete:
            for plan in plans:
                _require_node(plan)
        if found is None or found.base_port != wanted.base_port:
            check_ports(plans)
        _write_files(directory, wanted, plans, settings or {})
    own = _own_settings(plans[0], plans, tls=True)
    # Also without TLS: what commands are to show and trust is not for nodes.
    names = frozenset({"PENSTOCK_BOOTSTRAP", *map(_environment_name, own)})
    client_tls = _client_tls(directory) if wanted.tls else None
    return ClusterLayout(directory, wanted.cluster_id, plans, names, client_tls)


def _client_tls(directory: Path) -> TlsFiles:
    return files_in(directory.resolve() / _TLS_DIRECTORY, "client")


def _write_certificates(directory: Path, cluster: _ClusterFile, plans: Sequence[NodePlan]) -> None:
    """Make the certificates, all anew if one is missing: their authority is gone."""
    names = ["client", *(plan.directory.name for plan in plans)]
    wanted = [files_in(directory / _TLS_DIRECTORY, name) for name in names]
    if all(path.exists() for files in wanted for path in (files.ca, files.certificate, files.key)):
        return
    try:
        make_cluster_files(
            directory / _TLS_DIRECTORY,
            cluster.cluster_id,
            [plan.node_id for plan in plans],
            [HOST, "localhost"],
        )
    except OSError as error:
        raise DataDirectoryError(f"cannot write into {directory}: {error.strerror}") from None


@contextlib.contextmanager
def _not_running(directory: Path, plans: Iterable[NodePlan]) -> Iterator[None]:
    """Hold the nodes' directories as the nodes themselves do, so that none runs inside the block.

    Raises DataDirectoryError when one runs already.
    """
    with contextlib.ExitStack() as held:
        for plan in plans:
            if not plan.directory.exists():
                continue  # Not made yet.
            try:
                held.callback(os.close, lock_directory(plan.directory))
            except DirectoryUnreadableError:
                raise
            except DataDirectoryError:
                raise DataDirectoryError(
                    f"a cluster runs in {directory} (node {plan.node_id} uses {plan.directory}); "
                    "stop it first, or choose another --data-dir"
                ) from None
        yield


def _write_files(
    directory: Path,
    cluster: _ClusterFile,
    plans: Sequence[NodePlan],
    settings: Mapping[str, str | int],
) -> None:
    _write_cluster_file(directory, cluster)
    if cluster.tls:
        _write_certificates(directory, cluster, plans)
    for plan in plans:
        format_directory(
            plan.directory, cluster.cluster_id, plan.node_id, may_found=not cluster.complete
        )
        own = _own_settings(plan, plans, tls=cluster.tls)
        _write_node_file(plan, own, {**settings_by_size(len(plans)), **settings})
    if not cluster.complete:
        _write_cluster_file(directory, replace(cluster, complete=True))


def check_ports(plans: Iterable[NodePlan]) -> None:
    """Raise AddressInUseError that names the port when one of the nodes' is taken.

    In a network namespace of a node's own all are free.
    """
    for plan in plans:
        if plan.host != HOST:
            continue
        wanted = [(plan.broker_port, "broker"), (plan.controller_port, "controller")]
        if plan.is_behind_another:
            wanted.append((plan.frames_port, "followers"))
        for port, what in wanted:
            if not _is_free(port):
                raise AddressInUseError(
                    f"port {port} on {HOST} is in use already; node {plan.node_id} needs it for "
                    f"its {what}"
                )


def find_base_port(nodes: int, *, first: int = 21_000, frames: bool = False) -> int:
    """A base port such that all ports of ``nodes`` nodes are free now; with ``frames`` those at
    which followers are served, too. No other process that looks gets it while this one lives.

    It looks below the range from which systems take ports for outgoing connections. For one thread.
    """
    step = MAX_NODES + 1
    distances = [0, CONTROLLER_PORT_DISTANCE, *([FRAMES_PORT_DISTANCE] if frames else [])]
    for base in range(first, first + 9 * step, step):
        ports = [base + i + distance for i in range(nodes) for distance in distances]
        if _claim(base) and all(_is_free(port) for port in ports):
            return base
    raise AddressInUseError(f"no free ports for {nodes} nodes from {first} on; name a --base-port")


_claimed: Final[set[int]] = set()
"""Base ports that other processes are told are taken, until this one ends: nodes come to their
ports later, and a node that is down leaves its own."""


def _claim(base: int) -> bool:
    """Whether this base port is this process's, from now on or before."""
    if base not in _claimed:
        claim = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            claim.bind((HOST, base + MAX_NODES))  # A port that no node of it has.
        except OSError:
            claim.close()
            return False
        claim.detach()  # Open for as long as the process lives.
        _claimed.add(base)
    return True


def _plans(directory: Path, cluster: _ClusterFile) -> tuple[NodePlan, ...]:
    if not 1 <= cluster.nodes <= MAX_NODES:
        raise ConfigurationError(f"--nodes {cluster.nodes}: from 1 to {MAX_NODES} nodes can run")
    distance = CONTROLLER_PORT_DISTANCE if cluster.advertised_host == HOST else FRAMES_PORT_DISTANCE
    last = cluster.base_port + distance + cluster.nodes - 1
    if cluster.base_port < 1 or last > _HIGHEST_PORT:
        raise ConfigurationError(
            f"--base-port {cluster.base_port}: the ports up to {last} are needed "
            f"(controllers listen {CONTROLLER_PORT_DISTANCE} above), and {_HIGHEST_PORT} is the "
            "last there is"
        )
    return tuple(
        NodePlan(
            node_id=i + 1,
            directory=directory / f"node-{i + 1}",
            broker_port=cluster.base_port + i,
            controller_port=cluster.base_port + CONTROLLER_PORT_DISTANCE + i,
            advertised_host=cluster.hosts[i] if cluster.hosts else cluster.advertised_host,
            has_files_beside=cluster.has_files_beside,
            host=cluster.hosts[i] if cluster.hosts else HOST,
        )
        for i in range(cluster.nodes)
    )


def _adapt(
    directory: Path, found: _ClusterFile, nodes: int | None, base_port: int | None
) -> _ClusterFile:
    if nodes is not None and nodes != found.nodes:
        raise DataDirectoryError(
            f"{directory} holds a cluster of {found.nodes} nodes, not of {nodes}; "
            f"start it with --nodes {found.nodes}, or choose another --data-dir"
        )
    port = found.base_port if base_port is None else base_port
    return replace(found, base_port=port)


def _require_node(plan: NodePlan) -> None:
    """A node's directory that vanished must not be made anew: it had voted, and held replicas."""
    if not (plan.directory / META_FILE).exists():
        raise DataDirectoryError(
            f"{plan.directory / META_FILE} is gone, and with the directory's data what node "
            f"{plan.node_id} had promised to the others; put that very directory back, no older "
            "copy of it, or see docs/operating/failures.md for what to do without"
        )


def _refuse_unknown_contents(directory: Path) -> None:
    try:
        foreign = sorted(path.name for path in directory.iterdir())
    except FileNotFoundError:
        return
    except OSError as error:
        raise DataDirectoryError(f"cannot use {directory}: {error.strerror}") from None
    if foreign:
        raise DataDirectoryError(
            f"{directory} is not empty and holds no cluster of `penstock dev` "
            f"(it has {foreign[0]!r}); choose an empty directory"
        )


def _read_cluster_file(directory: Path) -> _ClusterFile | None:
    path = directory / _CLUSTER_FILE
    try:
        return _ClusterFile(**json.loads(path.read_text(encoding="utf-8")))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise DataDirectoryError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, TypeError) as error:
        raise DataDirectoryError(f"{path} is damaged: {error}") from None


def _write_cluster_file(directory: Path, cluster: _ClusterFile) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        temporary = directory / f"{_CLUSTER_FILE}.tmp"
        temporary.write_text(json.dumps(asdict(cluster), indent=2) + "\n", encoding="utf-8")
        temporary.replace(directory / _CLUSTER_FILE)
    except OSError as error:
        raise DataDirectoryError(f"cannot write into {directory}: {error.strerror}") from None


def settings_by_size(nodes: int) -> dict[str, str | int]:
    """Settings that follow from the number of nodes."""
    if nodes >= _USUAL_REPLICATION:
        return {}
    # Offsets of groups and transactions wait for as many brokers as they shall have copies.
    return {
        "offsets.topic.replication.factor": nodes,
        "transaction.state.topic.replication.factor": nodes,
    }


def _own_settings(plan: NodePlan, plans: Sequence[NodePlan], *, tls: bool) -> dict[str, str | int]:
    """The settings that tell one node of the cluster from another."""
    voters = ",".join(
        f"{other.node_id}@{format_address(other.advertised_host, other.controller_port)}"
        for other in plans
    )
    own: dict[str, str | int] = {
        "node.id": plan.node_id,
        "node.roles": "controller,broker",
        "data.dir": str(plan.directory.resolve()),
        "broker.listen": plan.address,
        "controller.listen": format_address(plan.host, plan.controller_port),
        "controller.quorum.voters": voters,
    }
    if plan.is_behind_another:
        own["broker.advertised"] = plan.advertised
        own["controller.advertised"] = format_address(plan.advertised_host, plan.controller_port)
        own["replication.frames.listen"] = format_address(plan.host, plan.frames_port)
    if tls:
        files = files_in(plan.directory.resolve().parent / _TLS_DIRECTORY, plan.directory.name)
        own["tls.ca"] = str(files.ca)
        own["tls.certificate"] = str(files.certificate)
        own["tls.key"] = str(files.key)
    return own


def _write_node_file(
    plan: NodePlan, own: Mapping[str, str | int], settings: Mapping[str, str | int]
) -> None:
    """Write the node's file when it is new or its addresses moved; the user's settings stay."""
    found = _read_node_file(plan.config_path)
    if found is not None and all(found.get(key) == value for key, value in own.items()):
        return
    lines = [
        f"{key} = {json.dumps(value)}\n"
        for key, value in {**(settings if found is None else found), **own}.items()
    ]
    plan.config_path.write_text(_HEADER + "".join(lines), encoding="utf-8")


def _read_node_file(path: Path) -> dict[str, str | int] | None:
    try:
        with path.open("rb") as file:
            tree = tomllib.load(file)
    except FileNotFoundError:
        return None
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"cannot read {path}: {error}") from None
    flat: dict[str, str | int] = {}
    pending: list[tuple[str, object]] = [("", tree)]
    while pending:
        prefix, value = pending.pop(0)
        if isinstance(value, dict):
            pending.extend((f"{prefix}.{key}".lstrip("."), part) for key, part in value.items())
        elif isinstance(value, list):
            flat[prefix] = ",".join(str(part) for part in value)
        else:
            flat[prefix] = value if isinstance(value, int) else str(value)
    return flat


def _environment_name(key: str) -> str:
    return "PENSTOCK_" + key.upper().replace(".", "_")


def _is_free(port: int) -> bool:
    with contextlib.closing(socket.socket(socket.AF_INET, socket.SOCK_STREAM)) as probe:
        # As servers do: a port whose last connections linger in TIME_WAIT is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
            probe.listen(1)
        except OSError:
            return False
    return True
