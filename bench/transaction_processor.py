"""One processor of bench/transaction_soak.py as a process: reads what is committed, writes it on.

Each round is one transaction: the records, and the positions behind what they were made of.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading

from children import Answer, serve, settings

from penstock.client import Consumer, ConsumerRecord, Producer, TopicPartition
from penstock.client.errors import (
    BootstrapError,
    ProducerFencedError,
    TransactionAbortableError,
)


class Processor:
    """Processes on a thread of its own until it is told to stop."""

    def __init__(self, given: Answer) -> None:
        self._given = given
        self._stop = threading.Event()
        self._failure: str | None = None
        self._done = 0
        self._again = 0
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        given = self._given
        try:
            while not self._stop.is_set():
                with (
                    # On a loaded machine with a node down nobody may answer a newcomer in time.
                    contextlib.suppress(BootstrapError),
                    Consumer(
                        given["bootstrap"],
                        topics=given["topic"],
                        group_id=given["group"],
                        client_id=given["name"],
                        isolation_level="read_committed",
                        session_timeout_ms=given["session_timeout_ms"],
                        enable_auto_commit=False,
                        auto_offset_reset="earliest",
                    ) as consumer,
                ):
                    self._process(consumer)
        except Exception as error:  # Whatever it was, the parent is to hear of it.
            self._failure = f"{type(error).__name__}: {error}"

    def _process(self, consumer: Consumer) -> None:
        given = self._given
        with Producer(
            given["bootstrap"],
            client_id=given["name"],
            transactional_id=given["name"],
            transaction_timeout_ms=given["transaction_timeout_ms"],
        ) as producer:
            while not self._stop.is_set():
                records = consumer.poll(200, given["most"])
                if not records:
                    continue
                try:
                    self._write(consumer, producer, records)
                except (TransactionAbortableError, ProducerFencedError):
                    # Both begin anew where the group is: this process may have lost partitions.
                    self._again += 1
                    return

    def _write(self, consumer: Consumer, producer: Producer, records: list[ConsumerRecord]) -> None:
        behind: dict[TopicPartition, int] = {}
        with producer.transaction():
            for record in records:
                producer.send(self._given["target"], value=record.value, partition=record.partition)
                behind[TopicPartition(record.topic, record.partition)] = record.offset + 1
            producer.send_offsets_to_transaction(behind, consumer.group_metadata())
        self._done += 1

    async def progress(self) -> Answer:
        """How many transactions were committed, and how often it began anew."""
        if self._failure is not None:
            raise RuntimeError(self._failure)
        return {"written": self._done, "again": self._again}

    async def finish(self) -> Answer:
        """End the transaction that is going on, and begin no more."""
        self._stop.set()
        await asyncio.to_thread(self._thread.join)
        return await self.progress()


async def main() -> None:
    """Process until the parent is gone."""
    processor = Processor(settings())
    await serve({"progress": processor.progress, "finish": processor.finish})
    await processor.finish()


if __name__ == "__main__":
    asyncio.run(main())
