"""The transactions of one producer, one after the other: what is allowed now, and what comes next.

===========  ===========================================================================
NO_IDENTITY  an identity makes it READY
READY        begin: OPEN
OPEN         commit or abort: ENDING; a record that failed: SPOILED
SPOILED      abort: ENDING
ENDING       the coordinator's answer: READY; none in time: UNSURE
UNSURE       asked again: ENDING
===========  ===========================================================================

Each end gives the producer another epoch, so (producer id, epoch) names one transaction: to ask
again for the end of one, however late, can never end another (KIP-890). An epoch of which nothing
was sent needs no end, but for an engine's attempt, which its coordinator takes for open.

A SPOILED transaction can only be aborted. Where a leader refused a batch for its epoch, somebody
has ended the transaction already: the coordinator, since it took too long, or another producer of
the name. Leaders can't tell which. An abort changes nothing then, and its answer says which, so it
is asked before a commit is refused.

Errors are sorted as KIP-1050 does. FENCED and FAILED have no way out.

A producer that goes from one transaction to the next names, in its commit, where it has written:
the next one is open there at once, and its leaders let it in without asking anybody (ADR 13). So it
counts for brokers before it has begun. Where it does not begin in time, or nothing is sent of it
for so long, it is given up: an abort in the background, which gives another identity. Records wait
for that. To come too late for it costs a transaction at most, which is abortable
then.

An engine's task attempt has such a transaction as well. It is not committed by its producer: it is
PREPARED when all is acknowledged, and somebody else decides.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Final

from penstock.client.core.sequencer import Identity
from penstock.client.core.transaction_events import (
    Answer,
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
    Interrupted,
    KeptUntil,
    Renew,
    Renewed,
    Sent,
    SwapIdentity,
    TakeIdentity,
    Wish,
)
from penstock.wire.errors import (
    InvalidProducerEpochError,
    InvalidProducerIdMappingError,
    InvalidTxnStateError,
    PenstockError,
    ProducerFencedError,
    RequestTimedOutError,
    TransactionAbortableError,
)
from penstock.wire.ids import TopicPartition

GOES_ON_MS: Final = 1_000.0
"""Who begins so soon after an end is taken to go from one transaction to the next."""


class Phase(Enum):
    """Where a transactional producer stands."""

    NO_IDENTITY = auto()
    READY = auto()
    OPEN = auto()
    SPOILED = auto()
    ENDING = auto()
    UNSURE = auto()
    PREPARED = auto()
    FENCED = auto()
    FAILED = auto()


_FENCED: Final = (ProducerFencedError, InvalidProducerEpochError, InvalidProducerIdMappingError)
"""What only a coordinator can say for sure. Of a leader all but the first may be a timeout's."""


