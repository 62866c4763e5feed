"""Which transactions a leader may let in because a mark said so, without asking. Pure.

The mark that ends a producer's transaction in a partition may come with a word: the partition is
in the next transaction, that of the mark's epoch, already (ADR 13). Then whoever coordinates it
sends a mark here when that one ends, as for any partition it was asked for. The word holds until
that mark:

==================================================  ==============================================
what happens                                        what becomes of the producer's word
==================================================  ==============================================
a mark of its newest epoch here, with the word      this is its word, for that epoch alone
a mark of its newest epoch here, without            it has none
a mark of an older epoch, with the word or without  it stays: the mark came late, its transaction
                                                    and all that was said about it are over
the leadership ends, or its epoch                   it has none, nor has anybody in the partition
there are too many                                  the one that was given first is dropped
==================================================  ==============================================

It is a memory of this leadership and never on a disk. Who has no word is asked for, so that
dropping one is always right.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from penstock.wire.ids import TopicIdPartition

MAX_WORDS: Final = 50_000
"""So many take 15 MB."""


class KeptWords:
    """The words that were given to one broker. ``newest_epoch`` is a log's, of the producer."""

    def __init__(self, max_words: int = MAX_WORDS) -> None:
        self._max = max_words
        # The epoch, by partition and producer id; the one that was given first comes first. A dict
        # would walk past all that was taken from its front to find that one.
        self._epochs: OrderedDict[tuple[TopicIdPartition, int], int] = OrderedDict()
        self._producers: dict[TopicIdPartition, set[int]] = {}

    def __len__(self) -> int:
        return len(self._epochs)

    def holds(self, partition: TopicIdPartition, producer_id: int, producer_epoch: int) -> bool:
        """Whether the partition is in this transaction by a word that holds."""
        return self._epochs.get((partition, producer_id)) == producer_epoch

    def marked(
        self, partition: TopicIdPartition, producer_id: int, producer_epoch: int, *, kept: bool
    ) -> None:
        """A mark of the producer's newest epoch is in the log, and says this of the next one."""
        self._drop(partition, producer_id)
        if not kept:
            return
        if len(self._epochs) >= self._max:
            self._drop(*next(iter(self._epochs)))
        self._epochs[partition, producer_id] = producer_epoch
        self._producers.setdefault(partition, set()).add(producer_id)

    def leadership_ended(self, partition: TopicIdPartition) -> None:
        """What was said in it holds no more."""
        for producer_id in self._producers.pop(partition, ()):
            del self._epochs[partition, producer_id]

    def clear(self) -> None:
        """Nothing is led any more."""
        self._epochs.clear()
        self._producers.clear()

    def validate(self) -> None:
        """Assert what must hold between calls."""
        assert len(self._epochs) <= self._max
        by_partition: dict[TopicIdPartition, set[int]] = {}
        for partition, producer_id in self._epochs:
            by_partition.setdefault(partition, set()).add(producer_id)
        assert by_partition == self._producers

    def _drop(self, partition: TopicIdPartition, producer_id: int) -> None:
        if self._epochs.pop((partition, producer_id), None) is None:
            return
        of_partition = self._producers[partition]
        of_partition.discard(producer_id)
        if not of_partition:
            del self._producers[partition]
