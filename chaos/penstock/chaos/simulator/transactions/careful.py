"""A producer that does what the client's own core tells it to, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from penstock.chaos.simulator.history import check
from penstock.chaos.simulator.transactions.actors import Transfers
from penstock.chaos.simulator.transactions.history import Ended, Identity
from penstock.chaos.simulator.transactions.producer import (
    Consumable,
    Fenced,
    TransactionalProducer,
)
from penstock.chaos.simulator.transactions.scripts import Script, Sleep, error_of
from penstock.client.core.sequencer import Identity as ClientIdentity
from penstock.client.core.transaction import Transactions
from penstock.client.core.transaction_events import (
    AskEnd,
    AskIdentity,
    AwaitVerdicts,
    BeginWanted,
    Done,
    DropRecords,
    Effect,
    EndAnswered,
    EndRefused,
    EndUnanswered,
    EndWanted,
    Event,
    Failed,
    Flushed,
    IdentityGiven,
    IdentityRefused,
    InitWanted,
    KeptUntil,
    Renew,
    Renewed,
    Sent,
    SwapIdentity,
    TakeIdentity,
    Wish,
)
from penstock.v1 import common_pb2
from penstock.wire.errors import (
    ErrorCode,
    InvalidTxnStateError,
    PenstockError,
    ProducerFencedError,
    RequestTimedOutError,
    TransactionAbortableError,
    error_from_proto,
)
from penstock.wire.ids import TopicIdPartition, TopicPartition

_TRIES: Final = 4  # Of asking for an end, before it is said that nothing is known of it.
_GIVES_UP_WAITING: Final = 0.3  # Of the commits of which nothing is known: they are to be aborted.


def _error(code: ErrorCode) -> PenstockError:
    return error_from_proto(common_pb2.Error(code=code.value, message="simulated"))


def _named(identity: ClientIdentity) -> Identity:
    return Identity(identity.producer_id, identity.epoch)


class CarefulProducer(TransactionalProducer):
    """An instance of a transactional id whose every step the client's core decides."""

    def __init__(self, *what: Any, **more: Any) -> None:
        super().__init__(*what, **more)
        self._core = Transactions(self.transactional_id)

    def start(self) -> Script:
        """See TransactionalProducer."""
        yield from self._through(InitWanted())

    def renew(self) -> Script:
        """As the core says, which never goes on with what was kept for too long."""
        for effect in self._handle(KeptUntil(self._now_ms)):
            if isinstance(effect, Renew):
                self.identity = _named(effect.identity)
                yield from self._give_up_kept()
                renewed = ClientIdentity(self.identity.producer_id, self.identity.producer_epoch)
                [swap] = self._handle(Renewed(renewed))
                assert swap == SwapIdentity(renewed), swap
            else:
                assert isinstance(effect, SwapIdentity), effect

    @property
    def _now_ms(self) -> int:
        return self.process.place.scheduler.now_ms

    def begin(self, consumed: Consumable = (), group: str = "") -> None:
        """See TransactionalProducer."""
        [done] = self._handle(BeginWanted(self._now_ms))
        assert done == Done(), done
        super().begin(consumed, group)

    def write(
        self,
        key: TopicIdPartition,
        count: int = 1,
        *,
        amounts: Sequence[int] = (),
        record_key: bytes | None = None,
    ) -> None:
        """See TransactionalProducer. Nothing is sent where the core lets nothing be sent."""
        try:
            self._core.check_sending()
        except TransactionAbortableError:
            return
        except ProducerFencedError:
            raise Fenced from None
        super().write(key, count, amounts=amounts, record_key=record_key)
        written = TopicPartition(self.process.place.topic_of(key), key.partition)
        assert not self._handle(Sent(frozenset({written})))

    def _give_up(self, code: ErrorCode) -> None:
        for effect in self._handle(Failed(_error(code))):
            assert isinstance(effect, DropRecords), effect
        super()._give_up(code)

    def flush(self) -> Script:
        """The core does it when it comes to the end."""
        yield from ()

    def end(self, *, commit: bool) -> Script:
        """See TransactionalProducer."""
        wish = Wish.COMMIT if commit else Wish.ABORT
        while True:
            try:
                yield from self._through(EndWanted(wish))
            except RequestTimedOutError:  # What was wished may be so.
                if self.process.place.rng.random() < _GIVES_UP_WAITING:
                    wish = Wish.ABORT
            except TransactionAbortableError:
                wish = Wish.ABORT
            except InvalidTxnStateError:
                check(
                    wish is Wish.ABORT and commit,
                    f"{self.transactional_id}: an end is refused that nothing stands against",
                )
                self.process.note(Ended(self.txn, commit=True))
                return True
            else:
                self._failed = True  # Nothing is sent again.
                self.process.note(Ended(self.txn, wish is Wish.COMMIT))
                return wish is Wish.COMMIT

    # The core.

    def _handle(self, event: Event) -> list[Effect]:
        effects = self._core.handle(event)
        self._core.validate()
        return effects

    def _through(self, event: Event) -> Script:
        """Do what the core wants done for a wish, until that is over. Raises what it says."""
        effects = self._wish(event)
        while effects:
            effect, *effects = effects
            match effect:
                case AskIdentity():
                    effects += self._handle((yield from self._ask_identity()))
                case AskEnd():
                    effects += self._handle((yield from self._ask_for(effect)))
                case AwaitVerdicts():
                    while self._on_the_way and not self._failed:
                        yield Sleep(3, 15)
                    effects += self._handle(Flushed())
                case DropRecords():
                    self._failed = True
                case TakeIdentity(identity):
                    self.identity = _named(identity)
                case Done(error):
                    if isinstance(error, ProducerFencedError):
                        raise Fenced
                    if error is not None:
                        raise error

    def _wish(self, event: Event) -> list[Effect]:
        try:
            return self._handle(event)
        except ProducerFencedError:
            raise Fenced from None

    def _ask_identity(self) -> Script:
        answer = yield from self._init_answer()
        code = error_of(answer)
        if code is not None:
            return IdentityRefused(_error(code))
        self._take(answer)
        return IdentityGiven(ClientIdentity(answer.producer_id, answer.producer_epoch))

    def _ask_for(self, ask: AskEnd) -> Script:
        keep = [
            common_pb2.TopicPartition(topic=one.topic, partition=one.partition)
            for one in sorted(ask.keep)
        ]
        named, asked_ms = _named(ask.identity), self._now_ms
        for _ in range(_TRIES):
            answer = yield from self._ask_end(self.txn, named, commit=ask.commit, keep=keep)
            code = error_of(answer)
            if code is None:
                self._take(answer)
                following = ClientIdentity(answer.producer_id, answer.producer_epoch)
                return EndAnswered(following, asked_ms, answer.kept_ms)
            error = _error(code)
            if not error.retriable:
                return EndRefused(error)
            yield Sleep(20, 120)
        return EndUnanswered(error)


class CarefulTransfers(Transfers):
    """Moves money as an application does that uses the client."""

    contradicts = False  # The client asks for nothing of the kind.
    producer = CarefulProducer
