"""Whether LMDB can open an environment's file without ending the process.

LMDB has no checksums, and trusts what it maps: a page that is not one of its own has it abort, or
read behind the end of the file, and then the whole process is gone without a word. So the file is
looked at before LMDB opens it: all pages that LMDB may come to, and all sizes and places that it
would go by. What is in the keys and values is for their owner to judge.

The format is that of LMDB 0.9 on 64-bit machines (``mdb.c``: MDB_meta, MDB_page, MDB_node). A file
of another version is left to LMDB, which refuses it.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Final, NamedTuple, NoReturn

DATA_FILE: Final = "data.mdb"
_MAGIC: Final = 0xBEEFC0DE
_VERSION: Final = 1
_PAGE: Final = struct.Struct("=QHHHH")  # Number, unused, flags, lower, upper.
_META: Final = struct.Struct("=IIQQ48s48sQQ")
_DATABASE: Final = struct.Struct("=IHHQQQQQ")
_NODE: Final = struct.Struct("=HHHH")
_NUMBER: Final = struct.Struct("=Q")
_POINTER_BYTES: Final = 2
_BRANCH, _LEAF, _OVERFLOW, _META_PAGE = 1, 2, 4, 8
_KINDS: Final = _BRANCH | _LEAF | _OVERFLOW | _META_PAGE | 0x20 | 0x40  # Of kinds that we lack.
_BIG_DATA, _SUB_DATABASE = 1, 2
_FREE_FLAGS: Final = 8  # Its keys are numbers. We make no database with any flag.
_META_PAGES: Final = 2
_NONE: Final = 2**64 - 1
_MAX_DEPTH: Final = 32
_MAX_PAGE_BYTES: Final = 32768
_IS_64_BIT: Final = struct.calcsize("P") == 8


class DamagedPagesError(Exception):
    """The file is not what LMDB has written; says where."""


def check_pages(environment: Path) -> None:
    """Raise DamagedPagesError where LMDB must not be let at the file in ``environment``.

    Raises OSError when it can't be read. A file that is not there, or empty, is sound: LMDB makes
    it anew. To be called while nobody writes to it. Takes about a second for 50 MB.
    """
    if not _IS_64_BIT:
        return
    try:
        fd = os.open(environment / DATA_FILE, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        _check(fd)
    finally:
        os.close(fd)


class _Database(NamedTuple):
    flags: int
    depth: int
    root: int

    @classmethod
    def decode(cls, data: bytes) -> _Database:
        _, flags, depth, *_, root = _DATABASE.unpack(data)
        return cls(flags, depth, root)


class _Meta(NamedTuple):
    page_bytes: int
    free: _Database
    main: _Database
    last_page: int
    transaction: int


class _Node(NamedTuple):
    """A key, and what stands behind it; ``below`` is a branch's page."""

    flags: int
    key_bytes: int
    data_bytes: int
    data_at: int
    below: int


def _check(fd: int) -> None:
    size_bytes = os.fstat(fd).st_size
    if size_bytes == 0:
        return
    first = _read_meta(fd, 0)
    if first is None:
        return
    second = _read_meta(fd, first.page_bytes)
    meta = first if second is None or first.transaction >= second.transaction else second
    walk = _Walk(fd, meta, size_bytes)
    walk.tree(meta.main, is_free=False)
    walk.tree(meta.free, is_free=True)
    walk.check_free()


def _read_meta(fd: int, position: int) -> _Meta | None:
    """One of the two pages that say where all else is. None for another version's."""
    data = os.pread(fd, _PAGE.size + _META.size, position)
    if len(data) < _PAGE.size + _META.size:
        raise DamagedPagesError("the file ends within its first pages")
    _, _, flags, _, _ = _PAGE.unpack_from(data)
    magic, version, _, _, free, main, last_page, transaction = _META.unpack_from(data, _PAGE.size)
    if not flags & _META_PAGE or magic != _MAGIC:
        raise DamagedPagesError(f"what is at byte {position} is not the beginning of such a file")
    if version != _VERSION:
        return None
    page_bytes = _DATABASE.unpack(free)[0]
    if not 0 < page_bytes <= _MAX_PAGE_BYTES or page_bytes & (page_bytes - 1):
        raise DamagedPagesError(f"its pages would have {page_bytes} bytes")
    return _Meta(page_bytes, _Database.decode(free), _Database.decode(main), last_page, transaction)


