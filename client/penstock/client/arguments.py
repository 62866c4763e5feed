"""Checks of what applications pass in: a wrong argument is refused before anything is done with it.

Each function gives back the value as the rest of the client wants it, or raises an error that
names the argument, what it was and what is wanted: InvalidRequestError, InvalidTopicError for a
name that no topic can have, InvalidGroupIdError for an id that no group can have.
"""

from __future__ import annotations

import operator
import re
import reprlib
import uuid
from collections.abc import Iterable, Mapping
from typing import Any, Final

from penstock.client.model import GroupMetadata, OffsetAndMetadata, RebalanceListener
from penstock.wire.errors import InvalidRequestError
from penstock.wire.ids import TopicPartition
from penstock.wire.names import check_group_id, check_topic_name
from penstock.wire.transport import parse_address

MAX_INT32: Final = 2**31 - 1
MAX_INT64: Final = 2**63 - 1

_LISTENER_METHODS: Final = (
    "on_partitions_revoked",
    "on_partitions_assigned",
    "on_partitions_lost",
)


def refusal(name: str, value: object, wanted: str) -> InvalidRequestError:
    """The error for an argument: what it is called, what it was, what is wanted."""
    return InvalidRequestError(f"{name}={reprlib.repr(value)}: {wanted} is wanted")


def text(name: str, value: object, wanted: str) -> str:
    """A str."""
    if isinstance(value, str):
        if not is_encodable(value):
            raise refusal(name, value, "text that UTF-8 can encode")
        return value
    hint = " (decode() the bytes)" if isinstance(value, bytes | bytearray) else ""
    raise refusal(name, value, f"{wanted} as str{hint}")


def is_encodable(value: str) -> bool:
    """Whether UTF-8 can encode the text (it has no lone surrogates)."""
    if value.isascii():
        return True
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def flag(name: str, value: object) -> bool:
    """True or False."""
    if not isinstance(value, bool):
        raise refusal(name, value, "True or False")
    return value


def data(name: str, value: object) -> bytes:
    """Bytes as given. Raises InvalidRequestError for anything else."""
    if not isinstance(value, bytes):
        raise refusal(name, value, "bytes are wanted")
    return value


def whole_number(
    name: str, value: Any, low: int = -MAX_INT64 - 1, high: int = MAX_INT64, unit: str = ""
) -> int:
    """An int from ``low`` to ``high``; whatever stands for one (as numpy's do) counts."""
    wanted = f"a whole number{unit}"
    if isinstance(value, bool):
        raise refusal(name, value, wanted)
    try:
        number = operator.index(value)
    except TypeError:
        hint = ""
        if isinstance(value, str) and value.strip().isdecimal():
            hint = f" (such as {value.strip()}, without quotes)"
        raise refusal(name, value, wanted + hint) from None
    if not low <= number <= high:
        raise refusal(name, value, f"{wanted} from {low} to {high}")
    return number


def address(name: str, value: Any) -> tuple[str, int]:
    """Host and port of ``host:port``."""
    wanted = text(name, value, "host:port")
    try:
        return parse_address(wanted)
    except ValueError as error:
        raise InvalidRequestError(f"{name}: {error}") from None


def int32(name: str, value: Any) -> int:
    """A whole number as the protocol counts with; what it may be is the cluster's to say."""
    return whole_number(name, value, -MAX_INT32 - 1, MAX_INT32)


def timeout_ms(value: Any, name: str = "timeout_ms") -> float | None:
    """Milliseconds, or None for no bound."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
        raise refusal(name, value, "a number of milliseconds from 0 on, or None for no bound,")
    return value


def max_records(value: Any) -> int | None:
    """How many records one poll may hand out, or None."""
    return None if value is None else whole_number("max_records", value, 1)


def topic(value: Any, name: str = "topic") -> str:
    """A topic's name."""
    found = text(name, value, "a topic's name")
    check_topic_name(found)
    return found


def topic_id(value: object, name: str = "topic_id") -> bytes:
    """A topic's id, as the bytes of the UUID."""
    wanted = "the UUID of a topic"
    try:
        return uuid.UUID(text(name, value, wanted)).bytes
    except ValueError:
        raise refusal(name, value, wanted) from None


def topics(value: Any, name: str = "topics") -> tuple[str, ...]:
    """Topics' names."""
    return tuple(topic(entry) for entry in each(name, value, "topics' names"))


def subscription(value: Any) -> tuple[str, ...] | re.Pattern[str]:
    """What to subscribe to: one topic's name, several, or a compiled pattern."""
    if isinstance(value, re.Pattern):
        return value
    if isinstance(value, str):
        return (topic(value, "topics"),)
    return topics(value)


def group_id(value: Any, name: str = "group_id") -> str:
    """A group's id."""
    found = text(name, value, "a group's id")
    check_group_id(found)
    return found


def group_ids(value: Any, name: str = "group_ids") -> tuple[str, ...]:
    """Groups' ids."""
    return tuple(group_id(entry, "group_id") for entry in each(name, value, "groups' ids"))


def texts(name: str, value: Any, wanted: str) -> list[str]:
    """Several str."""
    return [text(f"an entry of {name}", entry, wanted) for entry in each(name, value, wanted)]


def listed(name: str, value: Any) -> list[Any]:
    """A list of whatever is in ``value``, which is left alone; the list itself where it is one."""
    if isinstance(value, str | bytes | bytearray | Mapping) or not isinstance(value, Iterable):
        raise refusal(name, value, "a list, or something else to iterate over,")
    return value if type(value) is list else list(value)


