"""Whom a group's coordinator refuses of those whose records were to be written together."""

from __future__ import annotations

import asyncio

import pytest

from penstock.broker.core.group_partition import partition_for_group
from penstock.wire.errors import CoordinatorNotAvailableError, RecordTooLargeError
from tests.support import eventually
from tests.unit.groups.coordinator_harness import PARTITIONS, world

GROUP = "billing"


async def test_what_was_made_of_what_is_too_large_may_be_tried_again() -> None:
    async with world() as w:
        w.replicas.max_batch_bytes = 3_000
        refused = asyncio.ensure_future(w.commit(GROUP, 1, metadata="x" * 4000))
        behind = asyncio.ensure_future(w.commit(GROUP, 2))
        with pytest.raises(RecordTooLargeError):
            await refused
        with pytest.raises(CoordinatorNotAvailableError, match="try again"):
            await behind
        assert await w.committed(GROUP) == {}
        await w.commit(GROUP, 2)
        assert await w.committed(GROUP) == {("orders", 0): 2}


async def test_of_commits_written_together_only_what_is_too_large_is_refused() -> None:
    async with world() as w:
        number = partition_for_group(GROUP, PARTITIONS)
        names = [
            name for name in map(str, range(100)) if partition_for_group(name, PARTITIONS) == number
        ]
        metadata = dict.fromkeys(names[:8], "") | {names[3]: "x" * 4000}
        w.replicas.hold_commits = True
        first = asyncio.ensure_future(w.commit(GROUP, 1))
        await eventually(lambda: w.replicas.append_count == 1)
        w.replicas.max_batch_bytes = 3_000
        commits = [
            asyncio.ensure_future(w.commit(name, 1, metadata=metadata[name])) for name in metadata
        ]
        for _ in range(10):
            await asyncio.sleep(0)
        w.replicas.hold_commits = False
        w.replicas.commit()
        await first
        answers = await asyncio.gather(*commits, return_exceptions=True)
        refused = [
            name for name, one in zip(metadata, answers, strict=True) if isinstance(one, Exception)
        ]
        assert refused == [names[3]]
        assert isinstance(answers[3], RecordTooLargeError)
        for name in metadata:
            assert bool(await w.committed(name)) == (name != names[3])
