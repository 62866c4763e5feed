"""What an append would make of a ProducerState, checked before anything is written. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from penstock.broker.core.producer_entry import ProducerEntry, recorded
from penstock.broker.core.producer_state import (
    Append,
    Duplicate,
    ProducerState,
    StateUndo,
)
from penstock.broker.core.transactions import EndedTransaction, Marker
from penstock.wire.errors import InvalidTxnStateError, TransactionTornError
from penstock.wire.markers import MarkerType, encode_marker
from penstock.wire.records import BatchHeader, parse_header


class ProducerStage:
    """The state as it will be when the batches checked so far are in the log.

    Nothing changes in the state itself until ``commit``; dropping the stage undoes it all. It costs
    what its batches do, however many producers and transactions there are.
    """

    __slots__ = ("_changed", "_is_open", "_state", "_steps")

    def __init__(self, state: ProducerState) -> None:
        self._state = state
        self._changed: dict[int, ProducerEntry] = {}
        self._is_open: dict[int, bool] = {}  # Whether a producer's transaction is, if it changed.
        self._steps: list[tuple[BatchHeader, int]] = []  # Batches of transactions, and where.

    def check(self, header: BatchHeader) -> Append | Duplicate:
        """As ProducerState.check, after what was staged."""
        return self._state.check_after(header, self.entry(header.producer_id))

    def check_transaction(self, header: BatchHeader, verified: tuple[int, int] | None) -> None:
        """Whether a batch that ``check`` would let in is of a transaction that it may be of.

        That is one which is open here, or of the ``verified`` producer id and epoch, for which the
        coordinator has said that the partition is in it. Raises InvalidTxnStateError.
        """
        producer_id, epoch = header.producer_id, header.producer_epoch
        is_open = self._is_open.get(producer_id)
        if is_open is None:
            is_open = producer_id in self._state.transactions
        if not is_open:
            if header.is_transactional and verified != (producer_id, epoch):
                raise InvalidTxnStateError(
                    f"producer {producer_id} (epoch {epoch}) has begun no transaction here: the "
                    "transaction has ended, or its coordinator does not know of the partition; "
                    "abort it and begin a new one"
                )
            return
        if not header.is_transactional:
            raise InvalidTxnStateError(
                f"producer {producer_id} has a transaction open here, so it can't write outside of "
                "it; commit or abort the transaction first"
            )
        entry = self.entry(producer_id)
        if entry is not None and entry.producer_epoch != epoch:
            raise InvalidTxnStateError(
                f"producer {producer_id} has a transaction of epoch {entry.producer_epoch} open "
                f"here, so none of epoch {epoch} can begin: the mark that ends it is missing"
            )

    def record(
        self,
        header: BatchHeader,
        base_offset: int,
        now_ms: int,
        mark: MarkerType | None = None,
    ) -> None:
        """As ProducerState.record, on the stage."""
        producer_id = header.producer_id
        entry = recorded(header, self.entry(producer_id), base_offset, now_ms, mark)
        if entry is None:
            return
        self._changed[producer_id] = entry
        if header.is_transactional or header.is_control:
            self._is_open[producer_id] = not header.is_control
            self._steps.append((header, base_offset))

    def entry(self, producer_id: int) -> ProducerEntry | None:
        """What is known of a producer, after what was staged."""
        return self._changed.get(producer_id) or self._state.entry(producer_id)

    def undo(self) -> StateUndo | None:
        """What takes ``commit`` back, which is to follow; None when that will change nothing."""
        if not self._changed:
            return None
        entry = self._state.entry
        return StateUndo(
            tuple([(producer_id, entry(producer_id)) for producer_id in self._changed]),
            self._state.transactions.undo_of(self._is_open) if self._steps else None,
        )

    def commit(self) -> list[EndedTransaction]:
        """The batches are in the log; the transactions that they end, by their marks."""
        self._state.update(self._changed)
        if not self._steps:
            return []
        note = self._state.transactions.note
        ended = [note(header, base_offset) for header, base_offset in self._steps]
        return [one for one in ended if one is not None]


def check_marker(marker: Marker, entry: ProducerEntry | None) -> bool:
    """Whether the mark is to be written, where ``entry`` is what is known of its producer.

    False where its epoch, or a newer one, has written here: it is in the log already, and must not
    end what began after it. Raises TransactionTornError when what is there under this very epoch
    says the other thing. A newer epoch comes of a later decision, which its coordinator makes when
    all marks of the one before are there; and what was written before kinds of marks were
    remembered contradicts none.
    """
    if entry is None or entry.producer_epoch < marker.producer_epoch:
        return True
    there = entry.mark
    if entry.producer_epoch > marker.producer_epoch or there in (None, marker.type):
        return False
    raise TransactionTornError(
        f"the transaction of producer {marker.producer_id} that ends under epoch "
        f"{marker.producer_epoch} has the mark {there.name} here, and its coordinator has decided "
        f"{marker.type.name}: somebody ended it by hand, or data of its coordinator were lost; "
        "nothing was written"
    )


def staged_markers(
    stage: ProducerStage,
    markers: Iterable[Marker],
    *,
    base_offset: int,
    leader_epoch: int,
    now_ms: int,
    seen_ms: int,
) -> list[tuple[BatchHeader, bytes]]:
    """The control batches from ``base_offset`` on, once they are on the stage.

    None for a marker that is there already; see check_marker for what is raised.
    """
    batches = []
    offset = base_offset
    for marker in markers:
        if not check_marker(marker, stage.entry(marker.producer_id)):
            continue
        data = encode_marker(
            marker.type,
            producer_id=marker.producer_id,
            producer_epoch=marker.producer_epoch,
            coordinator_epoch=marker.coordinator_epoch,
            timestamp_ms=now_ms,
            base_offset=offset,
            leader_epoch=leader_epoch,
        )
        header = parse_header(data)
        stage.record(header, offset, seen_ms, marker.type)
        batches.append((header, data))
        offset = header.next_offset
    return batches
