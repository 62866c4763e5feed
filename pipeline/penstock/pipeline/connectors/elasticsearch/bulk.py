"""Bulk requests: what goes into one, what its answer means, and what is tried again.

Nothing here opens a connection: a transport is passed in, and so are the clock and the waiting.
"""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from penstock.pipeline.connectors.elasticsearch.actions import Action, Refused, lines
from penstock.pipeline.connectors.elasticsearch.options import WHERE, Limits, WriteMethod
from penstock.pipeline.errors import ConnectorError

_log: Final = logging.getLogger(__name__)
_AGAIN: Final = frozenset({408, 429, 500, 502, 503, 504})
_TOO_LARGE: Final = 413
_CONFLICT: Final = 409
_NOT_FOUND: Final = 404
_AS_NEW: Final = "version_conflict_engine_exception"


class UnreachableError(Exception):
    """No answer came; whether the request was carried out is unknown."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Of a node, to one request."""

    status: int
    body: bytes
    node: str


class Transport(Protocol):
    """What sends one bulk request."""

    def post(self, body: bytes) -> Answer:
        """The answer of one node. Raises UnreachableError; the next call takes another node."""
        ...


@dataclass(slots=True)
class Verdict:
    """What an answer says about each action of a request."""

    written: int = 0
    superseded: int = 0
    """Changed nothing, for the document is there in this version or a newer one."""
    again: list[Action] = field(default_factory=list)
    refused: list[Refused] = field(default_factory=list)
    reason: str = ""
    """Why some are to be tried again."""


def requests(
    encoded: Iterable[tuple[Action, bytes]], limits: Limits
) -> Iterator[list[tuple[Action, bytes]]]:
    """Split by both limits, in order. One that is larger than a request may be is alone."""
    chunk: list[tuple[Action, bytes]] = []
    size = 0
    for action, data in encoded:
        if chunk and (len(chunk) >= limits.actions or size + len(data) > limits.bytes):
            yield chunk
            chunk, size = [], 0
        chunk.append((action, data))
        size += len(data)
    if chunk:
        yield chunk


def judge(sent: Sequence[Action], body: bytes) -> Verdict:
    """What the answer 200 to a bulk request says. Raises ValueError for no such answer."""
    items = json.loads(body)["items"]
    if len(items) != len(sent):
        raise ValueError(f"{len(items)} results for {len(sent)} actions")
    verdict = Verdict()
    # Of two writes to one document only the later is to be seen in the end: where it is through,
    # the earlier is not tried again, for then it would come after it.
    later: set[tuple[str, str]] = set()
    for action, item in zip(reversed(sent), reversed(items), strict=True):
        ((_, result),) = item.items()
        _judge_one(verdict, action, result, later)
    verdict.again.reverse()
    verdict.refused.reverse()
    return verdict


def _judge_one(
    verdict: Verdict, action: Action, result: dict[str, Any], later: set[tuple[str, str]]
) -> None:
    status = int(result["status"])
    document = (action.index, action.id)
    if status < 300 or (status == _NOT_FOUND and action.document is None):
        verdict.written += 1
        later.add(document)
    elif status == _CONFLICT and action.version is not None and _reason(result)[0] == _AS_NEW:
        verdict.superseded += 1
        later.add(document)
    elif status in _AGAIN or status == _CONFLICT:
        if document in later and action.version is None:
            verdict.superseded += 1
            return
        kind, reason = _reason(result)
        verdict.reason = f"{status} {kind}: {reason}"
        verdict.again.append(action)
    else:
        kind, reason = _reason(result)
        verdict.refused.append(Refused(action.row, kind, reason, action.index, action.id))


def _reason(result: dict[str, Any]) -> tuple[str, str]:
    error = result.get("error", {})
    if not isinstance(error, dict):
        return "error", str(error)
    cause = error.get("caused_by")
    reason = str(error.get("reason"))
    if isinstance(cause, dict) and cause.get("reason"):
        reason += f" ({cause['reason']})"
    return str(error.get("type")), reason


