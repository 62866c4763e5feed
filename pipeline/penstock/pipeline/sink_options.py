"""The options of the sink, checked before anything runs. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Final

from penstock.client import PenstockError
from penstock.client.config import AttemptConfig, CommitConfig
from penstock.pipeline.option_map import ClientSettings, OptionMap
from penstock.wire.transactional_ids import check_commit_group

_WHERE: Final = "the penstock sink"
_DEFAULT_SINK_ID: Final = "penstock"
_CHECKED: Final = "checked"
_TRUSTED: Final = "trusted"
_MAX_SINK_ID_BYTES: Final = 249  # As of a topic's name, which is the default.

# An attempt's id for the check of settings alone; the real one is made of the task's numbers.
_SOME_ATTEMPT: Final = "__attempt/0/0/0/check"

_BYTES: Final = "keys and values are columns of bytes or text already; leave it out"
_OURS: Final = {
    "key_serializer": _BYTES,
    "value_serializer": _BYTES,
    "transactional_id": "the sink makes it of the query, batch and task; set sinkId instead",
}
_CALLED: Final = {
    "transactional_id": "delivery=exactly-once (the default; the other is at-least-once)"
}
_OURS_WITHOUT_TRANSACTIONS: Final = {
    **_OURS,
    "transactional_id": "delivery=at-least-once has no transactions; leave it out",
    "transaction_timeout_ms": "delivery=at-least-once has no transactions; leave it out",
}


class Delivery(Enum):
    """What a row that Spark handed over once comes to in the log."""

    EXACTLY_ONCE = "exactly-once"
    AT_LEAST_ONCE = "at-least-once"


@dataclass(frozen=True, slots=True)
class SinkOptions:
    """What a write was told. It pickles, since tasks get it."""

    topic: str | None
    """Where all rows go; None where their column ``topic`` says it."""
    delivery: Delivery
    sink_id: str
    """Which of a query's writes this is, over all its restarts."""
    client: ClientSettings
    transaction: tuple[str, int] | None = None
    """Who writes, and the number of this write, where the write says so itself."""
    checkpoint: str | None = None
    """Where the query keeps what it has planned."""
    checks_replays: bool = True
    """Whether what comes under a committed number has to be what was written under it."""

    @classmethod
    def load(cls, given: Mapping[str, str | None]) -> SinkOptions:
        """The options of ``df.write`` and ``df.writeStream``. Raises OptionError."""
        options = OptionMap.of_sink(given, where=_WHERE)
        checkpoint = options.text("checkpointLocation")
        topic = options.text("topic")
        words = [delivery.value for delivery in Delivery]
        delivery = Delivery(options.choice("delivery", words, Delivery.EXACTLY_ONCE.value))
        sink_id = options.text("sinkId")
        if sink_id is not None and len(sink_id.encode()) > _MAX_SINK_ID_BYTES:
            raise options.refusal("sinkId", f"at most {_MAX_SINK_ID_BYTES} bytes are wanted")
        transaction = _transaction(options, delivery, sink_id or topic or _DEFAULT_SINK_ID)
        replay = options.choice("replay", [_CHECKED, _TRUSTED], _CHECKED)
        if delivery is Delivery.EXACTLY_ONCE:
            client = options.client_settings(
                CommitConfig,
                AttemptConfig,
                ours=_OURS,
                assumed={AttemptConfig: {"transactional_id": _SOME_ATTEMPT}},
                called=_CALLED,
            )
        else:
            if sink_id is not None:
                raise options.contradiction(
                    "sinkId is for delivery=exactly-once; leave one of them out"
                )
            if replay != _CHECKED:
                raise options.contradiction(
                    "replay is for delivery=exactly-once; leave one of them out"
                )
            client = options.acknowledged_settings(ours=_OURS_WITHOUT_TRANSACTIONS)
        options.finish()
        return cls(
            topic,
            delivery,
            sink_id or topic or _DEFAULT_SINK_ID,
            client,
            transaction,
            checkpoint,
            replay == _CHECKED,
        )


def _transaction(options: OptionMap, delivery: Delivery, sink_id: str) -> tuple[str, int] | None:
    writer, number = options.text("txnAppId"), options.whole_number("txnVersion")
    if writer is None and number is None:
        return None
    if writer is None or number is None:
        raise options.contradiction("txnAppId and txnVersion go together; one is missing")
    if delivery is not Delivery.EXACTLY_ONCE:
        raise options.contradiction(
            "txnAppId and txnVersion are for delivery=exactly-once; leave one of them out"
        )
    try:
        check_commit_group(group_of_writer(writer, sink_id))
    except PenstockError as error:
        raise options.refusal("txnAppId", error.message) from None
    return writer, number


def group_of_query(query: str, sink_id: str) -> str:
    """The group of commits of a query and one of its sinks. ``query`` is a UUID, as Spark's are: of
    one length, so that no two pairs give one group.
    """
    return f"spark-{query}-{sink_id}"


def group_of_writer(writer: str, sink_id: str) -> str:
    """The group of who numbers its writes itself. With its length before it no two pairs give one:
    of two writers in one group each would take the other's batches for its own, written already.
    """
    return f"spark-txn-{len(writer)}-{writer}-{sink_id}"
