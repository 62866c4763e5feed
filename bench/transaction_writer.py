"""One writer of bench/transaction_soak.py as a process: numbered transactions, one after the other.

What it is about to do, and what became of it, it notes in a file first and afterwards; so whoever
kills it knows of which transaction nobody can say how it ended. Started again with the same notes
it goes on behind that.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from pathlib import Path
from typing import Final

from children import Answer, serve, settings
from transaction_verdict import is_to_abort, read_notes, value_of

from penstock.client import Producer
from penstock.client.errors import BootstrapError, PenstockError, TransactionAbortableError

_SPREAD: Final = 3
"""So many partitions get records of a transaction."""


class Writer:
    """Writes transactions on a thread of its own until it is told to stop."""

    def __init__(self, given: Answer) -> None:
        self._given = given
        self._stop = threading.Event()
        self._failure: str | None = None
        self._written = 0
        self._notes = os.open(given["notes"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        given = self._given
        number = 0
        try:
            while not self._stop.is_set():
                number = read_notes(Path(given["notes"]).read_text()).next_number
                with (
                    # On a loaded machine with a node down nobody may answer a newcomer in time.
                    contextlib.suppress(BootstrapError),
                    Producer(
                        given["bootstrap"],
                        client_id=given["name"],
                        transactional_id=given["name"],
                        transaction_timeout_ms=given["transaction_timeout_ms"],
                    ) as producer,
                ):
                    while not self._stop.is_set():
                        self._write(producer, number)
                        number += 1
        except PenstockError as error:
            self._failure = f"transaction {number}: {type(error).__name__}: {error}"

    def _write(self, producer: Producer, number: int) -> None:
        self._note("begun", number)
        producer.begin_transaction()
        for place in range(self._given["size"]):
            producer.send(
                self._given["topic"],
                value=value_of(self._given["name"], number, place),
                partition=(number + place % _SPREAD) % self._given["partitions"],
            )
        self._note(self._end(producer, number), number)
        self._written += 1

    def _end(self, producer: Producer, number: int) -> str:
        """Commit or abort, however long it takes to hear of it; what it was."""
        if is_to_abort(number):
            producer.flush()  # So that there is something to abort.
            producer.abort_transaction()
            return "aborted"
        while True:
            try:
                producer.commit_transaction()
            except TransactionAbortableError:
                producer.abort_transaction()
                return "aborted"
            except PenstockError as error:
                if not error.retriable:
                    raise
            else:
                return "committed"

    def _note(self, what: str, number: int) -> None:
        os.write(self._notes, f"{what} {number}\n".encode())

    async def progress(self) -> Answer:
        """How many transactions this process has ended."""
        if self._failure is not None:
            raise RuntimeError(self._failure)
        return {"written": self._written}

    async def finish(self) -> Answer:
        """End the transaction that is going on, and begin no more."""
        self._stop.set()
        await asyncio.to_thread(self._thread.join)
        return await self.progress()


async def main() -> None:
    """Write until the parent is gone."""
    writer = Writer(settings())
    await serve({"progress": writer.progress, "finish": writer.finish})
    await writer.finish()


if __name__ == "__main__":
    asyncio.run(main())
