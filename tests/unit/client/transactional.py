"""Both producers, used by one synchronous test alike, in transactions."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from penstock.client import AsyncProducer
from tests.unit.client.fake_transactions import FakeTransactions


class Sync:
    """An AsyncProducer as a synchronous one, on a loop of its own: one test is for both."""

    def __init__(self, bootstrap: str, **settings: Any) -> None:
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(lambda loop, context: None)
        self._producer = AsyncProducer(bootstrap, **settings)

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._producer, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            return self._loop.run_until_complete(method(*args, **kwargs))

        return call

    def transaction(self) -> Any:
        block = self._producer.transaction()
        run = self._loop.run_until_complete

        class Block:
            def __enter__(self) -> None:
                run(block.__aenter__())

            def __exit__(self, *what: Any) -> Any:
                return run(block.__aexit__(*what))

        return Block()

    def __enter__(self) -> Sync:
        return self

    def __exit__(self, *what: object) -> None:
        try:
            self._loop.run_until_complete(self._producer.__aexit__(*what))  # type: ignore[arg-type]
        finally:
            self._loop.close()


def in_block(producer: Any, *steps: Callable[[], object]) -> None:
    """Take the steps in one transaction."""
    with producer.transaction():
        for step in steps:
            step()


def asked(fake: FakeTransactions, kind: type) -> list[Any]:
    return [request for request in fake.asked if isinstance(request, kind)]
