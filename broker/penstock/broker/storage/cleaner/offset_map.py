"""The last offset of each key, in memory of a fixed size."""

from __future__ import annotations

import mmap
import os
import struct
from hashlib import blake2b
from typing import Final

_HASH: Final = struct.Struct("<QQ")
_SLOT_WORDS: Final = 3  # Both halves of the key's hash, and the offset plus one; 0: free.
SLOT_BYTES: Final = 8 * _SLOT_WORDS
_LOAD: Final = 0.8
_MIN_SLOTS: Final = 16


class OffsetMap:
    """Hashes of keys with offsets, in one piece of memory that is given back by ``close``.

    Keys are told apart by 128 bits of a salted hash: that two of them ever fall together is far
    less likely than that a disk returns other bytes than it was given. Used on one thread.
    """

    __slots__ = ("_limit", "_memory", "_salt", "_slots", "_words", "count")

    def __init__(self, size_bytes: int) -> None:
        self._slots = max(size_bytes // SLOT_BYTES, _MIN_SLOTS)
        self._limit = int(self._slots * _LOAD)
        # Pages that are never touched take no memory.
        self._memory = mmap.mmap(-1, self._slots * SLOT_BYTES)
        self._words = memoryview(self._memory).cast("Q")
        self._salt = os.urandom(blake2b.SALT_SIZE)
        self.count = 0

    @property
    def room(self) -> int:
        """How many keys more are sure to fit."""
        return self._limit - self.count

    def _find(self, key: bytes) -> tuple[int, int, int]:
        """Where the key is or belongs, and its hash."""
        high, low = _HASH.unpack(blake2b(key, digest_size=_HASH.size, salt=self._salt).digest())
        words, slots = self._words, self._slots
        slot = high % slots
        while True:
            at = slot * _SLOT_WORDS
            if words[at + 2] == 0 or (words[at] == high and words[at + 1] == low):
                return at, high, low
            slot = slot + 1 if slot + 1 < slots else 0

    def put(self, key: bytes, offset: int) -> None:
        """The key's last offset is this, so far. There must be ``room`` for it."""
        at, high, low = self._find(key)
        words = self._words
        if words[at + 2] == 0:
            assert self.count < self._limit, "the map is full"
            self.count += 1
            words[at], words[at + 1] = high, low
        words[at + 2] = offset + 1

    def get(self, key: bytes) -> int:
        """The key's last offset; -1 for a key that was never put."""
        at, _, _ = self._find(key)
        return self._words[at + 2] - 1

    def close(self) -> None:
        """Give the memory back."""
        self._words.release()
        self._memory.close()
