"""About how many bytes an offset is: what ``maxBytesPerTrigger`` goes by.

Brokers do not say how large the records between two offsets are. So some of those that come next
are looked at, and the rest are taken to be like them.
"""

from __future__ import annotations

import logging
from time import monotonic
from typing import Final

from penstock.client import Consumer, PenstockError, TopicPartition
from penstock.pipeline.source.arrow_reading import open_consumer
from penstock.pipeline.source.offsets import Offsets
from penstock.pipeline.source_options import SourceOptions

_LOG: Final = logging.getLogger("penstock.pipeline")
_ROWS: Final = 500
_FETCH_BYTES: Final = 64 * 1024
_PATIENCE_S: Final = 2.0
_AGE_S: Final = 5.0


class Scale:
    """One connection, which looks at records. Remembers for five seconds what it saw."""

    def __init__(self, options: SourceOptions) -> None:
        self._consumer: Consumer = open_consumer(options, max_partition_fetch_bytes=_FETCH_BYTES)
        self._known: dict[TopicPartition, float] = {}
        self._seen_at: dict[TopicPartition, float] = {}

    def close(self) -> None:
        """Free the connection."""
        self._consumer.close(0)

    def weigh(self, start: Offsets) -> dict[TopicPartition, float]:
        """About how many bytes (of keys, values and headers) an offset from there on is.

        Where nothing can be seen within two seconds, it is as it was last, or as the others are.
        """
        now = monotonic()
        waiting = {one for one in start if now - self._seen_at.get(one, float("-inf")) > _AGE_S}
        if waiting:
            self._look(start, waiting, now + _PATIENCE_S)
        average = sum(self._known.values()) / len(self._known) if self._known else 1.0
        return {partition: self._known.get(partition, average) for partition in start}

    def _look(self, start: Offsets, waiting: set[TopicPartition], until: float) -> None:
        consumer = self._consumer
        try:
            consumer.assign(waiting)
            for partition in waiting:
                consumer.seek(partition, start[partition])
            while waiting and monotonic() < until:
                # Each batch of the table is of one partition.
                for chunk in consumer.fetch_arrow(50, _ROWS).to_batches():
                    where = TopicPartition(
                        chunk.column("topic")[0].as_py(), chunk.column("partition")[0].as_py()
                    )
                    span = chunk.column("offset")[-1].as_py() + 1 - start[where]
                    columns = (chunk.column(name) for name in ("key", "value", "headers"))
                    if where in waiting and span > 0:
                        self._known[where] = sum(column.nbytes for column in columns) / span
                        self._seen_at[where] = monotonic()
                        waiting.discard(where)
                        consumer.pause(where)
        except PenstockError as error:
            # Whoever reads it says so.
            _LOG.debug("how large records are cannot be seen now: %s", error)
