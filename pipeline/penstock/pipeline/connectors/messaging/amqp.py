"""The source "penstock-amqp": messages of a queue of RabbitMQ, or of another AMQP 0-9-1 broker."""

from __future__ import annotations

import datetime
import json
import logging
import random
import threading
from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from pyspark.sql.datasource import DataSource, DataSourceStreamReader
from pyspark.sql.types import (
    BinaryType,
    BooleanType,
    IntegerType,
    MapType,
    StringType,
    StructType,
    TimestampType,
)

from penstock.pipeline.connectors.messaging.common import (
    AwayError,
    CommonOptions,
    Server,
    library,
)
from penstock.pipeline.connectors.messaging.inbox import Inbox
from penstock.pipeline.connectors.messaging.reader import MessageReader
from penstock.pipeline.errors import ConnectorError
from penstock.pipeline.option_map import OptionMap
from penstock.pipeline.own_schema import refuse_other
from penstock.pipeline.refused_stream import said_later

_log: Final = logging.getLogger(__name__)
WHERE: Final = "the penstock-amqp source"
_PULSE_S: Final = 0.2
_BACKOFF_S: Final = 0.2
_BACKOFF_MAX_S: Final = 15.0

# Under the names that AMQP gives them, in columns named as Spark's are.
_PROPERTIES: Final = {
    "contentType": "content_type", "contentEncoding": "content_encoding",
    "deliveryMode": "delivery_mode", "priority": "priority", "correlationId": "correlation_id",
    "replyTo": "reply_to", "expiration": "expiration", "messageId": "message_id", "type": "type",
    "userId": "user_id", "appId": "app_id",
}  # fmt: skip
_NUMBERS: Final = ("deliveryMode", "priority")


def _properties() -> StructType:
    made = StructType()
    for name in _PROPERTIES:
        made = made.add(name, IntegerType() if name in _NUMBERS else StringType())
    return made


SCHEMA: Final = (
    StructType()
    .add("body", BinaryType())
    .add("routingKey", StringType())
    .add("exchange", StringType())
    .add("headers", MapType(StringType(), StringType()))
    .add("properties", _properties())
    .add("timestamp", TimestampType())
    .add("redelivered", BooleanType())
    .add("received", TimestampType())
)


@dataclass(frozen=True, slots=True)
class AmqpOptions:
    """It pickles."""

    common: CommonOptions
    queue: str

    @classmethod
    def load(cls, given: Mapping[str, str | None]) -> AmqpOptions:
        """Raises OptionError."""
        options = OptionMap(given, where=WHERE)
        made = cls(
            common=CommonOptions.load(options, "amqp", (5672, 5671)),
            queue=options.required("queue", "name the queue to consume"),
        )
        options.finish()
        return made


class AmqpDataSource(DataSource):
    """``format("penstock-amqp")``: a streaming source."""

    @classmethod
    def name(cls) -> str:
        """What ``format`` is given."""
        return "penstock-amqp"

    def schema(self) -> StructType:
        """The columns. Connects first, unless checkOnLoad=false, so that a wrong host, queue or
        password is said by ``load()``. Raises OptionError and ConnectorError.
        """
        options = AmqpOptions.load(self.options)
        if options.common.check_on_load:
            connection, _, _ = open_queue(options)
            connection.close()
        return SCHEMA

    @said_later
    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 - Spark's.
        """For ``readStream``. What is wrong with it fails the query with OptionError."""
        options = AmqpOptions.load(self.options)
        refuse_other(schema, SCHEMA, WHERE)
        return AmqpReader(options)


class AmqpReader(MessageReader):
    """Of one query."""

    def __init__(self, options: AmqpOptions) -> None:
        super().__init__(SCHEMA, options.common.limits)
        self._options = options

    def connect(self) -> tuple[AmqpLink, Inbox[_Tag]]:
        """As ``MessageReader`` says."""
        inbox: Inbox[_Tag] = Inbox(WHERE, self._options.common.reconnect_timeout_s)
        return AmqpLink(self._options, inbox), inbox


# --- connecting -----------------------------------------------------------------------------------


