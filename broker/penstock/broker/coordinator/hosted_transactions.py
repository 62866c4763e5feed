"""A led partition of ``__transaction_state`` with its transactions."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from penstock.broker.coordinator.hosted import Held, HostedShard, HostPorts, Place
from penstock.broker.coordinator.marking import MarkSender
from penstock.broker.core import transaction_describe
from penstock.broker.core.transaction_events import (
    Change,
    Effect,
    Event,
    KnownTopics,
    Loaded,
    MarkDone,
    MarksCommitted,
    Persist,
    ProducerIdGiven,
    ProducerIdRefused,
    Respond,
    SendMarks,
    TakeProducerId,
    Tick,
    TopicsRemoved,
    TransactionSettings,
)
from penstock.broker.core.transaction_marks import Owner
from penstock.broker.core.transaction_shard import TransactionShard
from penstock.broker.core.transaction_values import NOBODY, State, Transaction
from penstock.wire.errors import (
    CoordinatorLoadInProgressError,
    PenstockError,
    UnknownServerError,
)
from penstock.wire.ids import TopicId, TopicIdPartition

_LOOKED_AT_ONCE: Final = 2_000

Holder = tuple[int, TopicIdPartition, str]
"""A producer id, a partition, and the transactional id whose transaction will end there."""


@dataclass(frozen=True, slots=True)
class TransactionContext:
    """What the transactions of all partitions share.

    ``take_producer_id`` gives an id that nobody had before, or raises PenstockError.
    """

    topics: KnownTopics
    settings: TransactionSettings
    take_producer_id: Callable[[], Awaitable[int]]
    sender: MarkSender
    on_ended: Callable[[bool], None] = lambda _commit: None
    """Told where a transaction is decided, and whether it commits."""


class HostedTransactions(HostedShard[TransactionShard]):
    """The transactions of one partition during one leadership; see HostedShard."""

    def __init__(self, place: Place, ports: HostPorts, context: TransactionContext) -> None:
        super().__init__(place, ports)
        self._context = context
        self._owner = Owner(place.partition, place.leader_epoch)

    def ask_all(self, make_events: Sequence[Callable[[int], Event]]) -> list[asyncio.Future[Any]]:
        """Put events made with request ids, and have them written together.

        The futures are answered as those of :meth:`ask`; each is to be awaited. Raises
        PenstockError when not serving.
        """
        self._check_serving()
        futures = []
        events = []
        for make_event in make_events:
            request_id, future = self._new_request()
            future.add_done_callback(partial(self._answered, request_id))
            futures.append(future)
            events.append(make_event(request_id))
        self._handle(*events)
        return futures

    async def find(self, places: Mapping[int, Set[TopicIdPartition]]) -> list[Holder]:
        """Who will end a transaction in one of these places, by producer id; see ``holders``.

        Raises PenstockError unless this was the coordinator, and had loaded, from first to last.
        """
        self._check_serving()
        shard = self._shard
        assert shard is not None
        found: list[Holder] = []
        names = list(shard.ledger.ids)
        for at in range(0, len(names), _LOOKED_AT_ONCE):
            found += transaction_describe.holders(
                shard.ledger, names[at : at + _LOOKED_AT_ONCE], places
            )
            await asyncio.sleep(0)
        self._check_serving()
        if self._shard is not shard:
            raise CoordinatorLoadInProgressError(f"{self.place} was read again; ask again soon")
        return found

    def count_states(self) -> tuple[Counter[str], int]:
        """Ids by state, and since when, by the wall clock, the oldest transaction has been open.

        0 where none is. Nothing while it loads. On any thread.
        """
        shard = self._shard
        found = [] if shard is None else list(shard.ledger.ids.values())
        begun_ms = [one.start_ms for one in found if one.state is State.ONGOING]
        states = Counter(one.state.name.lower() for one in found)
        return states, min((ms for ms in begun_ms if ms > 0), default=0)

    def marks_committed(self, marks: Sequence[MarkDone]) -> None:
        """Marks are there. While it loads nobody waits for them: they are sent again."""
        if self._shard is not None:
            self._handle(MarksCommitted(tuple(marks)))

    def topics_removed(self, topic_ids: frozenset[TopicId]) -> None:
        """Topics are gone. What happens while loading is seen at its end."""
        if self._shard is not None:
            self._handle(TopicsRemoved(topic_ids))

    # ------------------------------------------------------------------ what HostedShard asks for

    def _make_shard(self) -> TransactionShard:
        return TransactionShard(self._context.topics, self._context.settings)

    def _loaded_event(self) -> Loaded:
        return Loaded(self._ports.wall_clock_ms())

    def _tick_event(self) -> Tick:
        return Tick(self._ports.wall_clock_ms())

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case Persist():
                self._count_decision(effect.change)
                self._persist(effect.subject, (effect.change,))
            case Respond():
                self._respond(effect.subject, effect.request_id, effect.response)
            case SendMarks():
                # As an answer: no mark leaves before its decision is committed.
                send = partial(self._context.sender.send, self._owner, effect.marks)
                self._hold(effect.subject, Held(send, _nothing))
            case TakeProducerId():
                self._spawn(self._take_producer_id(), "take a producer id")

    def _count_decision(self, change: Change) -> None:
        if change.is_group or change.value is None or self._shard is None:
            return
        now = self._shard.ledger.ids.get(change.name)
        if now is None:
            return
        before = change.before if isinstance(change.before, Transaction) else None
        if now.last not in (NOBODY, NOBODY if before is None else before.last):
            self._context.on_ended(now.last_committed)
        elif now.lapsed and before is not None and not before.lapsed:
            self._context.on_ended(False)

    def _on_loaded(self, shard: TransactionShard, record_count: int) -> None:
        self._log.info(
            "transactions loaded", transactions=len(shard.ledger.ids), records=record_count
        )

    def _on_halted(self) -> None:
        self._context.sender.drop(self._owner)

    async def _take_producer_id(self) -> None:
        event: Event
        try:
            event = ProducerIdGiven(await self._context.take_producer_id())
        except PenstockError as error:
            event = ProducerIdRefused(error)
        except Exception as error:
            self._log.exception("no producer id")
            event = ProducerIdRefused(UnknownServerError(f"no producer id: {error!r}"))
        if self._shard is not None:
            self._handle(event)

    def _answered(self, request_id: int, future: asyncio.Future[Any]) -> None:
        self._requests.pop(request_id, None)
        if not future.cancelled():
            future.exception()  # Who asked may have gone; that is not to be reported.


def _nothing(_error: PenstockError) -> None:
    """Marks of what was not decided are not sent."""
