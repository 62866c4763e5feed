"""How many records a topic has that Spark wrote."""

from __future__ import annotations

import time
from typing import Final

from penstock.client import Consumer, TopicPartition

_POLL_MS: Final = 200
_READ_RECORDS: Final = 100_000
_QUIET_S: Final = 60.0


def records_in(bootstrap: str, topic: str, partitions: int) -> int:
    """How many records a reader of committed ones gets of a topic, all of which are read.

    A commit is answered once it is decided, and what is committed can be read when its markers are
    written, a moment later: so the end is that of the log, and not the last stable offset. Raises
    SystemExit where nothing comes for so long that there must be a fault.
    """
    every = [TopicPartition(topic, number) for number in range(partitions)]
    with Consumer(bootstrap) as anything:
        ends = anything.end_offsets(every)
    found = 0
    with Consumer(bootstrap, isolation_level="read_committed", auto_offset_reset="earliest") as own:
        own.assign(every)
        quiet_at = time.monotonic() + _QUIET_S
        while any(own.position(one) < end for one, end in ends.items()):
            rows = own.fetch_arrow(_POLL_MS, _READ_RECORDS).num_rows
            found += rows
            if rows:
                quiet_at = time.monotonic() + _QUIET_S
            elif time.monotonic() > quiet_at:
                raise SystemExit(f"{topic} cannot be read to its end; {found} records were read")
    return found
