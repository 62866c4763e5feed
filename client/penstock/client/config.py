"""The settings of producers, consumers and administration: Kafka's keys in snake_case with
Kafka 4's defaults.

Each is a frozen dataclass made by ``load``, which refuses an unknown setting (and suggests the
near name), a wrong type, a value out of bounds, and values that contradict each other, always
with a ConfigurationError.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from os import PathLike, fspath
from typing import Any, ClassVar, Final, Literal, TypedDict, TypeVar

from penstock.client import offset_reset, serializers
from penstock.client.core.partitioner import Partitioner
from penstock.client.serializers import Deserializer, Serializer, SerializerName
from penstock.client.tls import TlsSettings, tls_settings
from penstock.wire.compression import Compression
from penstock.wire.config_keys import suggest
from penstock.wire.errors import (
    ConfigurationError,
    InvalidGroupIdError,
    InvalidTransactionalIdError,
)
from penstock.wire.names import check_group_id
from penstock.wire.transactional_ids import check_transactional_id, parse_attempt
from penstock.wire.transport import parse_address

Acks = Literal["all", 0, 1, -1, "0", "1", "-1"]
CompressionName = Literal["none", "gzip", "snappy", "lz4", "zstd"]
OffsetReset = Literal["earliest", "latest", "none"]
IsolationLevel = Literal["read_uncommitted", "read_committed"]
Address = tuple[str, int]
ConfigT = TypeVar("ConfigT", bound="CommonConfig")

_MAX_INT32: Final = 2**31 - 1


class CommonSettings(TypedDict, total=False):
    """What every client takes beside its bootstrap addresses."""

    client_id: str
    request_timeout_ms: int
    retry_backoff_ms: int
    retry_backoff_max_ms: int
    metadata_max_age_ms: int
    bootstrap_timeout_ms: int
    tls_ca: str | PathLike[str]
    tls_certificate: str | PathLike[str]
    tls_key: str | PathLike[str]


class ProducerSettings(CommonSettings, total=False):
    """What producers take; see ProducerConfig."""

    acks: Acks
    enable_idempotence: bool
    linger_ms: int
    batch_size: int
    max_batch_size: int
    compression: CompressionName
    retries: int
    delivery_timeout_ms: int
    max_request_size: int
    max_in_flight_requests_per_connection: int
    buffer_memory: int
    max_block_ms: int
    partitioner: Literal["default", "round_robin"] | Partitioner
    key_serializer: SerializerName | Serializer
    value_serializer: SerializerName | Serializer
    transactional_id: str | None
    transaction_timeout_ms: int


class ConsumerSettings(CommonSettings, total=False):
    """What consumers take; see ConsumerConfig."""

    group_id: str | None
    group_instance_id: str | None
    group_assignor: str
    client_rack: str
    auto_offset_reset: str
    isolation_level: IsolationLevel
    enable_auto_commit: bool
    auto_commit_interval_ms: int
    fetch_min_bytes: int
    fetch_max_bytes: int
    fetch_max_wait_ms: int
    max_partition_fetch_bytes: int
    prefetch_max_bytes: int
    max_poll_records: int
    max_poll_interval_ms: int
    session_timeout_ms: int
    default_api_timeout_ms: int
    key_deserializer: SerializerName | Deserializer
    value_deserializer: SerializerName | Deserializer


class AdminSettings(CommonSettings, total=False):
    """What administration takes; see AdminConfig."""

    default_api_timeout_ms: int


class CommitSettings(AdminSettings, total=False):
    """What commits of groups take; see CommitConfig."""


class AttemptSettings(CommonSettings, total=False):
    """What attempts' writers take: a producer's, but for what is settled by what they are."""

    linger_ms: int
    batch_size: int
    max_batch_size: int
    compression: CompressionName
    delivery_timeout_ms: int
    max_request_size: int
    buffer_memory: int
    max_block_ms: int
    partitioner: Literal["default", "round_robin"] | Partitioner
    key_serializer: SerializerName | Serializer
    value_serializer: SerializerName | Serializer
    transaction_timeout_ms: int


def _bounded(default: int, low: int, high: int = _MAX_INT32) -> Any:
    return field(default=default, metadata={"low": low, "high": high})


@dataclass(frozen=True, slots=True, kw_only=True)
class CommonConfig:
    """What every client has."""

    what: ClassVar[str] = "client"

    bootstrap: tuple[Address, ...]
    """Where to begin; any one that answers is enough."""
    client_id: str = "penstock"
    """Shown by brokers and ``penstock groups describe``."""
    request_timeout_ms: int = _bounded(30_000, 1)
    """How long one request may take before its connection is given up, in milliseconds."""
    retry_backoff_ms: int = _bounded(100, 1)
    """The first pause before a repetition; it doubles, with jitter."""
    retry_backoff_max_ms: int = _bounded(1_000, 1)
    """The longest pause between repetitions."""
    metadata_max_age_ms: int = _bounded(300_000, 100)
    """The picture of the cluster is taken anew at this age even if nothing failed."""
    bootstrap_timeout_ms: int = _bounded(5_000, 1)
    """How long to try the bootstrap addresses before BootstrapError."""
    tls_ca: str = ""
    """The file with the certificates, PEM, of the authority that signed the brokers'; turns TLS
    on."""
    tls_certificate: str = ""
    """This client's own certificate, PEM, where brokers ask for one; the file is read again when
    it changes."""
    tls_key: str = ""
    """The certificate's private key, PEM, not encrypted."""

    @classmethod
    def load(
        cls: type[ConfigT], bootstrap_servers: str | Iterable[str], settings: Mapping[str, Any]
    ) -> ConfigT:
        """The settings, checked. Raises ConfigurationError saying which and what is allowed."""
        known = {entry.name: entry for entry in fields(cls) if entry.name != "bootstrap"}
        settings = {name: _path_text(name, value) for name, value in settings.items()}
        for name, value in settings.items():
            if name not in known:
                raise ConfigurationError(
                    f"unknown {cls.what} setting {name!r}{_suggest(name, list(known))}"
                )
            _check(cls.what, known[name], value)
        config = cls(bootstrap=_addresses(bootstrap_servers), **settings)
        config._check_together(frozenset(settings))
        return config

    @property
    def tls(self) -> TlsSettings | None:
        """The TLS files, None without TLS."""
        return tls_settings(self.tls_ca, self.tls_certificate, self.tls_key)

    def _check_together(self, given: frozenset[str]) -> None:
        """Refuse contradictions. ``given`` names what the user set."""
        if (tls := self.tls) is not None:
            tls.check()
        if self.retry_backoff_ms > self.retry_backoff_max_ms:
            if {"retry_backoff_ms", "retry_backoff_max_ms"} <= given:
                raise ConfigurationError(
                    f"retry_backoff_ms={self.retry_backoff_ms} is above "
                    f"retry_backoff_max_ms={self.retry_backoff_max_ms}"
                )
            self._derive(
                retry_backoff_max_ms=max(self.retry_backoff_ms, self.retry_backoff_max_ms)
                if "retry_backoff_ms" in given
                else self.retry_backoff_max_ms,
                retry_backoff_ms=self.retry_backoff_ms
                if "retry_backoff_ms" in given
                else self.retry_backoff_max_ms,
            )

    def _derive(self, **values: object) -> None:
        """Set what follows from other settings; only while loading."""
        for name, value in values.items():
            object.__setattr__(self, name, value)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProducerConfig(CommonConfig):
    """A producer's settings."""

    what: ClassVar[str] = "producer"

    client_id: str = "penstock-producer"
    acks: Acks = "all"
    """Who must hold a record before it is acknowledged: "all" in-sync replicas, 1: the leader,
    0: nobody."""
    enable_idempotence: bool = True
    """No duplicates and no reordering by retries. Needs acks="all" and at most 5 in flight."""
    linger_ms: int = _bounded(5, 0)
    """How long a batch waits for company, in milliseconds."""
    batch_size: int = _bounded(16_384, 1)
    """A batch is full at this size in bytes, before compression, and is sent without lingering."""
    max_batch_size: int = _bounded(524_288, 1)
    """How large a full batch may become while it waits since enough is under way, in bytes before
    compression; batch_size where that is set and this is not."""
    compression: CompressionName = "none"
    """The compression of batches."""
    retries: int = _bounded(_MAX_INT32, 0)
    """How many times a batch is repeated; delivery_timeout_ms bounds it better."""
    delivery_timeout_ms: int = _bounded(120_000, 1)
    """From send() to the verdict, all told."""
    max_request_size: int = _bounded(1_048_576, 128, 32 * 1024 * 1024)
    """The largest record, and the largest request, in bytes before compression."""
    max_in_flight_requests_per_connection: int = _bounded(5, 1, 1_000)
    """Unanswered requests to one broker, and unanswered batches of one partition."""
    buffer_memory: int = _bounded(33_554_432, 1, 2**63 - 1)
    """Bytes of records not yet acknowledged; send() blocks while it is full."""
    max_block_ms: int = _bounded(60_000, 0)
    """How long send() waits for metadata and for room in buffer_memory."""
    partitioner: Literal["default", "round_robin"] | Partitioner = "default"
    """Where a record without a partition goes: "default" hashes keys as Java clients do and
    sticks null keys to a partition batch by batch; "round_robin"; or a callable."""
    key_serializer: SerializerName | Serializer = "bytes"
    """Makes bytes of keys."""
    value_serializer: SerializerName | Serializer = "bytes"
    """Makes bytes of values."""
    transactional_id: str | None = None
    """What the producer does, over all its restarts: makes it transactional, and the one producer
    of this name. None: without transactions."""
    transaction_timeout_ms: int = _bounded(60_000, 1)
    """A transaction that is open for so long is aborted by the cluster."""

    @property
    def acks_number(self) -> int:
        """-1 for all, else 0 or 1."""
        return -1 if self.acks == "all" else int(self.acks)

    @property
    def compression_kind(self) -> Compression:
        """The compression as the codec knows it."""
        return Compression[self.compression.upper()]

    def _check_together(self, given: frozenset[str]) -> None:
        super(ProducerConfig, self)._check_together(given)
        serializers.serializer("key_serializer", self.key_serializer)
        serializers.serializer("value_serializer", self.value_serializer)
        self._check_batch_sizes(given)
        if self.transactional_id is not None:
            self._check_transactional_id(self.transactional_id)
        elif "transaction_timeout_ms" in given:
            raise ConfigurationError("transaction_timeout_ms is set, but transactional_id is not")
        if self.enable_idempotence:
            self._check_idempotence(given)
        elif self.transactional_id is not None:
            raise ConfigurationError(
                "transactional_id contradicts enable_idempotence=False; leave that out"
            )
        least = self.linger_ms + self.request_timeout_ms
        if self.delivery_timeout_ms < least:
            if {"delivery_timeout_ms", "request_timeout_ms"} <= given:
                raise ConfigurationError(
                    f"delivery_timeout_ms={self.delivery_timeout_ms} leaves no room for "
                    f"linger_ms={self.linger_ms} and request_timeout_ms={self.request_timeout_ms}"
                    f"; make it at least {least}"
                )
            if self.delivery_timeout_ms <= self.linger_ms:
                raise ConfigurationError(
                    f"delivery_timeout_ms={self.delivery_timeout_ms} is not above "
                    f"linger_ms={self.linger_ms}: every record would time out while it waits"
                )
            if "delivery_timeout_ms" in given:
                self._derive(request_timeout_ms=self.delivery_timeout_ms - self.linger_ms)
            else:
                self._derive(delivery_timeout_ms=least)

    def _check_batch_sizes(self, given: frozenset[str]) -> None:
        if "max_batch_size" not in given:
            largest = min(self.max_batch_size, self.max_request_size)
            bound = self.batch_size if "batch_size" in given else max(self.batch_size, largest)
            self._derive(max_batch_size=bound)
        elif self.max_batch_size < self.batch_size:
            if "batch_size" in given:
                raise ConfigurationError(
                    f"max_batch_size={self.max_batch_size} is below batch_size={self.batch_size}"
                )
            self._derive(batch_size=self.max_batch_size)

    def _check_idempotence(self, given: frozenset[str]) -> None:
        conflict = ""
        if self.acks_number != -1:
            conflict = f"acks={self.acks!r}; it needs acks='all'"
        elif self.max_in_flight_requests_per_connection > 5:
            conflict = (
                f"max_in_flight_requests_per_connection="
                f"{self.max_in_flight_requests_per_connection}; brokers remember 5 batches"
            )
        elif self.retries == 0:
            conflict = "retries=0; it needs at least 1"
        if not conflict:
            return
        if "enable_idempotence" in given:
            raise ConfigurationError(f"enable_idempotence=True contradicts {conflict}")
        if self.transactional_id is not None:
            raise ConfigurationError(f"transactional_id contradicts {conflict}")
        self._derive(enable_idempotence=False)

    def _check_transactional_id(self, transactional_id: str) -> None:
        try:
            check_transactional_id(transactional_id)
        except InvalidTransactionalIdError as error:
            raise ConfigurationError(
                f"{self.what} setting transactional_id: {error.message}"
            ) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptConfig(ProducerConfig):
    """The settings of an attempt's producer, whose transactional id is the attempt's."""

    what: ClassVar[str] = "attempt"

    client_id: str = "penstock-attempt"
    transaction_timeout_ms: int = _bounded(900_000, 1)
    """An attempt that nobody has committed after so long is aborted by the cluster."""

    def _check_transactional_id(self, transactional_id: str) -> None:
        assert parse_attempt(transactional_id) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerConfig(CommonConfig):
    """A consumer's settings."""

    what: ClassVar[str] = "consumer"

    client_id: str = "penstock-consumer"
    group_id: str | None = None
    """The consumer group, or None to read without one."""
    group_instance_id: str | None = None
    """A name that survives restarts: the member keeps its partitions over a short absence."""
    group_assignor: str = ""
    """The server-side assignor: uniform, range, roundrobin, or rackaware (partitions are read in
    their racks where that is even). The one that most members ask for is used; empty: no vote, and
    uniform when nobody votes."""
    client_rack: str = ""
    """The rack or zone in which this consumer runs, as in the brokers' node.rack."""
    auto_offset_reset: str = "latest"
    """Where to begin without a committed offset, or where the log no longer has it: earliest,
    latest, none (NoOffsetError), or by_duration: and an ISO 8601 duration, such as by_duration:P3D:
    at the first record that is at most so old, or at the end where none is."""
    isolation_level: IsolationLevel = "read_uncommitted"
    """Whether records of open and aborted transactions are read. With read_committed they are not:
    it reads up to where the oldest open transaction begins, and so far go the end offsets, `latest`
    and the lag."""
    enable_auto_commit: bool = True
    """Commit in the background what earlier polls handed out."""
    auto_commit_interval_ms: int = _bounded(5_000, 0)
    """How often."""
    fetch_min_bytes: int = _bounded(1, 0)
    """A broker answers a fetch when it has this much..."""
    fetch_max_bytes: int = _bounded(52_428_800, 1_024, 52_428_800)
    """...and never (far) more than this."""
    fetch_max_wait_ms: int = _bounded(500, 0)
    """...or when this time is over."""
    max_partition_fetch_bytes: int = _bounded(2_097_152, 1)
    """At most this much from one partition in an answer (but always one batch)."""
    prefetch_max_bytes: int = _bounded(67_108_864, 0, 2**63 - 1)
    """What is buffered and what is being fetched stay within this together, but for one
    partition's answer at a time and batches larger than what was asked for."""
    max_poll_records: int = _bounded(500, 1)
    """The most records that one poll hands out."""
    max_poll_interval_ms: int = _bounded(300_000, 1)
    """A member that does not poll for so long leaves the group, so that others take over."""
    session_timeout_ms: int = _bounded(45_000, 1)
    """The coordinator removes a member that is silent for so long."""
    default_api_timeout_ms: int = _bounded(60_000, 1)
    """How long commit(), position() and the like may take, and a damaged batch is asked for again
    before a poll raises CorruptRecordError."""
    key_deserializer: SerializerName | Deserializer = "bytes"
    """Makes keys of bytes."""
    value_deserializer: SerializerName | Deserializer = "bytes"
    """Makes values of bytes."""

    def _check_together(self, given: frozenset[str]) -> None:
        super(ConsumerConfig, self)._check_together(given)
        serializers.deserializer("key_deserializer", self.key_deserializer)
        serializers.deserializer("value_deserializer", self.value_deserializer)
        if self.group_id == "":
            raise ConfigurationError("group_id='' names no group; leave it out to read without one")
        if self.group_id is None:
            for name in ("group_instance_id", "group_assignor"):
                if name in given and getattr(self, name):
                    raise ConfigurationError(f"{name} is set, but group_id is not")
            if "enable_auto_commit" in given and self.enable_auto_commit:
                raise ConfigurationError("enable_auto_commit=True needs a group_id to commit under")
            self._derive(enable_auto_commit=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdminConfig(CommonConfig):
    """Administration's settings."""

    what: ClassVar[str] = "admin client"

    client_id: str = "penstock-admin"
    default_api_timeout_ms: int = _bounded(60_000, 1)
    """How long one operation may take with all its retries."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitConfig(AdminConfig):
    """The settings of a group's commits."""

    what: ClassVar[str] = "group commits"

    client_id: str = "penstock-commits"


_CHOICES: Final[Mapping[str, tuple[object, ...]]] = {
    "acks": ("all", 0, 1, -1, "0", "1", "-1"),
    "compression": ("none", "gzip", "snappy", "lz4", "zstd"),
    "isolation_level": ("read_uncommitted", "read_committed"),
}
_PATHS: Final = ("tls_ca", "tls_certificate", "tls_key")
_OPTIONAL_TEXT: Final = ("group_id", "group_instance_id", "transactional_id")


def _path_text(name: str, value: object) -> object:
    """A path as text; whatever else it is."""
    if name in _PATHS and isinstance(value, PathLike):
        return fspath(value)
    return value


def _suggest(name: str, known: list[str]) -> str:
    """The near name; for a longer or shorter form of a known name, that one."""
    for candidate in known:
        if candidate in name or (len(name) > 3 and name in candidate):
            return f"; did you mean {candidate!r}?"
    return suggest(name, known) or f"; the settings are {', '.join(sorted(known))}"


def _check(what: str, entry: Any, value: object) -> None:
    """Type, choice and bounds of one setting."""
    name = entry.name
    if name in _CHOICES:
        if isinstance(value, bool) or value not in _CHOICES[name]:
            choices = ", ".join(repr(choice) for choice in _CHOICES[name])
            raise ConfigurationError(f"{what} setting {name}={value!r}: one of {choices} is wanted")
    elif "low" in entry.metadata:
        low, high = entry.metadata["low"], entry.metadata["high"]
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise ConfigurationError(
                f"{what} setting {name}={value!r}: a whole number from {low} to {high} is wanted"
            )
    elif name == "auto_offset_reset":
        offset_reset.check(value)
    elif name == "partitioner":
        if not callable(value) and value not in ("default", "round_robin"):
            raise ConfigurationError(
                f"{what} setting {name}={value!r}: 'default', 'round_robin' or a callable is wanted"
            )
    elif not name.endswith("serializer"):
        _check_plain(what, name, entry.default, value)


def _check_plain(what: str, name: str, default: object, value: object) -> None:
    if name in _OPTIONAL_TEXT:
        if value is not None and not isinstance(value, str):
            raise ConfigurationError(f"{what} setting {name}={value!r}: text or None is wanted")
        if name == "group_id" and value:
            _check_group_id(what, value)
        return
    wanted = type(default) if default is not MISSING else str
    if not isinstance(value, wanted):
        kind = {"bool": "True or False", "str": "text"}.get(wanted.__name__, wanted.__name__)
        raise ConfigurationError(f"{what} setting {name}={value!r}: {kind} is wanted")


def _check_group_id(what: str, group_id: str) -> None:
    try:
        check_group_id(group_id)
    except InvalidGroupIdError as error:
        raise ConfigurationError(f"{what} setting group_id: {error.message}") from None


def _addresses(servers: str | Iterable[str]) -> tuple[Address, ...]:
    texts: list[Any] = [None]
    if isinstance(servers, str):
        texts = [*servers.split(",")]
    elif isinstance(servers, Iterable):
        texts = list(servers)
    if not all(isinstance(text, str) for text in texts):
        raise ConfigurationError(
            f"bootstrap_servers={servers!r}: 'host:port,host:port' or a list of them is wanted"
        )
    try:
        found = tuple(parse_address(text) for text in texts if text.strip())
    except ValueError as error:
        raise ConfigurationError(f"bootstrap_servers: {error}") from None
    if not found:
        raise ConfigurationError(
            "bootstrap_servers names no address; write host:port, such as localhost:9092"
        )
    return found
