"""What is let at LMDB: every file that it wrote, and none that it could end the process by."""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import lmdb
import pytest

from penstock.raft_meta.lmdb_pages import DATA_FILE, DamagedPagesError, check_pages

PAGE_BYTES = 4096
NEW_VALUE_BYTES = (0, 3, 40, 900, 3000, 30_000)

DAMAGE_AND_USE = """
import pathlib, random, sys
import lmdb
from penstock.raft_meta.lmdb_pages import DATA_FILE, DamagedPagesError, check_pages
root, sound = map(pathlib.Path, sys.argv[1:3])
sound_bytes = (sound / DATA_FILE).read_bytes()
chance, refused = random.Random(int(sys.argv[3])), 0
for number in range(int(sys.argv[4])):
    data = bytearray(sound_bytes)
    at = 4096 * chance.randrange(len(data) // 4096)
    match number % 5:
        case 0:
            for _ in range(8):
                bit = chance.randrange(8 * len(data))
                data[bit // 8] ^= 1 << bit % 8
        case 1:
            data[at : at + 4096] = chance.randbytes(4096)
        case 2:
            data[at : at + 4096] = bytes(4096)
        case 3:
            del data[chance.randrange(1, len(data)) :]
        case 4:  # In what says where the entries of a page are.
            data[at + chance.randrange(64)] ^= 1 << chance.randrange(8)
    (root / DATA_FILE).write_bytes(data)
    (root / "lock.mdb").unlink(missing_ok=True)
    try:
        check_pages(root)
    except DamagedPagesError:
        refused += 1
        continue
    try:
        with lmdb.open(str(root), map_size=1 << 28, max_dbs=2) as environment:
            with environment.begin() as transaction:
                for key, value in transaction.cursor():
                    len(key + value)
            for _ in range(3):
                with environment.begin(write=True) as transaction:
                    for key in range(40):
                        transaction.put(b"%d" % key, chance.randbytes(500))
                    for key in range(0, 40, 3):
                        transaction.delete(b"%d" % key)
    except lmdb.Error:
        pass
print("refused", refused)
"""


def fill(root: Path, chance: random.Random, *, named: bool, transactions: int) -> None:
    """Write and delete at random, checking after each transaction."""
    root.mkdir()
    with lmdb.open(str(root), map_size=1 << 28, max_dbs=2, sync=False) as environment:
        databases = [
            environment.open_db(name) for name in ((b"log", b"meta") if named else (None,))
        ]
        for _ in range(transactions):
            with environment.begin(write=True) as transaction:
                for _ in range(chance.choice((1, 5, 100, 600))):
                    key = chance.randrange(300).to_bytes(chance.choice((2, 8, 20, 200)), "big")
                    database = chance.choice(databases)
                    if chance.random() < 0.35:
                        transaction.delete(key, db=database)
                    else:
                        value = chance.randbytes(chance.choice(NEW_VALUE_BYTES))
                        transaction.put(key, value, db=database)
            check_pages(root)


@pytest.mark.parametrize("named", [False, True])
def test_whatever_lmdb_writes_is_sound(tmp_path: Path, named: bool) -> None:
    for seed in range(3):
        fill(tmp_path / str(seed), random.Random(seed), named=named, transactions=15)
        check_pages(tmp_path / str(seed))


def test_a_file_that_is_not_there_or_empty_is_sound(tmp_path: Path) -> None:
    check_pages(tmp_path)
    (tmp_path / DATA_FILE).touch()
    check_pages(tmp_path)


def test_an_environment_with_nothing_in_it_is_sound(tmp_path: Path) -> None:
    lmdb.open(str(tmp_path), map_size=1 << 20).close()
    check_pages(tmp_path)