def open_queue(options: AmqpOptions) -> tuple[Any, Any, int]:
    """A connection, a channel, and how many messages the queue has ready.

    Tries each server once. Raises ConnectorError for what no patience mends, AwayError otherwise.
    """
    pika = library("pika", "pika, the client for AMQP,")
    common = options.common
    reasons = []
    for server in common.servers:
        try:
            connection = pika.BlockingConnection(_parameters(pika, common, server))
        except pika.exceptions.AMQPConnectionError as error:
            _raise_if_final(pika, error, common, server)
            reasons.append(f"{server}: {_said(error)}")
            continue
        except OSError as error:  # Names that do not resolve.
            reasons.append(f"{server}: {error}")
            continue
        try:
            channel = connection.channel()
            found = channel.queue_declare(options.queue, passive=True)
            return connection, channel, found.method.message_count
        except pika.exceptions.ChannelClosedByBroker as error:
            connection.close()
            what = {404: "there is no such queue", 403: "access is refused"}.get(error.reply_code)
            if what is None:
                reasons.append(f"{server}: {_said(error)}")
                continue
            raise ConnectorError(
                f"{WHERE}: queue {options.queue!r} on {server}: {what}: {error.reply_text}; next: "
                "check option queue and the virtual host in url, or declare the queue and bind it"
            ) from error
        except pika.exceptions.AMQPError as error:
            reasons.append(f"{server}: {_said(error)}")
    raise AwayError(
        f"{WHERE}: no broker answers: {'; '.join(reasons)}; next: check option url, and that the "
        "broker runs"
    )


def _parameters(pika: Any, common: CommonOptions, server: Server) -> Any:
    tls = None
    if server.is_tls:
        tls = pika.SSLOptions(common.tls.context(WHERE), server.host)
    return pika.ConnectionParameters(
        host=server.host,
        port=server.port,
        virtual_host=server.path or "/",
        credentials=pika.PlainCredentials(common.username or "guest", common.password or "guest"),
        ssl_options=tls,
        heartbeat=common.heartbeat_s,
        socket_timeout=common.connect_timeout_s,
        stack_timeout=common.connect_timeout_s,
        blocked_connection_timeout=None,
        client_properties={"connection_name": "penstock-amqp"},
    )


def _raise_if_final(pika: Any, error: Exception, common: CommonOptions, server: Server) -> None:
    errors = pika.exceptions
    wrong = errors.AuthenticationError | errors.ProbableAuthenticationError
    if isinstance(error, wrong):
        raise ConnectorError(
            f"{WHERE}: {server} refuses user {common.username or 'guest'!r}: {_said(error)}; next: "
            "check username and password (guest may log in from the broker's own machine alone)"
        ) from error
    text = _said(error)
    if isinstance(error, errors.ProbableAccessDeniedError) or "NOT_ALLOWED" in text:
        raise ConnectorError(
            f"{WHERE}: {server} refuses virtual host {server.path or '/'!r}: {text}; next: check "
            "the path of url, and what the user may do"
        ) from error


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else repr(error)


# --- receiving ------------------------------------------------------------------------------------

_Tag = tuple[int, int]
"""Which connection, counted from 1, and the delivery's tag on it."""


