"""A node's settings: one frozen dataclass, read from TOML, the environment and flags.

A key is its field's name with dots for underscores (``flush_policy`` is ``flush.policy`` in the
file and ``PENSTOCK_FLUSH_POLICY`` in the environment). A later source wins: file, environment,
flags. An unknown key in the file or a flag is an error that suggests the near one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from penstock.broker.config_sources import (
    read_toml,
    require,
    require_reachable,
    split_overrides,
)
from penstock.raft_meta.exposure import TlsFiles, check_exposure
from penstock.wire.cluster_config import CLUSTER_CONFIGS
from penstock.wire.config_keys import suggest
from penstock.wire.errors import ConfigurationError
from penstock.wire.transport import MAX_MESSAGE_BYTES, format_address, parse_address

_ENV_PREFIX: Final = "PENSTOCK_"
_ROLES: Final = ("controller", "broker")
_ADDRESSES: Final = (
    "broker.listen",
    "broker.advertised",
    "external.listen",
    "external.advertised",
    "controller.listen",
    "controller.advertised",
    "replication.listen",
    "replication.frames.listen",
    "metrics.listen",
    "metrics.graphite",
)
_TLS_FILES: Final = ("tls.ca", "tls.certificate", "tls.key")
_INT64: Final = 2**63 - 1


def _key(
    default: Any,
    doc: str,
    *,
    low: int = 0,
    high: int = _INT64,
    choices: tuple[str, ...] = (),
) -> Any:
    """A field with its meaning and its bounds; every key of a node is made with it."""
    return field(
        default=default, metadata={"doc": doc, "low": low, "high": high, "choices": choices}
    )


def _shared(key: str, *, low: int = 0, high: int = _INT64) -> Any:
    """A field that the whole cluster can share; see penstock.wire.cluster_config."""
    entry = CLUSTER_CONFIGS[key]
    return _key(entry.parse(entry.default), entry.documentation, low=low, high=high)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeConfig:
    """Every setting of one node. Built by :meth:`load`, which validates; immutable after."""

    node_id: int = _key(-1, "This node's number, unique in the cluster.", low=0, high=2**31 - 1)
    node_roles: str = _key("controller,broker", "controller, broker, or both with a comma.")
    node_rack: str = _key("", "The rack or zone; replicas are spread over racks.")
    data_dir: str = _key("", "The node's directory; the two directories below default into it.")
    log_dirs: str = _key("", "Where partitions are kept, with commas; default DATA_DIR/logs.")
    metadata_dir: str = _key("", "Where the controller keeps its log; default DATA_DIR/raft.")
    broker_listen: str = _key("127.0.0.1:9092", "The address that the broker listens on.")
    broker_advertised: str = _key(
        "", "The address that clients and brokers are told; default: broker.listen."
    )
    external_listen: str = _key(
        "", "Where clients from outside are served too, on a port of their own; empty: none are."
    )
    external_advertised: str = _key(
        "", "The address that clients from outside are told; default: external.listen."
    )
    controller_listen: str = _key("127.0.0.1:10092", "The address that the controller listens on.")
    controller_advertised: str = _key(
        "",
        "The address that the other controllers reach this one by; default: as "
        "controller.quorum.voters say, or else controller.listen.",
    )
    controller_quorum_voters: str = _key(
        "",
        "The controllers as id@host:port, with commas. At a cluster's first start these are its "
        "voters, the same on every node; later they say where controllers are found.",
    )
    controller_insecure_allow: bool = _key(
        False,
        "Let the controller listen on an address that other machines reach although there is no "
        "TLS: whoever reaches it commands the cluster.",
    )
    tls_ca: str = _key(
        "", "The authority's certificates, PEM; tls.ca, tls.certificate and tls.key turn TLS on."
    )
    tls_certificate: str = _key(
        "", "This node's certificate, PEM, made out to node-N.CLUSTER_ID.penstock."
    )
    tls_key: str = _key("", "The certificate's private key, PEM, not encrypted.")
    tls_client_auth: str = _key(
        "required",
        "Whether clients must show a certificate of the authority's, too. Nodes always must.",
        choices=("required", "none"),
    )
    replication_listen: str = _key(
        "",
        "Where followers are served with tls.client.auth=none, at the host of broker.advertised; "
        "default: the host of broker.listen, a port that is free.",
    )
    replication_transport: str = _key(
        "frames",
        "How replicas are copied between brokers that have both. frames: over TCP connections of "
        "their own, which cost less; grpc: as with brokers that know nothing else.",
        choices=("frames", "grpc"),
    )
    replication_frames_listen: str = _key(
        "",
        "Where followers that come with frames are served, at the host of broker.advertised; "
        "default: the host of broker.listen, a port that is free.",
    )
    controller_election_timeout_min_ms: int = _key(
        500, "A controller that hears no leader stands for election after this.", low=50
    )
    controller_election_timeout_max_ms: int = _key(
        1000, "The upper end of the random election timeout.", low=100
    )
    controller_raft_heartbeat_ms: int = _key(
        150, "How often the active controller is heard by the others.", low=10
    )
    broker_session_timeout_ms: int = _key(
        6000, "A silent broker is fenced, and stops serving by itself, after this.", low=500
    )
    broker_heartbeat_interval_ms: int = _key(
        1000, "How often a broker is heard by the controller.", low=50
    )
    broker_disconnect_grace_ms: int = _shared("broker.disconnect.grace.ms")
    controller_takeover_grace_ms: int = _shared("controller.takeover.grace.ms")
    controlled_shutdown_timeout_ms: int = _shared("controlled.shutdown.timeout.ms")
    leader_imbalance_enable: bool = _shared("leader.imbalance.enable")
    leader_imbalance_check_interval_ms: int = _shared("leader.imbalance.check.interval.ms", low=100)
    leader_imbalance_threshold_percent: int = _shared(
        "leader.imbalance.threshold.percent", high=100
    )
    replica_lag_time_max_ms: int = _shared("replica.lag.time.max.ms", low=100)
    replication_catchup_max_bytes_per_second: int = _shared(
        "replication.catchup.max.bytes.per.second"
    )
    flush_policy: str = _key(
        "commit",
        "commit: an acknowledged batch is on disk; interval: every flush.interval.ms; os: left "
        "to the operating system.",
        choices=("commit", "interval", "os"),
    )
    flush_interval_ms: int = _key(1000, "How often flush.policy=interval flushes.", low=10)
    log_min_free_bytes: int = _shared("log.min.free.bytes")
    log_segment_bytes: int = _key(
        1024 * 1024 * 1024,
        "A segment is closed at this size, where the topic's segment.bytes says nothing; or at its "
        "max.message.bytes, if it sets that higher.",
        low=4096,
        high=2**31 - 1,
    )
    log_preallocate: bool = _key(
        False,
        "Whether a segment gets all of its segment.bytes on the disk with its first record, where "
        "the topic's preallocate says nothing.",
    )
    log_cleaner_threads: int = _key(
        1, "So many logs are compacted side by side; 0: none ever is.", high=64
    )
    log_cleaner_io_max_bytes_per_second: int = _key(
        8 * 1024 * 1024, "What compaction reads and writes in a second, at most.", low=65536
    )
    log_cleaner_dedupe_buffer_bytes: int = _key(
        128 * 1024 * 1024,
        "The memory that compaction has for keys: 30 bytes for each that is cleaned at once.",
        low=1024 * 1024,
        high=64 * 1024 * 1024 * 1024,
    )
    log_cleaner_backoff_ms: int = _key(
        15_000, "How long compaction rests when no log is dirty enough.", low=10
    )
    log_retention_check_interval_ms: int = _key(
        300_000, "How often records that topics keep no longer are looked for.", low=10
    )
    scrub_interval_ms: int = _key(
        604_800_000, "How often all that is on the disks is read and checked; 0: never."
    )
    scrub_max_bytes_per_second: int = _key(
        10_485_760, "How fast a data directory is read to be checked.", low=1024
    )
    offsets_topic_num_partitions: int = _key(
        16, "Partitions of __consumer_offsets; fixed once the topic exists.", low=1, high=1000
    )
    offsets_topic_replication_factor: int = _key(
        3, "Replicas of __consumer_offsets; it is not made before so many brokers live.", low=1
    )
    offsets_retention_minutes: int = _key(
        10_080,
        "Committed offsets that nobody uses are forgotten after this: those of a group without "
        "members, and of topics that none of its members reads.",
        low=1,
        high=2**31 - 1,
    )
    offsets_retention_check_interval_ms: int = _key(
        600_000, "How often offsets to be forgotten are looked for.", low=10
    )
    transaction_state_topic_num_partitions: int = _key(
        16, "Partitions of __transaction_state; fixed once the topic exists.", low=1, high=1000
    )
    transaction_state_topic_replication_factor: int = _key(
        3, "Replicas of __transaction_state; it is not made before so many brokers live.", low=1
    )
    transaction_max_timeout_ms: int = _key(
        900_000, "The longest transaction timeout that a producer may ask for.", low=1
    )
    transactional_id_expiration_ms: int = _key(
        604_800_000,
        "A transactional id that nobody used for so long is forgotten.",
        low=1,
    )
    group_heartbeat_interval_ms: int = _key(
        3000, "How often a member of a group should be heard.", low=50
    )
    group_min_session_timeout_ms: int = _key(
        1000, "The shortest session timeout that a member may ask for.", low=50
    )
    group_max_session_timeout_ms: int = _key(
        1_800_000, "The longest session timeout that a member may ask for.", low=50
    )
    metrics_listen: str = _key(
        "", "The address of the HTTP port for probes and metrics; empty: none."
    )
    metrics_labels_max: int = _key(
        1000,
        "How many topics, and how many pairs of group and topic, metrics show by name; the others "
        "are summed under (other).",
    )
    metrics_graphite: str = _key(
        "", "A Graphite server that is sent the metrics too, as host:port; empty: none."
    )
    metrics_graphite_interval_ms: int = _key(
        60_000, "How often metrics.graphite is sent them.", low=100
    )
    connections_max: int = _key(
        2000,
        "So many connections a port for clients has at most; more are closed at once. Beyond three "
        "quarters of it those are closed that have asked for nothing (on Linux).",
        low=10,
        high=1_000_000,
    )
    connection_streams_max: int = _key(
        4000,
        "So many calls and streams one connection has open at most. Clients wait with more, but "
        "for those that they send before they have heard of the limit, which are refused.",
        low=10,
        high=1_000_000,
    )
    request_max_bytes: int = _key(
        MAX_MESSAGE_BYTES,
        "The largest message that clients may send; at least the largest max.message.bytes.",
        low=1024 * 1024,
        high=MAX_MESSAGE_BYTES,
    )
    unfinished_max_bytes: int = _key(
        256 * 1024 * 1024,
        "Of requests that are sent in part the node keeps so much, of all clients, and as much "
        "again of all who come to its ports for nodes (on Linux); connections that have most of it "
        "are closed beyond.",
        low=1024 * 1024,
    )
    unsent_max_bytes: int = _key(
        192 * 1024 * 1024,
        "Records that clients asked for and have yet to take, of all clients, and as much again of "
        "metadata that a controller's port tells; the memory is about twice that. A quarter of it "
        "is for connections that have nothing to take yet.",
        low=4 * 1024 * 1024,
    )
    unsent_connection_max_bytes: int = _key(
        96 * 1024 * 1024, "The same of one connection; what is above waits.", low=1024 * 1024
    )
    unsent_stalled_ms: int = _key(
        60_000,
        "A client that takes nothing of its answers for so long is disconnected, and after a sixth "
        "of it when others wait for room.",
        low=1000,
    )
    log_format: str = _key("console", "How log lines look.", choices=("console", "json"))
    log_level: str = _key(
        "info", "The least level that is logged.", choices=("debug", "info", "warning", "error")
    )

    origins: Mapping[str, str] = field(default_factory=dict, compare=False)
    """Who set the keys that were set: node file, environment or command line."""

    @classmethod
    def load(
        cls,
        path: Path | None,
        environment: Mapping[str, str] | None = None,
        overrides: Sequence[str] = (),
    ) -> NodeConfig:
        """The settings of file, environment and ``key=value`` overrides, validated.

        Raises ConfigurationError that names the source, the key, and what is allowed.
        """
        sources = {
            "node file": {} if path is None else _checked(read_toml(path), f"{path}"),
            "environment": _from_environment(environment or {}),
            "command line": _checked(split_overrides(overrides), "--set"),
        }
        values = {key: value for found in sources.values() for key, value in found.items()}
        origins = {key: source for source, found in sources.items() for key in found}
        fields: dict[str, Any] = {key.replace(".", "_"): value for key, value in values.items()}
        config = cls(**fields, origins=origins)
        config.validate()
        return config

    @property
    def roles(self) -> frozenset[str]:
        """The roles as a set."""
        return frozenset(part.strip() for part in self.node_roles.split(",") if part.strip())

    @property
    def log_directories(self) -> list[Path]:
        """Where partitions are kept."""
        named = [Path(part.strip()) for part in self.log_dirs.split(",") if part.strip()]
        return named or [Path(self.data_dir) / "logs"]

    @property
    def metadata_directory(self) -> Path:
        """Where the controller keeps its log."""
        return Path(self.metadata_dir) if self.metadata_dir else Path(self.data_dir) / "raft"

    @property
    def advertised(self) -> tuple[str, int]:
        """The host and port that others are told."""
        return parse_address(self.broker_advertised or self.broker_listen)

    @property
    def external(self) -> tuple[str, int] | None:
        """The host and port that clients from outside are told; None: there are none."""
        if not self.external_listen:
            return None
        return parse_address(self.external_advertised or self.external_listen)

    @property
    def controller_address(self) -> tuple[str, int] | None:
        """Where the others reach this controller, if controller.quorum.voters do not say it."""
        return parse_address(self.controller_advertised) if self.controller_advertised else None

    @property
    def voters(self) -> dict[int, tuple[str, int]]:
        """The controllers: host and port by node id."""
        return dict(_parse_voter(part) for part in _parts(self.controller_quorum_voters))

    @property
    def tls_files(self) -> TlsFiles | None:
        """Where the node's credentials are; None without TLS."""
        if not self.tls_ca:
            return None
        return TlsFiles(Path(self.tls_ca), Path(self.tls_certificate), Path(self.tls_key))

    @property
    def replication_address(self) -> tuple[str, int]:
        """Where followers are served when clients need no certificate; port 0: any free one."""
        if self.replication_listen:
            return parse_address(self.replication_listen)
        return parse_address(self.broker_listen)[0], 0

    @property
    def frames_address(self) -> tuple[str, int]:
        """Where followers that come with frames are served; port 0: any free one."""
        if self.replication_frames_listen:
            return parse_address(self.replication_frames_listen)
        return parse_address(self.broker_listen)[0], 0

    def validate(self) -> None:
        """Raise ConfigurationError for settings that contradict each other."""
        require(self.node_id >= 0, "node.id is not set; every node needs its own number")
        require(bool(self.data_dir), "data.dir is not set; the node needs a directory of its own")
        require(
            bool(self.roles) and self.roles <= set(_ROLES),
            f"node.roles={self.node_roles!r}: controller, broker, or controller,broker is wanted",
        )
        for key in _ADDRESSES:
            self._check_address(key)
        self._check_advertised()
        require(
            not self.replication_frames_listen or self.replication_transport == "frames",
            "replication.frames.listen is for replication.transport=frames; leave one of them out",
        )
        self._check_voters()
        self._check_tls()
        require(
            self.controller_election_timeout_min_ms < self.controller_election_timeout_max_ms,
            "controller.election.timeout.min.ms must be below controller.election.timeout.max.ms",
        )
        require(
            self.controller_raft_heartbeat_ms * 2 <= self.controller_election_timeout_min_ms,
            "controller.raft.heartbeat.ms must be at most half of "
            "controller.election.timeout.min.ms, or healthy controllers lose their office",
        )
        require(
            self.broker_heartbeat_interval_ms * 2 <= self.broker_session_timeout_ms,
            "broker.heartbeat.interval.ms must be at most half of broker.session.timeout.ms",
        )
        require(
            self.request_max_bytes <= self.unfinished_max_bytes,
            "unfinished.max.bytes must not be below request.max.bytes, or who sends a large "
            "request is disconnected",
        )
        require(
            self.unsent_connection_max_bytes <= self.unsent_max_bytes,
            "unsent.connection.max.bytes must not be above unsent.max.bytes",
        )
        require(
            self.group_min_session_timeout_ms <= self.group_max_session_timeout_ms,
            "group.min.session.timeout.ms must not be above group.max.session.timeout.ms",
        )

    def _check_address(self, key: str) -> None:
        text = str(getattr(self, key.replace(".", "_")))
        if not text:
            return
        try:
            parse_address(text)
        except ValueError as error:
            raise ConfigurationError(f"{key}: {error}") from None

    def _check_advertised(self) -> None:
        require_reachable("broker.advertised", self.advertised, "clients reach this broker by")
        if self.external is None:
            require(
                not self.external_advertised,
                "external.advertised is for external.listen, which is not set; set it to the "
                "address where clients from outside are served, or leave both out",
            )
            return
        require_reachable(
            "external.advertised", self.external, "clients from outside reach this broker by"
        )
        # Connections are told apart by the port that they come to.
        port = parse_address(self.external_listen)[1]
        require(
            port != parse_address(self.broker_listen)[1],
            f"external.listen and broker.listen have the same port, {port}; give clients from "
            "outside another one, which external.advertised need not show",
        )

    def _check_tls(self) -> None:
        given = {key: bool(getattr(self, key.replace(".", "_"))) for key in _TLS_FILES}
        missing = [key for key, is_given in given.items() if not is_given]
        verb = "is" if len(missing) == 1 else "are"
        require(
            not missing or len(missing) == len(given),
            f"{' and '.join(missing)} {verb} not set{self._emptied(missing)}; TLS needs all of "
            f"{', '.join(given)}, and without TLS none of them may be set",
        )
        require(
            not self.replication_listen or (not missing and self.tls_client_auth == "none"),
            "replication.listen is for tls.client.auth=none alone: otherwise followers are served "
            "at broker.listen; leave it out",
        )
        if "controller" in self.roles:
            check_exposure(
                parse_address(self.controller_listen),
                tls=not missing,
                insecure_allowed=self.controller_insecure_allow,
            )

    def _emptied(self, keys: Sequence[str]) -> str:
        """Which of these are set to nothing by a source, which goes before those below it."""
        by = [
            f"{_ENV_PREFIX}{_FIELDS[key].name.upper()} in the environment is empty"
            if self.origins[key] == "environment"
            else f"{key} is empty on the {self.origins[key]}"
            for key in keys
            if self.origins.get(key, "node file") != "node file"
        ]
        return f" ({'; '.join(by)}, and goes before the node file)" if by else ""

    def _check_voters(self) -> None:
        try:
            voters = self.voters
        except ValueError as error:
            raise ConfigurationError(f"controller.quorum.voters: {error}") from None
        require(
            bool(voters),
            "controller.quorum.voters is not set; name all controllers as id@host:port",
        )
        require(
            len(voters) == len(_parts(self.controller_quorum_voters)),
            "controller.quorum.voters names a node id twice",
        )
        if "controller" in self.roles and self.node_id not in voters:
            host, port = parse_address(self.controller_advertised or self.controller_listen)
            require(
                host not in ("0.0.0.0", "::"),  # noqa: S104 - this refuses it.
                f"node {self.node_id} has the controller role and is not among "
                f"controller.quorum.voters ({self.controller_quorum_voters}): it would say that it "
                f"is reached at {format_address(host, port)}, where nobody can connect to; set "
                "controller.advertised to the address that other controllers reach it by",
            )


