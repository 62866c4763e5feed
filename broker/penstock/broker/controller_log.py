"""What a broker says of the controllers in its log: once, as long as it stays the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import structlog
from grpc import aio

from penstock.wire.errors import PenstockError

log = structlog.get_logger()

_SILENCE_MS: Final = 3_000
_UNHEARD_AGAIN_MS: Final = 10_000
"""That heartbeats fail again after they were answered is not said more often."""
_UNHEARD_STILL_MS: Final = 60_000
"""... and that they still do not more often than this."""
_REFUSED_PAUSE_MS: Final = 2_000
"""A controller that refuses is not asked again sooner, if all do so for long."""
_MOST_DOUBLINGS: Final = 10


class ControllerSilence:
    """Says in the log, once, why no controller is heard; single ones come and go without a word."""

    def __init__(self, clock_ms: Callable[[], int]) -> None:
        self._clock_ms = clock_ms
        self._since_ms: int | None = None
        self._reasons: dict[int, str] = {}
        self._told = False

    def heard(self) -> None:
        """A controller answered."""
        self._since_ms = None
        self._reasons.clear()
        self._told = False

    def broke(self, node_id: int, reason: str) -> None:
        """A controller did not answer, or ended what it told."""
        now_ms = self._clock_ms()
        if self._since_ms is None:
            self._since_ms = now_ms
        self._reasons[node_id] = reason
        if not self._told and now_ms - self._since_ms >= _SILENCE_MS:
            self._told = True
            log.warning(
                "no controller can be heard",
                reasons={node: self._reasons[node] for node in sorted(self._reasons)},
                next_step="check that a majority of the controllers runs, that "
                "controller.quorum.voters is right, and that tls.* is set on every node or on "
                "none, with certificates of one authority",
            )


class Unheard:
    """When to say in the log that heartbeats fail: as it begins, and then now and then.

    A controller that changes often on a busy machine makes heartbeats fail all the time, each time
    for another reason; what is left out of the log is counted instead. Times in milliseconds.
    """

    def __init__(self) -> None:
        self._since_ms: int | None = None
        self._said_ms: int | None = None
        self._failures = 0  # Since something was said last.

    def heard(self) -> None:
        """A heartbeat was answered."""
        self._since_ms = None

    def failed(self, now_ms: int) -> dict[str, int] | None:
        """What to say of this failure besides its reason, or None to say nothing."""
        began = self._since_ms is None
        if self._since_ms is None:
            self._since_ms = now_ms
        self._failures += 1
        wait_ms = _UNHEARD_AGAIN_MS if began else _UNHEARD_STILL_MS
        if self._said_ms is not None and now_ms - self._said_ms < wait_ms:
            return None
        failures, self._failures, self._said_ms = self._failures, 0, now_ms
        return {"failures": failures, "for_ms": now_ms - self._since_ms}


class FeedRefusals:
    """When to ask for metadata again after a refusal, and when to say in the log why.

    A refusal is for a reason that stays, such as the id of another cluster: it is said once of each
    controller, when the reason is another one, and then now and then. Times in milliseconds.
    """

    def __init__(self) -> None:
        self._in_a_row = 0
        self._said: dict[int, tuple[str, int]] = {}  # By controller.
        self._unsaid = 0  # Since something was said last.

    def heard(self) -> None:
        """A controller told metadata."""
        self._in_a_row = 0

    def say(self, node_id: int, reason: str, now_ms: int) -> None:
        """A controller refused: put it into the log, if it is time to."""
        told = self.refused(node_id, reason, now_ms)
        if told is not None:
            log.warning("metadata feed refused", controller=node_id, reason=reason, **told)

    def refused(self, node_id: int, reason: str, now_ms: int) -> dict[str, int] | None:
        """What to say of this refusal besides its reason, or None to say nothing."""
        self._in_a_row += 1
        said = self._said.get(node_id)
        if said is not None and said[0] == reason and now_ms - said[1] < _UNHEARD_STILL_MS:
            self._unsaid += 1
            return None
        self._said[node_id] = (reason, now_ms)
        unsaid, self._unsaid = self._unsaid, 0
        return {"unsaid": unsaid}

    def pause_ms(self, least_ms: int) -> int:
        """How long to wait before another is asked: twice as long after each refusal in a row."""
        doublings = min(max(self._in_a_row - 1, 0), _MOST_DOUBLINGS)
        return min(least_ms << doublings, max(least_ms, _REFUSED_PAUSE_MS))


def in_words(error: BaseException) -> str:
    """Why a call failed, for people: an error's message, or gRPC's status with its details."""
    match error:
        case PenstockError():
            return error.message
        case aio.AioRpcError():
            return f"{error.code().name}: {error.details() or 'no details'}"
        case TimeoutError():
            return "no answer in half of broker.session.timeout.ms"
        case _:
            return f"{type(error).__name__}: {error}"


def cause_of(error: BaseException) -> str:
    """What is the same each time that a call fails for the same cause: gRPC has several details
    for one status, such as for a time that is over, and some of them name a port.
    """
    return error.code().name if isinstance(error, aio.AioRpcError) else in_words(error)


class Untold:
    """Says in the log, once for each cause, that clients from outside are not told yet where they
    reach this broker; and when they are.
    """

    def __init__(self) -> None:
        self._because = ""

    def failed(self, controller: int, error: BaseException) -> None:
        """A controller did not take it."""
        cause = cause_of(error)
        if cause == self._because:
            return
        self._because = cause
        log.warning(
            "clients from outside are not told of external.advertised yet",
            controller=controller,
            reason=in_words(error),
            next_step="nothing: it is tried again with each heartbeat",
        )

    def told(self) -> None:
        """The controllers have it now."""
        self._because = ""
        log.info("clients from outside are told of external.advertised now")