class _Walk:
    """Goes through all pages that can be reached."""

    def __init__(self, fd: int, meta: _Meta, size_bytes: int) -> None:
        self._fd = fd
        self._page_bytes = meta.page_bytes
        self._last_page = meta.last_page
        self._end = size_bytes // meta.page_bytes
        self._used: set[int] = set()
        self._free: set[int] = set()

    def tree(self, database: _Database, *, is_free: bool) -> None:
        """All pages of a database, and of those that it names."""
        if database.flags != (_FREE_FLAGS if is_free else 0):
            raise DamagedPagesError(f"a database in it has the flags {database.flags}")
        if database.root == _NONE:
            return
        pages = [(database.root, database.depth)]
        while pages:
            number, depth = pages.pop()
            self._use(number, 1)
            data = os.pread(self._fd, self._page_bytes, number * self._page_bytes)
            is_branch = depth > 1
            nodes = self._nodes(number, data, is_branch=is_branch)
            if is_branch and depth <= _MAX_DEPTH and len(nodes) > (0 if is_free else 1):
                pages += ((node.below, depth - 1) for node in nodes)
            elif not is_branch and depth == 1 and nodes:
                for node in nodes:
                    self._leaf(number, data, node, is_free=is_free)
            else:
                self._refuse(number, f"it has {len(nodes)} entries at depth {depth}")

    def _refuse(self, number: int, what: str) -> NoReturn:
        raise DamagedPagesError(f"page {number} is not as it was written: {what}")

    def _use(self, number: int, count: int) -> None:
        """Note that these pages are somebody's, who is the only one."""
        last = number + count - 1
        if not _META_PAGES <= number <= last <= self._last_page or last >= self._end:
            raise DamagedPagesError(f"the file ends before page {last}")
        for used in range(number, last + 1):
            if used in self._used:
                self._refuse(used, "it has two places")
            self._used.add(used)

    def _nodes(self, number: int, data: bytes, *, is_branch: bool) -> list[_Node]:
        """What a page holds, all of it within the page."""
        if len(data) < self._page_bytes:
            raise DamagedPagesError(f"the file ends within page {number}")
        own, _, flags, lower, upper = _PAGE.unpack_from(data)
        if own != number or flags & _KINDS != (_BRANCH if is_branch else _LEAF):
            self._refuse(number, f"it calls itself page {own}, of kind {flags}")
        if not _PAGE.size <= lower <= upper <= self._page_bytes or lower % _POINTER_BYTES:
            self._refuse(number, f"its free room is from {lower} to {upper}")
        count = (lower - _PAGE.size) // _POINTER_BYTES
        places = struct.unpack_from(f"={count}H", data, _PAGE.size)
        nodes, end = {}, upper
        for place in sorted(places):
            if place < end or place + _NODE.size > self._page_bytes:
                self._refuse(number, f"an entry lies at {place}")
            nodes[place] = node = _node_at(data, place, is_branch=is_branch)
            held = _NUMBER.size if node.flags & _BIG_DATA else node.data_bytes
            end = node.data_at + (0 if is_branch else held)
            if end > self._page_bytes:
                self._refuse(number, f"the entry at {place} ends behind it")
        return [nodes[place] for place in places]

    def _leaf(self, number: int, data: bytes, node: _Node, *, is_free: bool) -> None:
        if node.flags & ~(_BIG_DATA | _SUB_DATABASE) or (is_free and node.flags & _SUB_DATABASE):
            self._refuse(number, f"an entry has the flags {node.flags}")
        value = data[node.data_at : node.data_at + node.data_bytes]
        if node.flags & _BIG_DATA:
            value = self._overflow(number, data, node, is_free=is_free)
        if node.flags & _SUB_DATABASE:
            if len(value) != _DATABASE.size:
                self._refuse(number, "a database in it is none")
            self.tree(_Database.decode(value), is_free=False)
        if is_free:
            if node.key_bytes != _NUMBER.size:
                self._refuse(number, "what it says of free pages has no transaction")
            self._note_free(number, value)

    def _overflow(self, number: int, data: bytes, node: _Node, *, is_free: bool) -> bytes:
        """A value with pages of its own; read only where it says which pages are free."""
        [first] = _NUMBER.unpack_from(data, node.data_at)
        if not _META_PAGES <= first < self._end:
            self._refuse(number, f"a value would be on page {first}")
        head = os.pread(self._fd, _PAGE.size, first * self._page_bytes)
        own, _, flags, low, high = _PAGE.unpack(head)
        count = low | high << 16
        if own != first or flags & _KINDS != _OVERFLOW:
            self._refuse(first, f"it calls itself page {own}, of kind {flags}")
        if _PAGE.size + node.data_bytes > count * self._page_bytes:
            self._refuse(first, f"its value of {node.data_bytes} bytes has {count} pages")
        self._use(first, count)
        position = first * self._page_bytes + _PAGE.size
        return os.pread(self._fd, node.data_bytes, position) if is_free else b""

    def _note_free(self, number: int, value: bytes) -> None:
        [count] = _NUMBER.unpack_from(value) if len(value) >= _NUMBER.size else (_NONE,)
        if (count + 1) * _NUMBER.size > len(value):
            self._refuse(number, "what it says of free pages is cut short")
        freed = struct.unpack_from(f"={count}Q", value, _NUMBER.size)
        if any(not _META_PAGES <= page <= self._last_page for page in freed):
            self._refuse(number, "it calls pages free that are none")
        self._free.update(freed)

    def check_free(self) -> None:
        """What is written next goes to a free page: none of them may be in use."""
        both = self._free & self._used
        if both:
            self._refuse(min(both), "it is in use, and free as well")


def _node_at(data: bytes, place: int, *, is_branch: bool) -> _Node:
    low, high, flags, key_bytes = _NODE.unpack_from(data, place)
    size, data_at = low | high << 16, place + _NODE.size + key_bytes
    if is_branch:
        return _Node(0, key_bytes, 0, data_at, size | flags << 32)
    return _Node(flags, key_bytes, size, data_at, 0)