_FIELDS: Final = {
    entry.name.replace("_", "."): entry
    for entry in dataclasses.fields(NodeConfig)
    if entry.metadata
}


def describe_keys() -> Iterator[tuple[str, str, str]]:
    """Key, default and meaning of every setting, for the documentation."""
    for key, entry in _FIELDS.items():
        default = str(entry.default).lower() if entry.type == "bool" else str(entry.default)
        yield key, default, str(entry.metadata["doc"])


def _parts(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _parse_voter(text: str) -> tuple[int, tuple[str, int]]:
    node_id, at, address = text.partition("@")
    if not at or not node_id.isdecimal():
        raise ValueError(f"{text!r} is not a controller; write id@host:port")
    return int(node_id), parse_address(address)


def _from_environment(environment: Mapping[str, str]) -> dict[str, object]:
    """The keys that are set; other PENSTOCK_ names belong to others, Kubernetes for one."""
    values: dict[str, object] = {}
    for key, entry in _FIELDS.items():
        name = _ENV_PREFIX + entry.name.upper()
        if name in environment:
            values[key] = _parse(key, environment[name], f"environment variable {name}")
    return values


def _checked(values: Mapping[str, object], source: str) -> dict[str, object]:
    for key in values:
        if key not in _FIELDS:
            raise ConfigurationError(
                f"{source}: unknown setting {key!r}{suggest(key, list(_FIELDS))}"
            )
    return {key: _parse(key, value, source) for key, value in values.items()}


def _parse(key: str, value: object, source: str) -> object:
    entry = _FIELDS[key]
    if entry.type == "bool":
        text = str(value).lower()
        if text not in ("true", "false"):
            raise ConfigurationError(f"{source}: {key}={value!r}: true or false is wanted")
        return text == "true"
    if entry.type != "int":
        text = str(value)
        choices = entry.metadata["choices"]
        if choices and text not in choices:
            raise ConfigurationError(
                f"{source}: {key}={text!r}: one of {', '.join(choices)} is wanted"
            )
        return text
    low, high = entry.metadata["low"], entry.metadata["high"]
    try:
        number = int(str(value))
    except ValueError:
        raise ConfigurationError(f"{source}: {key}={value!r}: a whole number is wanted") from None
    if not low <= number <= high:
        bound = f"from {low} to {high}" if high != _INT64 else f"of at least {low}"
        raise ConfigurationError(f"{source}: {key}={number}: a whole number {bound} is wanted")
    return number