@pytest.mark.parametrize("named", [False, True])
def test_no_damage_that_is_let_through_ends_the_process(tmp_path: Path, named: bool) -> None:
    fill(tmp_path / "sound", random.Random(1), named=named, transactions=3)
    (tmp_path / "used").mkdir()
    used = subprocess.run(
        [sys.executable, "-c", DAMAGE_AND_USE, tmp_path / "used", tmp_path / "sound", "7", "150"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert used.returncode == 0, used.stderr
    assert int(used.stdout.split()[-1]) > 20, "there was damage"


@pytest.mark.parametrize("end", [1, 100, PAGE_BYTES, 3 * PAGE_BYTES])
def test_a_file_cut_short_is_damaged(tmp_path: Path, end: int) -> None:
    fill(tmp_path / "sound", random.Random(1), named=False, transactions=2)
    cut = tmp_path / "cut"
    shutil.copytree(tmp_path / "sound", cut)
    (cut / DATA_FILE).write_bytes((cut / DATA_FILE).read_bytes()[:end])
    with pytest.raises(DamagedPagesError, match="ends"):
        check_pages(cut)


class Pages:
    """The bytes of an environment with a tree of two levels, and where things are in them."""

    def __init__(self, data: bytes) -> None:
        self.data = bytearray(data)
        self.meta = max((0, PAGE_BYTES), key=lambda at: self.number(at + 144))
        self.free, self.main = self.meta + 40, self.meta + 88  # What is said of each database.
        self.root = self.number(self.main + 40) * PAGE_BYTES
        self.first, self.second = (self.root + self.number(self.root + at, 2) for at in (16, 18))
        leaf = self.number(self.free + 40) * PAGE_BYTES
        node = leaf + self.number(leaf + 16, 2)
        self.freed = node + 8 + self.number(node + 6, 2)  # How many pages, and which.

        self.leaf = self.number(self.first, 2) * PAGE_BYTES
        kinds = {at: self.number(at + 10, 2) for at in range(0, len(data), PAGE_BYTES)}
        self.value = max((at for at, kind in kinds.items() if kind == 4), default=0)

    def claim(self, pages: int) -> None:
        """Have a value be on so many pages, in a file of any length."""
        self.put(self.value + 12, pages, 4)
        self.put(self.meta + 136, 1 << 40)

    def number(self, at: int, size: int = 8) -> int:
        return int.from_bytes(self.data[at : at + size], "little")

    def put(self, at: int, number: int, size: int = 8) -> None:
        self.data[at : at + size] = number.to_bytes(size, "little")


DAMAGES: dict[str, tuple[Callable[[Pages], None], str]] = {
    "magic": (lambda p: p.put(16, 1, 4), "not the beginning"),
    "database": (lambda p: p.put(p.main + 4, 4, 2), "has the flags 4"),
    "depth": (lambda p: p.put(p.main + 6, 33, 2), "entries at depth 33"),
    "number": (lambda p: p.put(p.root, 1), "calls itself page 1"),
    "kind": (lambda p: p.put(p.root + 10, 2, 2), "of kind 2"),
    "room": (lambda p: p.put(p.root + 14, 0, 2), "its free room"),
    "place": (lambda p: p.put(p.root + 16, 20, 2), "an entry lies at 20"),
    "overlap": (lambda p: p.put(p.root + 16, p.number(p.root + 18, 2) + 2, 2), "an entry lies at"),
    "key": (lambda p: p.put(p.first + 6, 5000, 2), "ends behind it"),
    "end": (lambda p: p.put(p.first, 0xFFFF, 2), "the file ends before page 65535"),
    "meta": (lambda p: p.put(p.first, 1, 2), "the file ends before page 1"),
    "empty": (lambda p: p.put(p.leaf + 12, 16, 2), "0 entries at depth 1"),
    "value": (lambda p: p.claim(1), "its value of 9000 bytes has 1 pages"),
    "longer": (lambda p: p.claim(5000), "the file ends before page"),
    "twice": (lambda p: p.put(p.first, p.number(p.second, 2), 2), "it has two places"),
    "used": (lambda p: p.put(p.freed + 8, p.root // PAGE_BYTES), "in use, and free as well"),
    "none": (lambda p: p.put(p.freed + 8, 1 << 40), "calls pages free that are none"),
    "many": (lambda p: p.put(p.freed, 1 << 40), "is cut short"),
}


@pytest.mark.parametrize("what", DAMAGES)
def test_each_damage_is_seen_for_itself(tmp_path: Path, what: str) -> None:
    with lmdb.open(str(tmp_path), map_size=1 << 28, sync=False) as environment:
        for round_number in range(3):
            with environment.begin(write=True) as transaction:
                for key in range(100):
                    transaction.put(b"%d" % key, b"%d" % round_number * 300)
                transaction.put(b"large", bytes(9000))
    check_pages(tmp_path)
    pages = Pages((tmp_path / DATA_FILE).read_bytes())
    damage, told = DAMAGES[what]
    damage(pages)
    (tmp_path / DATA_FILE).write_bytes(pages.data)
    with pytest.raises(DamagedPagesError, match=told):
        check_pages(tmp_path)
