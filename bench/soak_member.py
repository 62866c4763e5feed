"""One group member of bench/soak.py as a process, which notes in a file what it has processed."""

from __future__ import annotations

import asyncio
import os
from typing import Final

from children import Answer, serve, settings

from penstock.client import AsyncConsumer, Consumer, ConsumerRecord

_POLL_MS: Final = 500


async def read(consumer: Consumer | AsyncConsumer, notes: int, stop: asyncio.Event) -> None:
    """Processing is to append the values to the file: it is done before the next poll."""
    while not stop.is_set():
        records: list[ConsumerRecord]
        if isinstance(consumer, AsyncConsumer):
            records = await consumer.poll(_POLL_MS)
        else:
            records = await asyncio.to_thread(consumer.poll, _POLL_MS)
        if records:
            os.write(notes, b"".join(record.value + b"\n" for record in records))


async def alive() -> Answer:
    """Whether it still reads: reading ends by an error alone, and the process by that."""
    return {}


async def main() -> None:
    """Read until the parent wants it no more."""
    given = settings()
    kind = AsyncConsumer if given["asynchronous"] else Consumer
    consumer = kind(
        given["bootstrap"],
        topics=given["topic"],
        group_id=given["group"],
        client_id=given["name"],
        session_timeout_ms=given["session_timeout_ms"],
        auto_commit_interval_ms=1_000,
        auto_offset_reset="earliest",
    )
    notes = os.open(given["notes"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    stop = asyncio.Event()
    reading = asyncio.create_task(read(consumer, notes, stop))
    serving = asyncio.create_task(serve({"alive": alive}))
    await asyncio.wait((reading, serving), return_when=asyncio.FIRST_COMPLETED)
    stop.set()
    await reading  # Raises what ended it, if it was not asked to.
    if isinstance(consumer, AsyncConsumer):
        await consumer.close()
    else:
        await asyncio.to_thread(consumer.close)
    serving.cancel()


if __name__ == "__main__":
    asyncio.run(main())
