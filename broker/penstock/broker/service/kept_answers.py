"""Answers made of metadata, kept while the metadata stay as they are.

What many ask at once is often the same: all clients look for their topics anew when a broker
comes back, and a watcher is told what all others are. With many partitions such an answer takes
milliseconds of the loop to make; so it is made once for all, and turned into bytes once for each
port, which tells it in its own way. None outlives the metadata that it was made of.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, Final, TypeVar, cast

from google.protobuf.message import Message

from penstock.broker.service.taken import LARGE_BYTES, Tell

_KEPT_BYTES: Final = 4 * 1024 * 1024
"""So much of answers is kept, as they are on the wire: all of some 150,000 partitions."""

AnyMessage = TypeVar("AnyMessage", bound=Message)


class _Kept:
    """One of them."""

    __slots__ = ("answer", "encoded", "size_bytes")

    def __init__(self, answer: Any, size_bytes: int) -> None:
        self.answer = answer
        self.size_bytes = size_bytes
        self.encoded: dict[Tell | None, bytes] = {}  # By how the answers of a port are told.


class KeptAnswers:
    """Used on one event loop. ``version`` is another one whenever an answer may be.

    Large ones are kept: of others the call itself takes most of the time. They must not be changed
    by whoever gets them.
    """

    def __init__(self, version: Callable[[], Hashable]) -> None:
        self._version = version
        self._made_at: Hashable = None
        self._by_question: OrderedDict[bytes, _Kept] = OrderedDict()
        self._by_id: dict[int, _Kept] = {}  # No other object has an answer's id while it is kept.
        self._size_bytes = 0

    def answer(
        self, kind: type[AnyMessage], question: bytes, make: Callable[[], AnyMessage]
    ) -> AnyMessage:
        """The answer of this kind to this question, by ``make`` if it is not known.

        Questions are the same bytes where their answers are, and else others.
        """
        version = self._version()
        if version != self._made_at:
            self._forget_all()
            self._made_at = version
        key = hashlib.blake2b(question, key=kind.DESCRIPTOR.name.encode()).digest()
        kept = self._by_question.get(key)
        if kept is not None:
            self._by_question.move_to_end(key)
            return cast("AnyMessage", kept.answer)
        answer = make()
        if LARGE_BYTES <= (size_bytes := answer.ByteSize()) <= _KEPT_BYTES:
            self._keep(key, _Kept(answer, size_bytes))
        return answer

    def encoded(self, answer: Any, tell: Tell | None) -> bytes | None:
        """The bytes of an answer that is kept, as ``tell`` makes it; None for all others."""
        kept = self._by_id.get(id(answer))
        if kept is None:
            return None
        data = kept.encoded.get(tell)
        if data is None:
            told = kept.answer if tell is None else tell(kept.answer)
            data = kept.encoded[tell] = told.SerializeToString()
        return data

    def _keep(self, key: bytes, kept: _Kept) -> None:
        self._by_question[key] = self._by_id[id(kept.answer)] = kept
        self._size_bytes += kept.size_bytes
        while self._size_bytes > _KEPT_BYTES:
            _, oldest = self._by_question.popitem(last=False)
            del self._by_id[id(oldest.answer)]
            self._size_bytes -= oldest.size_bytes

    def _forget_all(self) -> None:
        self._by_question.clear()
        self._by_id.clear()
        self._size_bytes = 0
