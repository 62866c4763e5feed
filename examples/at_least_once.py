"""Handles each record at least once: handles a batch first, and commits it after that.

A process that dies in between has handled records that it did not commit; whoever takes over
handles them again. None is left out. That fits where handling a record twice does no harm, as
when its result is stored under the record's key::

    python examples/at_least_once.py localhost:9092 numbers copies

Auto commit (examples/consumer.py) promises the same with less to write; here the application says
when.
"""

from __future__ import annotations

import argparse
import contextlib

from penstock.client import (
    Consumer,
    ConsumerRecord,
    FencedMemberEpochError,
    PenstockError,
    UnknownMemberIdError,
)


def handle(record: ConsumerRecord) -> None:
    """What the application is for."""
    print(f"{record.topic_partition} @ {record.offset}", flush=True)  # noqa: T201 - an example


def main() -> int:
    """Read until Ctrl-C."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("bootstrap", nargs="?", default="localhost:9092")
    parser.add_argument("topic", nargs="?", default="numbers")
    parser.add_argument("group", nargs="?", default="at-least-once")
    arguments = parser.parse_args()
    try:
        with Consumer(
            arguments.bootstrap,
            topics=arguments.topic,
            group_id=arguments.group,
            enable_auto_commit=False,
            auto_offset_reset="earliest",
            session_timeout_ms=6_000,  # Who dies is replaced after so long.
        ) as consumer:
            while True:
                records = consumer.poll()
                for record in records:
                    handle(record)
                if records:
                    # Refused where another member has the partitions, which handles this again.
                    with contextlib.suppress(FencedMemberEpochError, UnknownMemberIdError):
                        consumer.commit()
    except PenstockError as error:
        raise SystemExit(f"{type(error).__name__}: {error}") from None
    except KeyboardInterrupt:
        return 0


if __name__ == "__main__":
    raise SystemExit(main())
