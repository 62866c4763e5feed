"""Whether transactions that are open in logs led here hang: whether no coordinator knows of them.

A log knows no transactional id, so every coordinator is asked. A partition is in the coordinator's
record before its leader appends, and stays known until its mark is in the log. So of a transaction
that is open, whoever coordinates it knows, unless that was lost; and what nobody knows of, nobody
will know of later. What makes the answers sure is that each comes from the partition's coordinator:
one that was replaced may not have heard of it, but without news for as long as a session lasts it
loses its lease, and does not answer. So they count where the transaction was seen open for so long
before they were asked for that whoever answered then had heard of all that came before it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, NamedTuple

from penstock.broker.core.metadata_image import MetadataImage
from penstock.broker.peers import Peers
from penstock.broker.replication.led_transactions import OpenPlace
from penstock.broker.topics import TRANSACTIONS_TOPIC
from penstock.v1 import common_pb2, coordination_pb2
from penstock.wire.errors import (
    CoordinatorNotAvailableError,
    InvalidTxnStateError,
    PenstockError,
    error_from_proto,
)

_TIMEOUT_S: Final = 10.0
_MAX_REMEMBERED: Final = 10_000
"""Places. Those that were asked about last stay: that is what a person waits for."""
_SESSIONS: Final = 3
"""A lease lasts a session from a heartbeat that was sent up to a session after news that the broker
did not take, and such news may wait for the next heartbeat."""

FindTransactions = Callable[
    [coordination_pb2.FindTransactionsRequest],
    Awaitable[coordination_pb2.FindTransactionsResponse],
]


class Judgement(NamedTuple):
    """Of each place None where it hangs, or why it does not.

    CoordinatorNotAvailableError where that can't be told, now or yet. The verdict that it hangs
    holds for as long as this very transaction is open there. Of those where only time is wanting
    it is sure in ``sure_in_ms``; 0 where there are none.
    """

    verdicts: list[PenstockError | None]
    sure_in_ms: int = 0


class HangingJudge:
    """Asks all coordinators. Used on one event loop; ``local`` is the coordinator of this broker.

    ``session_timeout_ms`` is that of brokers, and ``clock_ms`` never goes back.
    """

    def __init__(
        self,
        node_id: int,
        image: MetadataImage,
        peers: Peers,
        local: FindTransactions,
        *,
        session_timeout_ms: int,
        clock_ms: Callable[[], int],
    ) -> None:
        self._node_id = node_id
        self._image = image
        self._peers = peers
        self._local = local
        self._settled_ms = _SESSIONS * session_timeout_ms
        self._clock_ms = clock_ms
        # When each was first seen open; who was asked about last is last.
        self._seen_ms: dict[OpenPlace, int] = {}

    async def judge(self, places: Sequence[OpenPlace]) -> Judgement:
        """Which of these places, that are open now, hang; see Judgement."""
        now_ms = self._clock_ms()
        since_ms = [self._first_seen_ms(place, now_ms) for place in places]
        while len(self._seen_ms) > _MAX_REMEMBERED:
            del self._seen_ms[next(iter(self._seen_ms))]
        found, silent = await self._ask(places)
        verdicts: list[PenstockError | None] = []
        sure_in_ms = 0
        for index, place in enumerate(places):
            verdict = found.get(index) or silent
            left_ms = self._settled_ms - (now_ms - since_ms[index])
            if verdict is None and left_ms > 0:
                verdict = self._too_early(place, left_ms)
                sure_in_ms = max(sure_in_ms, left_ms)
            verdicts.append(verdict)
        return Judgement(verdicts, sure_in_ms)

    def _first_seen_ms(self, place: OpenPlace, now_ms: int) -> int:
        """When it was first asked about, which it is again now."""
        seen_ms = self._seen_ms[place] = self._seen_ms.pop(place, now_ms)
        return seen_ms

    def _too_early(self, place: OpenPlace, left_ms: int) -> PenstockError:
        known_ms = self._settled_ms - left_ms
        return CoordinatorNotAvailableError(
            f"{place.name}: no coordinator knows of the transaction of producer "
            f"{place.producer_id}, which this broker has looked at for {known_ms / 1000:g} s; ask "
            f"again after {self._settled_ms / 1000:g} s, when each coordinator has surely heard "
            "whether it still is one"
        )

    async def _ask(
        self, places: Sequence[OpenPlace]
    ) -> tuple[dict[int, PenstockError], PenstockError | None]:
        """What is known, by the index of the place; and why not everybody was heard, if so."""
        topic = self._image.topic(TRANSACTIONS_TOPIC)
        by_leader: dict[int, list[int]] = {}
        for number, record in ({} if topic is None else topic.partitions).items():
            by_leader.setdefault(record.leader, []).append(number)
        asked = [self._ask_one(node_id, numbers, places) for node_id, numbers in by_leader.items()]
        found: dict[int, PenstockError] = {}
        failures: dict[int, str] = {}
        for answers in await asyncio.gather(*asked):
            for number, answer in answers.items():
                if isinstance(answer, str):
                    failures[number] = answer
                    continue
                for one in answer:
                    found[one.place] = InvalidTxnStateError(
                        f"{places[one.place].name}: transactional id {one.transactional_id!r} has "
                        f"this transaction of producer {places[one.place].producer_id}, and its "
                        "coordinator will end it; nothing was done; next: `penstock transactions "
                        f"abort {one.transactional_id}` if it is still open"
                    )
        if not failures:
            return found, None
        first = min(failures)
        return found, CoordinatorNotAvailableError(
            "it can't be told whether the transaction hangs: of the coordinators that might know "
            f"of it {', '.join(f'{TRANSACTIONS_TOPIC}-{one}' for one in sorted(failures))} did not "
            f"answer ({failures[first]}); nothing was done; next: see that each of these "
            "partitions has a leader"
        )

    async def _ask_one(
        self, node_id: int, numbers: Sequence[int], places: Sequence[OpenPlace]
    ) -> dict[int, Sequence[coordination_pb2.FoundTransaction] | str]:
        """By partition what is found there, or why that is not known."""
        if node_id < 0:
            return dict.fromkeys(numbers, "it has no leader")
        request = coordination_pb2.FindTransactionsRequest(
            cluster_id=self._image.cluster_id,
            coordinators=numbers,
            places=[
                coordination_pb2.OpenTransactionPlace(
                    producer_id=place.producer_id,
                    partition=common_pb2.TopicPartition(
                        topic=place.name.topic,
                        partition=place.key.partition,
                        topic_id=place.key.topic_id,
                    ),
                )
                for place in places
            ],
        )
        try:
            response = await self._send(node_id, request)
        except (PenstockError, TimeoutError) as error:
            return dict.fromkeys(numbers, str(error) or f"broker {node_id}: too late")
        is_sane = len(response.results) == len(numbers) and all(
            0 <= one.place < len(places)
            for result in response.results
            for one in result.transactions
        )
        if not is_sane:
            return dict.fromkeys(numbers, f"broker {node_id} answered something else")
        return {
            number: error_from_proto(result.error).message
            if result.HasField("error")
            else result.transactions
            for number, result in zip(numbers, response.results, strict=True)
        }

    async def _send(
        self, node_id: int, request: coordination_pb2.FindTransactionsRequest
    ) -> coordination_pb2.FindTransactionsResponse:
        if node_id == self._node_id:
            async with asyncio.timeout(_TIMEOUT_S):
                return await self._local(request)
        response: coordination_pb2.FindTransactionsResponse = await self._peers.ask(
            node_id, "FindTransactions", request, _TIMEOUT_S
        )
        return response
