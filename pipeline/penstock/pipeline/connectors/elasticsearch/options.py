"""What the sink "penstock-elasticsearch" is told."""

from __future__ import annotations

import enum
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import urlsplit

from penstock.pipeline.connectors.tls import TlsOptions
from penstock.pipeline.option_map import ClientSettings, OptionMap

WHERE: Final = "the penstock-elasticsearch sink"
RECORD: Final = "record"
"""The id that is made of a record's topic, partition and offset."""
PLACE: Final = ("topic", "partition", "offset")
_BYTES: Final = "keys and values of dead letters are bytes already; leave it out"
_NO_TRANSACTIONS: Final = "dead letters have no transactions; leave it out"
_OURS: Final = {
    "key_serializer": _BYTES,
    "value_serializer": _BYTES,
    "transactional_id": _NO_TRANSACTIONS,
    "transaction_timeout_ms": _NO_TRANSACTIONS,
}


class OnError(enum.Enum):
    """What becomes of a row that Elasticsearch refuses for good."""

    FAIL = "fail"
    DEAD_LETTER = "deadLetter"
    SKIP = "skip"


class Tombstones(enum.Enum):
    """What a row without a value does."""

    DELETE = "delete"
    IGNORE = "ignore"
    FAIL = "fail"


class WriteMethod(enum.Enum):
    """How a document is written where there is one already."""

    INDEX = "index"
    UPSERT = "upsert"


@dataclass(frozen=True, slots=True)
class Access:
    """Where Elasticsearch is, and how one gets in."""

    urls: tuple[str, ...]
    username: str | None
    password: str | None = field(repr=False)
    api_key: str | None = field(repr=False)
    tls: TlsOptions
    gzip: bool
    request_timeout_s: float


@dataclass(frozen=True, slots=True)
class Limits:
    """How much goes into one request, and for how long it is tried."""

    actions: int
    bytes: int
    retry_timeout_s: float
    """Without any progress."""
    backoff_s: float
    backoff_max_s: float


@dataclass(frozen=True, slots=True)
class ElasticsearchOptions:
    """All of it, checked. It pickles."""

    access: Access
    limits: Limits
    index: str | None
    """None: the row's topic in lower case."""
    id_column: str | None
    """None: topic+partition+offset."""
    version_column: str | None
    from_columns: bool
    """The document has all columns of the row; otherwise it is the text in column value."""
    method: WriteMethod
    tombstones: Tombstones
    ingest_pipeline: str | None
    on_error: OnError
    dead_letter_topic: str | None
    producer: ClientSettings | None

    @classmethod
    def load(
        cls, given: Mapping[str, str | None], columns: Collection[str]
    ) -> ElasticsearchOptions:
        """From an option map, for rows with these columns. Raises OptionError."""
        options = OptionMap.of_sink(given, where=WHERE)
        access, limits = _access(options), _limits(options)
        id_column = _id_column(options, columns)
        method = WriteMethod(options.choice("writeMethod", _values(WriteMethod), "index"))
        from_columns = _from_columns(options, columns)
        on_error = OnError(options.choice("onError", _values(OnError), OnError.FAIL.value))
        topic, producer = _dead_letters(options, on_error)
        made = cls(
            access=access,
            limits=limits,
            index=_index(options, columns),
            id_column=id_column,
            version_column=_version_column(options, columns, id_column, method),
            from_columns=from_columns,
            method=method,
            tombstones=_tombstones(options, id_column, from_columns=from_columns),
            ingest_pipeline=_ingest_pipeline(options, method),
            on_error=on_error,
            dead_letter_topic=topic,
            producer=producer,
        )
        options.finish()
        return made


def _values(kind: type[enum.Enum]) -> list[str]:
    return [entry.value for entry in kind]


def _access(options: OptionMap) -> Access:
    urls = tuple(
        part.strip() for part in options.required("url", "write http://host:9200").split(",")
    )
    for url in urls:
        try:
            parts = urlsplit(url)
            good = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        except ValueError:
            good = False
        if not good:
            raise options.refusal("url", "http://host:port or https://host:port, or several with ,")
        if parts.username is not None or parts.query or parts.fragment:
            raise options.contradiction(
                "url has more in it than scheme, host, port and path; give credentials as username "
                "and password, or as apiKey"
            )
    if len({urlsplit(url).scheme for url in urls}) > 1:
        raise options.contradiction(
            "url has http:// and https://, so that credentials and documents would be readable on "
            "the way to some of the nodes; write the same for all of them"
        )
    username, password = options.text("username"), options.text("password")
    api_key = options.text("apiKey")
    if (username is None) != (password is None):
        raise options.contradiction("username and password go together; one of them is missing")
    if username is not None and api_key is not None:
        raise options.contradiction("username and apiKey contradict each other; leave one out")
    return Access(
        urls=urls,
        username=username,
        password=password,
        api_key=api_key,
        tls=TlsOptions.load(options),
        gzip=options.flag("gzip", False),
        request_timeout_s=_seconds(options, "requestTimeout", 60_000, low=1),
    )


