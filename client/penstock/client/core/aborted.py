"""Which batches of an answer belong to aborted transactions, as Kafka's consumers find them."""

from __future__ import annotations

from collections.abc import Iterable

from penstock.wire.batch import BatchHeader


class AbortedBatches:
    """What an answer to a read_committed fetch says was aborted in it.

    By producer id and first offset: the transaction's batches begin there and end with the next
    mark of the producer. Looks at the answer's batches in their order, at the last one as often as
    wanted.
    """

    __slots__ = ("_coming", "_open")

    def __init__(self, transactions: Iterable[tuple[int, int]]) -> None:
        in_order = sorted((first_offset, producer_id) for producer_id, first_offset in transactions)
        self._coming = in_order[::-1]  # The first one last.
        self._open: set[int] = set()

    def __bool__(self) -> bool:
        """Whether there may be any from here on."""
        return bool(self._coming or self._open)

    def covers(self, header: BatchHeader) -> bool:
        """Whether the batch, which is sound, is of an aborted transaction."""
        while self._coming and self._coming[-1][0] <= header.last_offset:
            self._open.add(self._coming.pop()[1])
        if header.is_control:
            self._open.discard(header.producer_id)
            return False
        return header.is_transactional and header.producer_id in self._open
