"""When followers in sync are told high watermarks. In virtual time."""

from __future__ import annotations

import asyncio

from penstock.broker.replication.leader import MARKS_LINGER_S
from tests.unit.replication.test_catch_up import Leader, Link
from tests.unit.replication.virtual_loop import run_virtually


def told(link: Link) -> list[list[tuple[int, int, bool]]]:
    """By message: partition, high watermark, and whether records came with it."""
    return [
        [(push.partition.partition, push.high_watermark, bool(push.records)) for push in one.pushes]
        for _, one in link.pushes
    ]


def test_a_high_watermark_goes_with_records_of_its_partition_or_alone_a_while_later():
    async def main() -> None:
        leader = Leader([[1, 2], [1, 2]], rate=0)
        link = Link(leader, 2)
        link.state({0: 0, 1: 0})
        await asyncio.sleep(1)  # virtual time
        link.pushes.clear()
        await leader.append(0)
        await asyncio.sleep(0.01)  # virtual time
        await leader.append(1)
        await asyncio.sleep(0.01)  # virtual time
        # What partition 0 has to tell is not put beside what partition 1 is sent.
        assert told(link) == [[(0, 0, True)], [(1, 0, True)]]
        await leader.append(0)
        await asyncio.sleep(0.01)  # virtual time
        assert told(link)[2:] == [[(0, 1, True)]]
        await asyncio.sleep(MARKS_LINGER_S)  # virtual time
        # As long as each of them has waited, and whatever is due with it in one message.
        assert told(link)[3:] == [[(1, 1, False), (0, 2, False)]]
        await asyncio.sleep(10)  # virtual time
        assert len(link.pushes) == 4
        await link.end()

    run_virtually(main())


def test_of_a_partition_that_goes_on_growing_nothing_goes_alone():
    async def main() -> None:
        leader = Leader([[1, 2]], rate=0)
        link = Link(leader, 2)
        link.state({0: 0})
        await asyncio.sleep(1)  # virtual time
        link.pushes.clear()
        for _ in range(50):
            await leader.append(0)
            await asyncio.sleep(0.01)  # virtual time
        assert told(link) == [[(0, number, True)] for number in range(50)]
        await asyncio.sleep(10)  # virtual time
        assert told(link)[50:] == [[(0, 50, False)]]
        await link.end()

    run_virtually(main())
