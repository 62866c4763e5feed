"""The source "penstock-mqtt": messages of Mosquitto, or of another broker for MQTT 5."""

from __future__ import annotations

import datetime
import logging
import sys
import threading
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from pyspark.sql.datasource import DataSource, DataSourceStreamReader
from pyspark.sql.types import (
    BinaryType,
    BooleanType,
    IntegerType,
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
WHERE: Final = "the penstock-mqtt source"
_MQTT: Final = "paho.mqtt.client"
_BACKOFF_MAX_S: Final = 15
_LONGEST_EXPIRY_S: Final = 2**32 - 1
# Reason codes after which trying again is of no use.
_FINAL: Final = frozenset({0x84, 0x85, 0x86, 0x87, 0x8A, 0x8C, 0x90, 0x9A, 0x9B})
_TAKEN_OVER: Final = 0x8E
_SHORT_S: Final = 10.0
_MOST_SHORT: Final = 5

SCHEMA: Final = (
    StructType()
    .add("topic", StringType())
    .add("payload", BinaryType())
    .add("qos", IntegerType())
    .add("retain", BooleanType())
    .add("duplicate", BooleanType())
    .add("timestamp", TimestampType())
)


@dataclass(frozen=True, slots=True)
class MqttOptions:
    """It pickles."""

    common: CommonOptions
    topics: tuple[str, ...]
    client_id: str
    qos: int
    session_expiry_s: int
    quiet_s: float
    """A query that ends does so when nothing has come for so long."""

    @classmethod
    def load(cls, given: Mapping[str, str | None]) -> MqttOptions:
        """Raises OptionError."""
        options = OptionMap(given, where=WHERE)
        text = options.required("topics", "name one filter, or several with commas: sensors/+/t")
        topics = tuple(part.strip() for part in text.split(","))
        for topic in topics:
            if not _is_filter(topic):
                raise options.refusal(
                    "topics", f"{topic!r} is no filter: + stands for a whole level, # for the rest"
                )
        client_id = options.required(
            "clientId", "the broker keeps messages under it while the query is down; every query "
            "has one of its own, and always the same",
        )  # fmt: skip
        expiry = (options.span_ms("sessionExpiry", 86_400_000) or 0) // 1000
        if not 1 <= expiry <= _LONGEST_EXPIRY_S:
            raise options.refusal("sessionExpiry", "from 1s to 49710d")
        made = cls(
            common=CommonOptions.load(options, "mqtt", (1883, 8883)),
            topics=topics,
            client_id=client_id,
            # At 2 the client would have to keep on disk what it has taken over.
            qos=options.whole_number("qos", 1, low=0, high=1) or 0,
            session_expiry_s=expiry,
            quiet_s=(options.span_ms("availableNowQuiet", 2_000) or 0) / 1000,
        )
        if any(server.path for server in made.common.servers):
            raise options.refusal("url", "MQTT has no path")
        options.finish()
        return made


def _is_filter(text: str) -> bool:
    levels = text.split("/")
    return (
        bool(text)
        and "\0" not in text
        and all(level in ("+", "#") or not set("+#") & set(level) for level in levels)
        and "#" not in levels[:-1]
    )


class MqttDataSource(DataSource):
    """``format("penstock-mqtt")``: a streaming source."""

    @classmethod
    def name(cls) -> str:
        """What ``format`` is given."""
        return "penstock-mqtt"

    def schema(self) -> StructType:
        """The columns. Connects first, unless checkOnLoad=false, so that a wrong host or password
        is said by ``load()``. Raises OptionError and ConnectorError.
        """
        options = MqttOptions.load(self.options)
        if options.common.check_on_load:
            # Under its own id it would end the session of a query that runs.
            open_session(options, f"{options.client_id}-check", 0).close()
        return SCHEMA

    @said_later
    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 - Spark's.
        """For ``readStream``. What is wrong with it fails the query with OptionError."""
        options = MqttOptions.load(self.options)
        refuse_other(schema, SCHEMA, WHERE)
        return MqttReader(options)


class MqttReader(MessageReader):
    """Of one query."""

    def __init__(self, options: MqttOptions) -> None:
        super().__init__(SCHEMA, options.common.limits)
        self._options = options

    def connect(self) -> tuple[MqttLink, Inbox[_Tag]]:
        """As ``MessageReader`` says."""
        inbox: Inbox[_Tag] = Inbox(WHERE, self._options.common.reconnect_timeout_s)
        return MqttLink(self._options, inbox), inbox


_Tag = tuple[int, int]
"""Which session, counted from 1, and the message's id in it."""


def open_session(
    options: MqttOptions,
    client_id: str,
    expiry_s: int,
    prepare: Callable[[_Connection], None] = lambda connection: None,
) -> _Connection:
    """A connection to the first of the servers that takes it, subscribed where the session lasts.

    Each server is tried once, ``prepare`` called before. Raises ConnectorError.
    """
    reasons = []
    for server in options.common.servers:
        connection = _Connection(options, server, client_id, expiry_s)
        prepare(connection)
        try:
            return connection.open()
        except AwayError as error:
            reasons.append(str(error))
    raise ConnectorError(
        f"{WHERE}: no broker answers: {'; '.join(reasons)}; next: check option url, mqtt:// or "
        "mqtts://, and that the broker runs and speaks MQTT 5"
    )


class _Connection:
    """A client of paho, from its making until it stands."""

    def __init__(self, options: MqttOptions, server: Server, client_id: str, expiry_s: int) -> None:
        self.mqtt = library(_MQTT, "paho-mqtt, the client for MQTT,")
        self.server = server
        self._options = options
        self._expiry_s = expiry_s
        self._settled = threading.Event()
        self._refusal: ConnectorError | None = None
        common = options.common
        client = self.client = self.mqtt.Client(
            self.mqtt.CallbackAPIVersion.VERSION2,
            client_id=client_id,
            protocol=self.mqtt.MQTTv5,
            manual_ack=True,
        )
        client.connect_timeout = common.connect_timeout_s
        client.reconnect_delay_set(1, _BACKOFF_MAX_S)
        if common.username is not None:
            client.username_pw_set(common.username, common.password)
        if server.is_tls:  # And so are the others.
            client.tls_set_context(common.tls.context(WHERE))
        client.on_connect = self._connected
        client.on_subscribe = self._subscribed

    def open(self) -> _Connection:
        """Connect, and wait for the broker's word. Raises AwayError where another server may do
        better, and ConnectorError where it would not.
        """
        timeout_s = self._options.common.connect_timeout_s
        self.turn_to(self.server)
        try:
            self.client.reconnect()
        except (OSError, ValueError) as error:
            raise AwayError(f"{self.server}: {type(error).__name__}: {error}") from error
        self.client.loop_start()
        is_settled = self._settled.wait(timeout_s)
        if self._refusal is not None or not is_settled:
            self.close()
            raise self._refusal or AwayError(
                f"{self.server}: no answer of a broker for MQTT within {timeout_s:g} s"
            )
        return self

    def turn_to(self, server: Server) -> None:
        """Have the next connection made to this one. In paho's thread, or before it has one."""
        from paho.mqtt.packettypes import PacketTypes  # noqa: PLC0415 - it may be missing.
        from paho.mqtt.properties import Properties  # noqa: PLC0415 - it may be missing.

        common = self._options.common
        properties = Properties(PacketTypes.CONNECT)  # type: ignore[no-untyped-call]
        properties.SessionExpiryInterval = self._expiry_s
        properties.ReceiveMaximum = common.prefetch
        self.server = server
        self.client.connect_async(
            server.host, server.port, keepalive=common.heartbeat_s,
            clean_start=not self._expiry_s, properties=properties,
        )  # fmt: skip

    def close(self) -> None:
        """Idempotent."""
        self.client.disconnect()
        self.client.loop_stop()

    def refuse(self, error: ConnectorError) -> None:
        """While it opens; a link has its own way."""
        self._refusal = error
        self._settled.set()

    def _connected(self, client: Any, _: Any, flags: Any, reason: Any, __: Any) -> None:
        if reason.is_failure:
            is_final = reason.value in _FINAL
            text = f"{self.server}: {reason}"
            self.refuse(
                refusal(self._options, self.server, reason) if is_final else AwayError(text)
            )
        elif self._expiry_s:
            subscribe(client, self._options)
        else:
            self._settled.set()

    def _subscribed(self, _: Any, __: Any, ___: int, reasons: Sequence[Any], ____: Any) -> None:
        if (error := check_grants(self._options, reasons)) is not None:
            self.refuse(error)
        self._settled.set()


def subscribe(client: Any, options: MqttOptions) -> None:
    """To all filters. Retained messages come with a new subscription, not with each connection."""
    from paho.mqtt.subscribeoptions import SubscribeOptions  # noqa: PLC0415 - it may be missing.

    if_new = SubscribeOptions.RETAIN_SEND_IF_NEW_SUB
    wanted = SubscribeOptions(qos=options.qos, retainHandling=if_new)
    client.subscribe([(topic, wanted) for topic in options.topics])


def refusal(options: MqttOptions, server: Server, reason: Any) -> ConnectorError:
    """What to raise for a broker's no."""
    user = options.common.username
    return ConnectorError(
        f"{WHERE}: {server} refuses client {options.client_id!r}, "
        f"{'without a user' if user is None else f'user {user!r}'}: {reason}; next: check username "
        "and password, and that the broker speaks MQTT 5"
    )


def check_grants(options: MqttOptions, reasons: Sequence[Any]) -> ConnectorError | None:
    """What to raise where a subscription is refused, or granted less than was asked for."""
    for topic, reason in zip(options.topics, reasons, strict=False):
        if reason.is_failure:
            return ConnectorError(
                f"{WHERE}: the broker refuses the subscription to {topic!r}: {reason}; next: check "
                "topics, and what the user may read"
            )
        if reason.value < options.qos:
            return ConnectorError(
                f"{WHERE}: the broker grants {topic!r} no more than {reason}, and could lose "
                "messages; next: allow QoS 1 there, or take that with qos=0"
            )
    return None


class MqttLink:
    """A connection that paho keeps up, with a thread of its own, from server to server."""

    def __init__(self, options: MqttOptions, inbox: Inbox[_Tag]) -> None:
        self._options = options
        self._inbox = inbox
        self._connection: _Connection | None = None
        self._session = 1
        self._session_at: Server | None = None
        self._at = 0
        """Which of the servers it is that the connection is to."""
        self._was_up = True
        self._lock = threading.Lock()
        self._is_closing = False
        self._up_at = 0.0
        self._short_ones = 0

    def start(self) -> None:
        """As ``Link`` says. Not being able to connect at first is final."""
        if self._connection is not None:
            return
        options = self._options
        opened = open_session(options, options.client_id, options.session_expiry_s, self._prepare)
        client = opened.client
        self._session_at = opened.server
        self._at = options.common.servers.index(opened.server)
        self._up_at = time.monotonic()
        self._connection = opened
        client.on_connect = self._guarded(self._connected)
        client.on_subscribe = self._guarded(self._subscribed)
        client.on_connect_fail = self._guarded(self._failed)
        self._inbox.up()

    def _prepare(self, connection: _Connection) -> None:
        # Messages of the session may come before the broker's word on the subscription. Those of a
        # server that was given up since come again from there, or not at all.
        self._inbox.lost("not connected yet", keep=False)
        self._inbox.up(forgotten=True)
        self._session += 1
        connection.client.on_message = self._guarded(self._receive)
        connection.client.on_disconnect = self._guarded(self._disconnected)

    def acknowledge(self, tags: Sequence[_Tag]) -> None:
        """As ``Link`` says."""
        assert self._connection is not None
        with self._lock:  # Between the look at the session and the sending it must stay the same.
            for session, message_id in tags:
                if session == self._session:
                    self._connection.client.ack(message_id, 1)

    def waiting_at_start(self) -> None:
        """As ``Link`` says: MQTT has no word for it."""

    def is_exhausted(self) -> bool:
        """As ``Link`` says: whether nothing has come for a while."""
        return self._inbox.quiet_s() >= self._options.quiet_s

    def close(self) -> None:
        """As ``Link`` says. The session stays, with what is not acknowledged."""
        if self._connection is not None and not self._is_closing:
            self._is_closing = True
            self._connection.close()

    # --- in paho's thread ---------------------------------------------------------------------

    def _guarded(self, call: Callable[..., None]) -> Callable[..., None]:
        """What paho calls: it would end its thread by what is raised there, and tell nobody."""

        def run(*arguments: Any) -> None:
            try:
                call(*arguments)
            except Exception as error:
                _log.exception("%s: unexpected", WHERE)
                what = f"{type(error).__name__}: {error}"
                self._inbox.fail(ConnectorError(f"{WHERE}: {what}; next: report this"))

        return run

    def _connected(self, client: Any, _: Any, flags: Any, reason: Any, __: Any) -> None:
        assert self._connection is not None
        server = self._connection.server
        if reason.is_failure:
            if reason.value in _FINAL:
                self._inbox.fail(refusal(self._options, server, reason))
            else:
                self._inbox.lost(f"{server}: {reason}", keep=True)
            return
        if not flags.session_present:
            _log.warning(
                "%s: %s has no session of %r, or has forgotten it: messages may be missing",
                WHERE, server, self._options.client_id,
            )  # fmt: skip
        # Another server may be of the same cluster, or may give the same numbers to other messages.
        is_new = not flags.session_present or server != self._session_at
        if is_new:
            with self._lock:
                self._session += 1
        self._session_at, self._was_up = server, True
        self._up_at = time.monotonic()
        self._inbox.up(forgotten=is_new)
        subscribe(client, self._options)

    def _subscribed(self, _: Any, __: Any, ___: int, reasons: Sequence[Any], ____: Any) -> None:
        if (error := check_grants(self._options, reasons)) is not None:
            self._inbox.fail(error)

    def _disconnected(self, _: Any, __: Any, flags: Any, reason: Any, ___: Any) -> None:
        if self._is_closing:
            return
        # Many brokers only close the connection when another client comes under the same name; and
        # the two would take it from each other for ever.
        if self._was_up:
            is_short = time.monotonic() - self._up_at < _SHORT_S
            self._short_ones = self._short_ones + 1 if is_short else 0
        if reason.value == _TAKEN_OVER or self._short_ones >= _MOST_SHORT:
            self._inbox.fail(
                ConnectorError(
                    f"{WHERE}: the broker ends the session of {self._options.client_id!r} again "
                    f"and again ({reason}), as where another client has the same name; next: give "
                    "each query a clientId of its own"
                )
            )
            return
        self._turn(str(reason))

    def _failed(self, _: Any, __: Any) -> None:
        error = sys.exception()  # Paho is handling it, and hands it to nobody.
        self._turn(f"{type(error).__name__}: {error}")

    def _turn(self, reason: str) -> None:
        """Have it tried again: at the same server, which has the session, and then at the next."""
        if self._connection is None:  # The first connection is still being made.
            self._inbox.lost(reason, keep=False)
            return
        if self._is_closing:
            return
        servers, before = self._options.common.servers, self._connection.server
        if not self._was_up:
            self._at = (self._at + 1) % len(servers)
        self._was_up = False
        self._connection.turn_to(servers[self._at])
        _log.warning(
            "%s: no connection to %s: %s; trying %s", WHERE, before, reason, servers[self._at]
        )
        self._inbox.lost(f"{before}: {reason}", keep=True)

    def _receive(self, client: Any, _: Any, message: Any) -> None:
        row = to_row(message, datetime.datetime.now(datetime.UTC))
        if message.qos == 0:
            self._inbox.arrive(row, None, None, again=False)
            return
        # The broker cannot give the id to another message before we have acknowledged this one.
        identity: Hashable = (message.mid, message.topic, message.payload)
        tag = (self._session, message.mid)
        if not self._inbox.arrive(row, tag, identity, again=bool(message.dup)):
            client.ack(message.mid, message.qos)


def to_row(message: Any, received: datetime.datetime) -> tuple[Any, ...]:
    """A message in the order of SCHEMA."""
    return (
        message.topic,
        bytes(message.payload),
        int(message.qos),
        bool(message.retain),
        bool(message.dup),
        received,
    )