@dataclass(slots=True)
class Transactions:
    """The state machine. ``handle`` is its only mutator; call it on one thread.

    A wish that is not allowed now raises, and changes nothing: InvalidTxnStateError,
    TransactionAbortableError, ProducerFencedError, or what ended the producer.
    ``name`` is the producer's, for messages, and ``is_attempt`` says that it is an engine's writer,
    whose methods have other names.
    """

    name: str
    is_attempt: bool = False
    phase: Phase = Phase.NO_IDENTITY
    identity: Identity = field(default_factory=Identity)
    _cause: PenstockError | None = None  # Why it is SPOILED, FENCED or FAILED.
    _wish: Wish = Wish.COMMIT  # While ENDING or UNSURE.
    _touched: bool = False  # Brokers may have heard of it.
    _asked: bool = False  # While ENDING: the coordinator was.
    _finding_out: bool = False  # While ENDING: who ended it; the wish is refused anyway.
    _is_over: bool = False  # While SPOILED: the coordinator has decided, the identity is new.
    _may_be_committed: bool = False  # A commit had no answer, and now it is to be aborted.
    # While nothing was sent of it: it is open for brokers, and to be given up then.
    kept_until_ms: float | None = None
    is_renewing: bool = False  # It is being given up; records have no identity.
    _ended_ms: float | None = None  # When the end of the last one was asked for.
    _goes_on: bool = False  # It has begun right after the one before.
    _partitions: frozenset[TopicPartition] = frozenset()  # That it has written to.
    _effects: list[Effect] = field(default_factory=list)

    def handle(self, event: Event) -> list[Effect]:
        """Take one event and say what to do, in that order."""
        if isinstance(event, InitWanted):
            self._init()
        elif isinstance(event, BeginWanted):
            self._begin(event.now_ms)
        elif isinstance(event, EndWanted):
            self._end(event.wish)
        elif isinstance(event, Sent):
            self._sent(event.partitions)
        elif isinstance(event, Failed):
            self._failed(event.error)
        elif isinstance(event, Flushed):
            self._flushed()
        elif isinstance(event, KeptUntil):
            self._give_up_kept(event.now_ms)
        elif isinstance(event, Interrupted):
            self._interrupted()
        else:
            self._take_answer(event)
        effects, self._effects = self._effects, []
        return effects

    def _take_answer(self, event: Answer) -> None:
        if isinstance(event, IdentityGiven):
            self._ready(event.identity)
        elif isinstance(event, IdentityRefused):
            self._refused_identity(event.error)
        elif isinstance(event, EndAnswered):
            self._answered(event)
        elif isinstance(event, EndRefused):
            self._refused(event.error)
        elif isinstance(event, EndUnanswered):
            self._unanswered(event.error)
        elif isinstance(event, Renewed):
            self._renewed(event.identity)
        else:
            self._renewal_refused(event.error)

    @property
    def is_open(self) -> bool:
        """Whether there is one that an abort would end."""
        return self.phase in (Phase.OPEN, Phase.SPOILED)

    @property
    def left_open(self) -> bool:
        """Whether brokers may wait for the end of one that can still be aborted."""
        return self.is_open and self._touched and not self._is_over

    @property
    def is_unsettled(self) -> bool:
        """Whether who began it has not heard how it ended, or that it can't.

        One that somebody else is ending is not: they hear.
        """
        return self.phase in (
            Phase.OPEN,
            Phase.SPOILED,
            Phase.UNSURE,
            Phase.FENCED,
            Phase.FAILED,
        )

    def check_sending(self) -> None:
        """Raise why no record can be added to the transaction now, if none can.

        Whoever adds one has looked under the guard under which wishes are handled.
        """
        if self.phase is not Phase.OPEN:
            self._raise_unless_alive()
            self._raise_if_spoiled()
            raise InvalidTxnStateError(
                f"{self.name} sends nothing outside of a transaction: {self._standing()}"
                if self.phase in (Phase.NO_IDENTITY, Phase.READY)
                else f"the transaction of {self.name} takes nothing more: {self._standing()}"
            )

    # --- wishes -----------------------------------------------------------------------------

    def _init(self) -> None:
        self._raise_unless_alive()
        if self.phase is Phase.NO_IDENTITY:
            self._effects.append(AskIdentity())
        else:
            self._effects.append(Done())

    def _begin(self, now_ms: float) -> None:
        self._raise_unless_alive()
        if self.phase is not Phase.READY:
            hint = _ONE_AT_A_TIME if self.phase in (Phase.OPEN, Phase.ENDING) else ""
            raise InvalidTxnStateError(
                f"{self.name} can't begin a transaction: {self._standing()}{hint}"
            )
        self.phase = Phase.OPEN
        self._touched = self.is_attempt  # A group's commit may name it from its beginning on.
        self._goes_on = self._ended_ms is not None and now_ms - self._ended_ms < GOES_ON_MS
        self._give_up_kept(now_ms)
        self._effects.append(Done())

    def _end(self, wish: Wish) -> None:
        self._raise_unless_alive()
        if wish is Wish.ABORT:
            self._abort()
        elif self.phase is Phase.UNSURE and self._wish is wish:
            self._may_be_committed = False
            self._ask(wish)
        elif self.phase is Phase.PREPARED and wish is Wish.PREPARE:
            self._effects.append(Done())  # Who was interrupted has not heard of it.
        elif self.phase is Phase.SPOILED:
            self._refuse_wish(wish)
        elif self.phase is Phase.OPEN:
            self._cause = None
            self._asked = False
            self._enter_end(wish)
            self._effects.append(AwaitVerdicts())
        else:
            raise self._out_of_turn(wish)

    def _abort(self) -> None:
        if self.phase not in (Phase.OPEN, Phase.SPOILED, Phase.UNSURE, Phase.PREPARED):
            raise self._out_of_turn(Wish.ABORT)
        self._may_be_committed |= self.phase is Phase.UNSURE and self._wish is Wish.COMMIT
        if self.phase is not Phase.UNSURE:
            self._effects.append(
                DropRecords(
                    TransactionAbortableError(f"the transaction of {self.name} was aborted")
                )
            )
        if self._touched and not self._is_over:
            self._ask(Wish.ABORT)
        else:
            self._ready(self.identity)

    def _enter_end(self, wish: Wish) -> None:
        self.phase = Phase.ENDING
        self._wish = wish
        self._finding_out = False

    def _ask(self, wish: Wish) -> None:
        self._enter_end(wish)
        self._asked = True
        commit = wish is Wish.COMMIT
        keeps = commit and self._goes_on and not self.is_attempt
        keep = self._partitions if keeps else frozenset[TopicPartition]()
        self._effects.append(AskEnd(self.identity, commit, keep))

    def _flushed(self) -> None:
        if self.phase in (Phase.FENCED, Phase.FAILED):
            self._effects.append(Done(self._cause))
        elif self._cause is not None:
            self.phase = Phase.SPOILED
            self._refuse_wish(self._wish)
        elif self._wish is Wish.PREPARE:
            self.phase = Phase.PREPARED
            self._effects.append(Done())
        elif self._touched:
            self._ask(self._wish)
        else:
            self._ready(self.identity)

    def _refuse_wish(self, wish: Wish) -> None:
        """It is SPOILED; say so, once it is known that no other producer has the name."""
        if self._touched and not self._is_over and isinstance(self._cause, _FENCED):
            self._ask(Wish.ABORT)
            self._wish = wish
            self._finding_out = True
        else:
            self._effects.append(Done(self._spoiled()))

    # --- answers ----------------------------------------------------------------------------

    def _ready(self, identity: Identity) -> None:
        self.phase = Phase.READY
        self.identity = identity
        self._cause = None
        self._touched = self._is_over = self._asked = self._may_be_committed = False
        self._partitions = frozenset()
        self._effects += [TakeIdentity(Identity() if self.is_renewing else identity), Done()]

    def _refused_identity(self, error: PenstockError) -> None:
        if isinstance(error, _FENCED):
            error = self._fence(error)
        self._effects.append(Done(error))

    def _answered(self, event: EndAnswered) -> None:
        identity = event.identity
        if self._finding_out:
            self.phase = Phase.SPOILED
            self.identity = identity
            self._is_over = True
            self._effects.append(Done(self._spoiled()))
            return
        found_committed = self._may_be_committed and self._wish is Wish.COMMIT
        self._ready(identity)
        self._ended_ms = event.asked_ms
        if event.kept_ms > 0:
            self.kept_until_ms = event.asked_ms + event.kept_ms
        if found_committed:
            self._effects[-1] = Done(
                InvalidTxnStateError(
                    f"the transaction of {self.name} can't be aborted: it is committed, by the "
                    "commit that had no answer; next: go on with begin_transaction()"
                )
            )

    def _refused(self, error: PenstockError) -> None:
        if isinstance(error, _FENCED):
            self._effects.append(Done(self._fence(error)))
        elif isinstance(error, TransactionAbortableError) and not self._finding_out:
            self.phase = Phase.SPOILED
            self._cause = error
            self._effects.append(Done(self._spoiled()))
        elif (
            isinstance(error, InvalidTxnStateError)
            and self._may_be_committed
            and self._wish is Wish.ABORT
        ):
            self._ask(Wish.COMMIT)  # Its answer has the identity to go on with.
        else:
            self.phase = Phase.FAILED
            self._cause = error
            self._effects.append(Done(error))

    def _unanswered(self, error: PenstockError) -> None:
        if self._finding_out:
            self.phase = Phase.SPOILED
            self._effects.append(Done(self._spoiled()))
            return
        self.phase = Phase.UNSURE
        told = RequestTimedOutError(
            f"the transaction of {self.name} may be {_past(self._wish)} or not: the coordinator "
            f"did not answer in time; next: call {self._call(self._wish)} again, which decides "
            f"nothing twice; last: {error.message}"
        )
        told.__cause__ = error
        self._effects.append(Done(told))

    def _interrupted(self) -> None:
        if self.phase is not Phase.ENDING:
            return
        if self._finding_out or not self._asked:
            self.phase = Phase.OPEN if self._cause is None else Phase.SPOILED
        else:
            self.phase = Phase.UNSURE

    # --- what was kept ----------------------------------------------------------------------

    def _sent(self, partitions: frozenset[TopicPartition]) -> None:
        assert not self.is_renewing
        self._touched = True
        self.kept_until_ms = None
        if not partitions <= self._partitions:
            self._partitions |= partitions

    def _give_up_kept(self, now_ms: float) -> None:
        if self.kept_until_ms is None or now_ms < self.kept_until_ms:
            return
        self.kept_until_ms = None
        self.is_renewing = True
        self._effects += [SwapIdentity(Identity()), Renew(self.identity)]

    def _renewed(self, identity: Identity) -> None:
        self.is_renewing = False
        self.identity = identity
        self._effects.append(SwapIdentity(identity))

    def _renewal_refused(self, error: PenstockError) -> None:
        self.is_renewing = False
        if isinstance(error, _FENCED):
            error = self._fence(error)
        else:
            self.phase = Phase.FAILED
            self._cause = error
        self._effects.append(DropRecords(error))

    # --- failures ---------------------------------------------------------------------------

    def _failed(self, error: PenstockError) -> None:
        flushing = self.phase is Phase.ENDING and not self._asked
        if not (self.phase is Phase.OPEN or flushing) or self._cause is not None:
            return
        if isinstance(error, ProducerFencedError) and not flushing:
            self._effects.append(DropRecords(self._fence(error)))
            return
        self._cause = error
        if not flushing:
            self.phase = Phase.SPOILED
        dropped = TransactionAbortableError(
            f"not sent, for the transaction of {self.name} can't be committed any more; next: "
            f"{self._call(Wish.ABORT)}, then begin anew; because: {error.message}"
        )
        dropped.__cause__ = error
        self._effects.append(DropRecords(dropped))

    def _fence(self, error: PenstockError) -> ProducerFencedError:
        fenced = ProducerFencedError(
            f"{self.name} is fenced: another producer of this transactional id has taken over, or "
            "the id was not used for so long that the cluster forgot it. What this one had not "
            "committed never will be; next: close it, and make a new one only if no other shall "
            f"go on; the answer was {type(error).__name__}: {error.message}"
        )
        fenced.__cause__ = error
        self.phase = Phase.FENCED
        self._cause = fenced
        return fenced

    def _spoiled(self) -> TransactionAbortableError:
        assert self._cause is not None
        error = TransactionAbortableError(
            f"the transaction of {self.name} can't be committed, and nothing of it is"
            f"{_OVER if self._is_over else ''}; next: {self._call(Wish.ABORT)}, then begin anew "
            f"with the same work; because: {self._cause.message}"
        )
        error.__cause__ = self._cause
        return error

    def _raise_if_spoiled(self) -> None:
        if self.phase is Phase.SPOILED:
            raise self._spoiled()

    def _raise_unless_alive(self) -> None:
        if self.phase in (Phase.FENCED, Phase.FAILED):
            assert self._cause is not None
            again = type(self._cause)(self._cause.message)
            again.__cause__ = self._cause
            raise again

    def _out_of_turn(self, wish: Wish) -> InvalidTxnStateError:
        return InvalidTxnStateError(f"{self.name} has nothing to {wish.value}: {self._standing()}")

    def _standing(self) -> str:
        """Where it stands, and what can be done next."""
        if self.phase is Phase.UNSURE:
            return (
                f"whether the last transaction is {_past(self._wish)} is not known yet; next: call "
                f"{self._call(self._wish)} again"
            )
        if self.phase is Phase.ENDING:
            return "it is being ended; next: wait until that has returned"
        if self.phase is Phase.PREPARED:
            return "it is prepared, and a commit of its group decides; next: abort(), or nothing"
        abort = self._call(Wish.ABORT)
        if self.phase is Phase.SPOILED:
            return f"a transaction is open and can't be committed; next: {abort}"
        if self.phase is Phase.OPEN:
            end = self._call(Wish.PREPARE if self.is_attempt else Wish.COMMIT)
            return f"a transaction is open; next: {end} or {abort}"
        if self.is_attempt:
            return "the attempt is over; next: begin another one"
        return (
            "no transaction is open; next: begin_transaction(), or a block of "
            "`with producer.transaction():`"
        )

    def _call(self, wish: Wish) -> str:
        return f"{wish.value}()" if self.is_attempt else f"{wish.value}_transaction()"

    def validate(self) -> None:
        """Assert what always holds (for tests)."""
        assert (self.phase is Phase.NO_IDENTITY) <= (not self.identity.real)
        if self.phase in (Phase.SPOILED, Phase.FENCED, Phase.FAILED):
            assert self._cause is not None
        if self.phase is Phase.READY:
            assert not self._touched
            assert self._cause is None
        if self.phase is Phase.UNSURE:
            assert self._touched
        if self._touched:
            assert self.kept_until_ms is None
            assert not self.is_renewing
        assert not (self.is_renewing and self.kept_until_ms is not None)


_ONE_AT_A_TIME: Final = (
    "; where another thread or task began it, give each a producer with an id of its own"
)
_OVER: Final = (
    " (the cluster has aborted it: it took longer than transaction_timeout_ms, or a person had it "
    "aborted)"
)


def _past(wish: Wish) -> str:
    return "committed" if wish is Wish.COMMIT else "aborted"