class AmqpLink:
    """A thread that has the connection to itself, for pika's are not for several."""

    def __init__(self, options: AmqpOptions, inbox: Inbox[_Tag]) -> None:
        self._options = options
        self._inbox = inbox
        self._thread: threading.Thread | None = None
        self._closing = threading.Event()
        self._connection: Any = None
        self._channel: Any = None
        self._turn = 0
        self._outstanding: deque[int] = deque()
        self._acknowledged: set[int] = set()
        self._at_start = 0
        self._ready: int | None = None
        self._asked: threading.Event | None = None
        self._is_cancelled = False

    # --- from any thread ----------------------------------------------------------------------

    def start(self) -> None:
        """As ``Link`` says. Not being able to connect at first is final."""
        if self._thread is None:
            self._at_start = self._connect()
            self._thread = threading.Thread(target=self._run, name="penstock-amqp", daemon=True)
            self._thread.start()

    def acknowledge(self, tags: Sequence[_Tag]) -> None:
        """As ``Link`` says."""
        self._call(partial(self._acknowledge, tags))

    def waiting_at_start(self) -> int:
        """As ``Link`` says."""
        return self._at_start

    def is_exhausted(self) -> bool:
        """As ``Link`` says: whether the queue has nothing ready."""
        self._ready = None
        self._asked = asked = threading.Event()
        return asked.wait(1.0) and self._ready == 0

    def close(self) -> None:
        """As ``Link`` says."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join(10.0)

    def _call(self, what: Any) -> None:
        connection = self._connection
        try:
            if connection is not None:
                connection.add_callback_threadsafe(what)
        except library("pika", "pika").exceptions.AMQPError as error:
            # What was to be acknowledged is delivered anew.
            _log.debug("%s: the connection is gone: %s", WHERE, error)

    # --- in the thread ------------------------------------------------------------------------

    def _connect(self) -> int:
        connection, channel, ready = open_queue(self._options)
        self._turn += 1
        self._outstanding.clear()
        self._acknowledged.clear()
        self._is_cancelled = False
        channel.basic_qos(prefetch_count=self._options.common.prefetch)
        channel.basic_consume(self._options.queue, partial(self._receive, self._turn))
        channel.add_on_cancel_callback(self._cancelled)
        self._connection, self._channel = connection, channel
        self._inbox.up()
        return ready

    def _run(self) -> None:
        pika = library("pika", "pika")
        tries = 0
        while not self._closing.is_set():
            try:
                if self._connection is None:
                    self._connect()
                    _log.warning("%s: connected again", WHERE)
                tries = 0
                self._turn_once()
            except (pika.exceptions.AMQPError, AwayError, OSError) as error:
                self._drop(error)
                longest = min(_BACKOFF_MAX_S, _BACKOFF_S * 2.0**tries)
                self._closing.wait(longest * random.uniform(0.5, 1.0))
                tries += 1
            except ConnectorError as error:
                self._inbox.fail(error)
                return
            except Exception as error:
                _log.exception("%s: unexpected", WHERE)
                self._inbox.fail(ConnectorError(f"{WHERE}: {_said(error)}; next: report this"))
                return
        self._end(pika)

    def _end(self, pika: Any) -> None:
        try:
            if self._connection is not None:
                # Once more, for what was acknowledged last.
                self._connection.process_data_events(0)
                self._connection.close()
        except (pika.exceptions.AMQPError, OSError) as error:
            _log.warning("%s: the connection broke while it was closed: %s", WHERE, _said(error))

    def _drop(self, error: BaseException) -> None:
        _log.warning("%s: no connection, trying again: %s", WHERE, _said(error))
        connection, self._connection, self._channel = self._connection, None, None
        self._inbox.lost(_said(error), keep=False)
        try:
            if connection is not None and connection.is_open:
                connection.close()
        except Exception as again:
            _log.debug("%s: %s", WHERE, _said(again))

    def _turn_once(self) -> None:
        asked, self._asked = self._asked, None
        if asked is None:
            self._connection.process_data_events(_PULSE_S)
        else:
            found = self._channel.queue_declare(self._options.queue, passive=True)
            # What was delivered before this answer lies in pika's own queue still.
            self._connection.process_data_events(0)
            self._ready = found.method.message_count
            asked.set()
        if self._is_cancelled:
            # The queue is deleted, or its node is gone: to connect anew tells which.
            raise AwayError("the broker has ended the consumer")

    def _cancelled(self, _: Any) -> None:
        self._is_cancelled = True

    def _receive(self, turn: int, channel: Any, method: Any, properties: Any, body: bytes) -> None:
        tag = int(method.delivery_tag)
        self._outstanding.append(tag)
        row = to_row(method, properties, body, datetime.datetime.now(datetime.UTC))
        identity = _identity(method, properties, body)
        is_again = bool(method.redelivered)
        if not self._inbox.arrive(row, (turn, tag), identity, again=is_again):
            self._acknowledge([(turn, tag)])

    def _acknowledge(self, tags: Sequence[_Tag]) -> None:
        """What came in order is acknowledged by one frame, and the rest one by one."""
        singly = {tag for turn, tag in tags if turn == self._turn}
        if self._channel is None or not singly:
            return
        last = None
        while self._outstanding and self._outstanding[0] in singly | self._acknowledged:
            tag = self._outstanding.popleft()
            if tag in self._acknowledged:
                self._acknowledged.discard(tag)
                continue  # To name it again would close the channel.
            singly.discard(tag)
            last = tag
        if last is not None:
            self._channel.basic_ack(last, multiple=True)
        for tag in sorted(singly):
            self._channel.basic_ack(tag)
        self._acknowledged |= singly


def _identity(method: Any, properties: Any, body: bytes) -> Hashable | None:
    """By its message_id a message is known again; without one, equal ones are not the same."""
    if properties.message_id is None:
        return None
    return (properties.message_id, method.exchange, method.routing_key, body)


def to_row(
    method: Any, properties: Any, body: bytes, received: datetime.datetime
) -> tuple[Any, ...]:
    """A delivery in the order of SCHEMA."""
    return (
        body,
        method.routing_key,
        method.exchange,
        None if properties.headers is None else _texts(properties.headers),
        {name: getattr(properties, source) for name, source in _PROPERTIES.items()},
        _time(properties.timestamp),
        bool(method.redelivered),
        received,
    )


def _texts(headers: Mapping[str, Any]) -> dict[str, str | None]:
    """Text as it is, and what else AMQP's tables have as JSON."""
    return {
        name: value if value is None or isinstance(value, str) else json.dumps(value, default=_text)
        for name, value in headers.items()
    }


def _text(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def _time(seconds: Any) -> datetime.datetime | None:
    """AMQP has seconds; some write milliseconds, which no Python date may hold."""
    if seconds is None:
        return None
    if isinstance(seconds, datetime.datetime):
        return seconds if seconds.tzinfo else seconds.replace(tzinfo=datetime.UTC)
    try:
        return datetime.datetime.fromtimestamp(int(seconds), datetime.UTC)
    except (ValueError, OverflowError, OSError):
        return None
