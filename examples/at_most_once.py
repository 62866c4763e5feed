"""Handles each record at most once: commits a batch first, and handles it after that.

A process that dies in between has committed records that it never handled; nobody will. None is
handled twice. That fits where a repetition is worse than a gap: an alarm, a rate, a cache::

    python examples/at_most_once.py localhost:9092 numbers alarms
"""

from __future__ import annotations

import argparse

from penstock.client import Consumer, ConsumerRecord, PenstockError


def handle(record: ConsumerRecord) -> None:
    """What the application is for."""
    print(f"{record.topic_partition} @ {record.offset}", flush=True)  # noqa: T201 - an example


def main() -> int:
    """Read until Ctrl-C."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("bootstrap", nargs="?", default="localhost:9092")
    parser.add_argument("topic", nargs="?", default="numbers")
    parser.add_argument("group", nargs="?", default="at-most-once")
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
                if records:
                    # Raises where another member may have the partitions by now, or when nobody
                    # knows whether the positions are stored: then nothing of this is handled.
                    consumer.commit()
                for record in records:
                    handle(record)
    except PenstockError as error:
        raise SystemExit(f"{type(error).__name__}: {error}") from None
    except KeyboardInterrupt:
        return 0


if __name__ == "__main__":
    raise SystemExit(main())