class BulkWriter:
    """Writes actions in their order, and tries again what may succeed later.

    ``refuse`` is handed what is refused for good. Raises ConnectorError where nothing is left to
    try: credentials are refused, the answers are not Elasticsearch's, or for the time of
    ``retry_timeout`` nothing went through.
    """

    def __init__(
        self,
        transport: Transport,
        limits: Limits,
        method: WriteMethod,
        refuse: Callable[[list[Refused]], None],
        *,
        clock: Callable[[], float],
        wait: Callable[[float], None],
    ) -> None:
        self._transport = transport
        self._limits = limits
        self._method = method
        self._refuse = refuse
        self._clock = clock
        self._wait = wait
        self.written = 0
        self.superseded = 0

    def write(self, actions: Iterable[Action]) -> None:
        """All of them, one request after the other, so that they stay in order."""
        encoded = ((action, lines(action, self._method)) for action in actions)
        for chunk in requests(encoded, self._limits):
            self._write_one(chunk)

    def _write_one(self, chunk: list[tuple[Action, bytes]]) -> None:
        progress_at, tries = self._clock(), 0
        while chunk:
            verdict = self._try(chunk)
            if verdict is None:
                return
            self.written += verdict.written
            self.superseded += verdict.superseded
            if verdict.refused:
                self._refuse(verdict.refused)
            if not verdict.again:
                return
            if len(verdict.again) < len(chunk):
                progress_at, tries = self._clock(), 0
            if self._clock() - progress_at >= self._limits.retry_timeout_s:
                raise ConnectorError(
                    f"{WHERE}: nothing went through for {self._limits.retry_timeout_s:g} s, in "
                    f"{tries + 1} tries, the last: {verdict.reason}; next: see to Elasticsearch, "
                    "or raise retryTimeout"
                )
            self._pause(tries, verdict.reason)
            tries += 1
            keep = {id(action) for action in verdict.again}
            chunk = [entry for entry in chunk if id(entry[0]) in keep]

    def _try(self, chunk: list[tuple[Action, bytes]]) -> Verdict | None:
        """None: it was split, and that is done."""
        sent = [action for action, _ in chunk]
        try:
            answer = self._transport.post(b"".join(data for _, data in chunk))
        except UnreachableError as error:
            return Verdict(again=sent, reason=str(error))
        shown = f"{answer.status} from {answer.node}: {answer.body[:300].decode(errors='replace')}"
        if answer.status in _AGAIN:
            return Verdict(again=sent, reason=shown)
        if answer.status == _TOO_LARGE:
            if len(chunk) == 1:
                action = sent[0]
                reason = f"a request of {len(chunk[0][1])} bytes is too large for {answer.node}"
                refused = Refused(action.row, "too_large", reason, action.index, action.id)
                return Verdict(refused=[refused])
            middle = len(chunk) // 2
            self._write_one(chunk[:middle])
            self._write_one(chunk[middle:])
            return None
        if answer.status in (401, 403):
            raise ConnectorError(
                f"{WHERE}: access is refused: {shown}; next: check username and password or "
                "apiKey, and that they may write to the index"
            )
        if answer.status != 200:
            raise ConnectorError(
                f"{WHERE}: no bulk interface answers: {shown}; next: check option url"
            )
        try:
            return judge(sent, answer.body)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConnectorError(
                f"{WHERE}: not the answer of a bulk interface ({error}): {shown}; next: check url"
            ) from error

    def _pause(self, tries: int, reason: str) -> None:
        limits = self._limits
        longest = min(limits.backoff_max_s, limits.backoff_s * 2.0 ** min(tries, 30))
        # Some of it by chance, so that tasks that were refused together do not come back together.
        seconds = longest * random.uniform(0.5, 1.0)
        _log.warning("%s: trying again in %.1f s: %s", WHERE, seconds, reason)
        self._wait(seconds)