def _limits(options: OptionMap) -> Limits:
    return Limits(
        actions=options.whole_number("maxActionsPerRequest", 1000, low=1) or 0,
        bytes=options.whole_number("maxBytesPerRequest", 5_000_000, low=1) or 0,
        retry_timeout_s=_seconds(options, "retryTimeout", 120_000),
        backoff_s=_seconds(options, "retryBackoff", 200),
        backoff_max_s=_seconds(options, "retryBackoffMax", 10_000),
    )


def _seconds(options: OptionMap, name: str, default: int, *, low: int = 0) -> float:
    return (options.span_ms(name, default, low=low) or 0) / 1000


def _index(options: OptionMap, columns: Collection[str]) -> str | None:
    index = options.text("index")
    if index is None and "topic" not in columns:
        raise options.contradiction(
            "option index is missing; it may be left out only where the rows have a column topic"
        )
    if index is not None and index != index.lower():
        raise options.refusal("index", "the names of indices are in lower case")
    return index


def _id_column(options: OptionMap, columns: Collection[str]) -> str | None:
    name = options.text("id", RECORD) or RECORD
    if name != RECORD:
        _check_column(options, "id", name, columns)
        return name
    if missing := [entry for entry in PLACE if entry not in columns]:
        raise options.contradiction(
            f"id={RECORD} is made of topic, partition and offset, and the rows have no column "
            f"{missing[0]}; name the column that has each document's id: id=NAME"
        )
    return None


def _version_column(
    options: OptionMap, columns: Collection[str], id_column: str | None, method: WriteMethod
) -> str | None:
    # Only of a record's key all versions are in one partition, whose offsets are in their order.
    automatic = id_column == "key" and "offset" in columns and method is WriteMethod.INDEX
    name = options.text("version", "offset" if automatic else "none") or "none"
    if name == "none":
        return None
    if method is WriteMethod.UPSERT:
        raise options.contradiction(
            "Elasticsearch takes no versions of one's own with writeMethod=upsert; leave version "
            "out, or write whole documents with writeMethod=index"
        )
    _check_column(options, "version", name, columns)
    return name


def _check_column(options: OptionMap, option: str, name: str, columns: Collection[str]) -> None:
    if name not in columns:
        raise options.refusal(option, f"no such column; the rows have {', '.join(columns)}")


def _from_columns(options: OptionMap, columns: Collection[str]) -> bool:
    automatic = "value" if "value" in columns else "columns"
    found = options.choice("document", ("value", "columns"), automatic)
    if found == "value":
        _check_column(options, "document", "value", columns)
    return found == "columns"


def _tombstones(options: OptionMap, id_column: str | None, *, from_columns: bool) -> Tombstones:
    automatic = Tombstones.FAIL if id_column is None else Tombstones.DELETE
    if from_columns and options.has("tombstones"):
        raise options.contradiction("tombstones is about column value, and document=columns has it")
    found = Tombstones(options.choice("tombstones", _values(Tombstones), automatic.value))
    if found is Tombstones.DELETE and id_column is None:
        raise options.contradiction(
            "tombstones=delete wants to know which document a row is about; say it with id=key"
        )
    return found


def _ingest_pipeline(options: OptionMap, method: WriteMethod) -> str | None:
    name = options.text("ingestPipeline")
    if name is not None and method is WriteMethod.UPSERT:
        raise options.contradiction("ingest pipelines work with writeMethod=index alone")
    return name


def _dead_letters(
    options: OptionMap, on_error: OnError
) -> tuple[str | None, ClientSettings | None]:
    if on_error is OnError.DEAD_LETTER:
        topic = options.required("deadLetterTopic", "name the topic for rows that are refused")
        return topic, options.acknowledged_settings(ours=_OURS)
    if options.has("deadLetterTopic"):
        raise options.contradiction("deadLetterTopic is of use with onError=deadLetter alone")
    return None, None