def each(name: str, value: Any, wanted: str) -> tuple[Any, ...]:
    """The entries of an iterable that is no single text."""
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        hint = f"; for one, write [{reprlib.repr(value)}]" if isinstance(value, str) else ""
        raise InvalidRequestError(
            f"{name}={reprlib.repr(value)}: a list of {wanted} is wanted{hint}"
        )
    return tuple(value)


def mapping(name: str, value: Any, wanted: str) -> Mapping[Any, Any]:
    """A mapping."""
    if not isinstance(value, Mapping):
        raise refusal(name, value, f"a mapping of {wanted}")
    return value


def partition(value: Any, name: str = "partition") -> TopicPartition:
    """A partition; a plain pair of topic and number counts."""
    if not isinstance(value, tuple) or len(value) != 2:
        hint = " (unpack a list with *)" if isinstance(value, list | set | frozenset) else ""
        raise refusal(name, value, f"TopicPartition(topic, number){hint}")
    return TopicPartition(
        topic(value[0]), whole_number("partition", value[1], -MAX_INT32 - 1, MAX_INT32)
    )


def partitions(value: Any, name: str = "partitions") -> tuple[TopicPartition, ...]:
    """Partitions."""
    if isinstance(value, TopicPartition):
        raise refusal(name, value, f"a list of them, [{value!r}],")
    return tuple(partition(entry) for entry in each(name, value, "TopicPartition"))


def each_partition(values: Iterable[Any]) -> tuple[TopicPartition, ...]:
    """Partitions given one by one."""
    return tuple(partition(entry) for entry in values)


def offsets_by_partition(
    name: str, value: Any, low: int = 0, unit: str = ""
) -> dict[TopicPartition, int]:
    """A whole number for each partition."""
    return {
        (where := partition(key)): whole_number(f"{name}[{where}]", number, low, unit=unit)
        for key, number in mapping(name, value, "partitions to whole numbers").items()
    }


def times(value: Any, places: Mapping[str, int]) -> dict[TopicPartition, int]:
    """For each partition a time, or the number that stands for a place in the log."""
    found: dict[TopicPartition, int] = {}
    for key, spec in mapping("partitions", value, "partitions to times or places").items():
        where = partition(key)
        name = f"partitions[{where}]"
        if isinstance(spec, str):
            if spec not in places:
                known = ", ".join(map(repr, places))
                raise refusal(name, spec, f"a time in milliseconds or one of {known}")
            found[where] = places[spec]
        else:
            found[where] = whole_number(name, spec, min(places.values()), unit=" of milliseconds")
    return found


def positions(value: Any, name: str = "offsets") -> dict[TopicPartition, OffsetAndMetadata]:
    """What to commit: for each partition an offset, with or without the application's words."""
    return {
        (where := partition(key)): _position(f"{name}[{where}]", entry)
        for key, entry in mapping(name, value, "partitions to offsets").items()
    }


def group_metadata(value: Any, name: str = "group") -> GroupMetadata:
    """Who commits positions in a transaction."""
    if not isinstance(value, GroupMetadata):
        raise refusal(name, value, "what consumer.group_metadata() returns")
    group_id(value.group_id, f"{name}.group_id")
    return value


def optional_positions(value: Any) -> dict[TopicPartition, OffsetAndMetadata] | None:
    """What to commit, or None."""
    return None if value is None else positions(value)


def _position(name: str, value: Any) -> OffsetAndMetadata:
    if not isinstance(value, OffsetAndMetadata):
        return OffsetAndMetadata(whole_number(name, value, 0))
    return OffsetAndMetadata(
        whole_number(f"{name}.offset", value.offset, 0),
        whole_number(f"{name}.leader_epoch", value.leader_epoch, -1, MAX_INT32),
        text(f"{name}.metadata", value.metadata, "the application's own words"),
        _topic_id(f"{name}.topic_id", value.topic_id),
    )


def _topic_id(name: str, value: object) -> bytes:
    if not isinstance(value, bytes):
        raise refusal(name, value, "a record's topic_id, or b''")
    return value


def configs(value: Any, name: str = "configs") -> dict[str, str]:
    """Topic configs as the cluster takes them; numbers and booleans may be given as such."""
    return {
        text(f"a key of {name}", key, "a config's name"): _config_text(f"{name}[{key!r}]", entry)
        for key, entry in mapping(name, value, "configs to values").items()
    }


def _config_text(name: str, value: object) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return str(value)
    raise refusal(name, value, "text, a number, True or False")


def assignments(value: Any, name: str = "replica_assignments") -> list[list[int]]:
    """Node ids by partition."""
    return [
        [whole_number("a node id", node, 0, MAX_INT32) for node in each(name, replicas, "node ids")]
        for replicas in each(name, value, "lists of node ids")
    ]


def reassignments(value: Any) -> dict[TopicPartition, list[int]]:
    """Node ids by partition; None (or none) cancels."""
    wanted = "partitions to lists of node ids, or to None"
    return {
        (where := partition(key)): []
        if replicas is None
        else [
            whole_number("a node id", node, 0, MAX_INT32)
            for node in each(f"reassignments[{where}]", replicas, "node ids")
        ]
        for key, replicas in mapping("reassignments", value, wanted).items()
    }


def listener(value: Any) -> RebalanceListener | None:
    """Who hears of rebalances, or None."""
    missing = (
        []
        if value is None
        else [method for method in _LISTENER_METHODS if not callable(getattr(value, method, None))]
    )
    if missing:
        raise refusal("listener", value, f"an object with {' and '.join(missing)}")
    found: RebalanceListener | None = value
    return found
