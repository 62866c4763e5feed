"""What happens to a Fetcher, and what it wants done."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.client.core.subscription import Position
from penstock.wire.batch import Buffer
from penstock.wire.errors import PenstockError
from penstock.wire.ids import TopicPartition

# --- events --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Woken:
    """Time passed, metadata changed, records were taken."""


@dataclass(frozen=True, slots=True)
class Added:
    """These partitions are to be read; their positions come with PositionFound."""

    partitions: tuple[TopicPartition, ...]


@dataclass(frozen=True, slots=True)
class Removed:
    """These partitions are no longer to be read."""

    partitions: tuple[TopicPartition, ...]


@dataclass(frozen=True, slots=True)
class PositionFound:
    """Reading begins, or goes on after a seek or reset, here.

    The position is one of the topic with this id; empty is the topic that has the name now.
    """

    partition: TopicPartition
    position: Position
    topic_id: bytes = b""


@dataclass(frozen=True, slots=True)
class PositionLost:
    """The position is to be found anew (a seek to the beginning or end): fetch nothing."""

    partition: TopicPartition


@dataclass(frozen=True, slots=True)
class PositionFailed:
    """No position can be had; the next ``take`` raises this."""

    partition: TopicPartition
    error: PenstockError


@dataclass(frozen=True, slots=True)
class Fetched:
    """One partition's part of an answer."""

    partition: TopicPartition
    error: PenstockError | None
    records: Buffer
    end_offset: int = -1  # Of what this consumer can read.
    diverging_offset: int = -1
    records_crc: int | None = None  # The CRC-32C that the broker says; older ones say none.
    aborted: tuple[tuple[int, int], ...] = ()  # Transactions, as producer id and first offset.
    high_watermark: int = -1  # Beyond ``end_offset`` where a transaction is open there.


@dataclass(frozen=True, slots=True)
class FetchAnswered:
    """An answer came."""

    fetch_id: int
    results: tuple[Fetched, ...]


@dataclass(frozen=True, slots=True)
class FetchFailed:
    """A broker could not be asked."""

    fetch_id: int
    error: PenstockError


Event = (
    Woken
    | Added
    | Removed
    | PositionFound
    | PositionLost
    | PositionFailed
    | FetchAnswered
    | FetchFailed
)


# --- effects -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Wanted:
    """One partition's part of a fetch."""

    partition: TopicPartition
    offset: int
    leader_epoch: int
    last_fetched_epoch: int
    topic_id: bytes


@dataclass(frozen=True, slots=True)
class SendFetch:
    """Ask a broker, for at most ``max_bytes`` (but always one batch)."""

    fetch_id: int
    node_id: int
    wanted: tuple[Wanted, ...]
    max_bytes: int


@dataclass(frozen=True, slots=True)
class CancelFetch:
    """Give a fetch up: its broker leads nothing of it any more, or is silent."""

    fetch_id: int


@dataclass(frozen=True, slots=True)
class RefreshMetadata:
    """Ask who leads now, some other broker than ``avoid`` if it is not -1."""

    avoid: int


@dataclass(frozen=True, slots=True)
class OutOfRange:
    """The position is outside of the log (or was cut off with it): the policy decides.

    ``safe_offset`` is where the log diverged from what was read, or the next offset to be taken
    where that comes before; -1 where it is not known.
    """

    partition: TopicPartition
    offset: int
    safe_offset: int
    error: PenstockError


@dataclass(frozen=True, slots=True)
class MadeAnew:
    """The topic was deleted and made anew under its name: the position means nothing in it.

    Nothing is fetched, and what was fetched is dropped, until another position is found.
    """

    partition: TopicPartition
    offset: int


Effect = SendFetch | CancelFetch | RefreshMetadata | OutOfRange | MadeAnew
