from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.pipeline import ConnectorError, OptionError
from penstock.pipeline.connectors.object_listing import (
    Listing,
    Position,
    check_path,
    directory_of,
)
from penstock.pipeline.errors import DataLossError

OTHERS = sorted([
    "0.parquet", "a/0.parquet", "batch-", "batch-0000000000.parquet", "batch-0000000002.parquet",
    "batch-00000000011/x.parquet", "batch-1.parquet", "batch-foo.parquet", "batch-foo/x.parquet",
    "part-00000.parquet", "zzz.parquet", "~.parquet",
])  # fmt: skip


class Bucket:
    """Objects, and the batches among them."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.committed: dict[int, list[str]] = {}

    def begin(self, number: int, parts: int) -> list[str]:
        made = [f"part-{part:05d}-{number % 7}.parquet" for part in range(parts)]
        self.names |= {f"{directory_of(number)}/{name}" for name in made}
        return made

    def commit(self, number: int, parts: int) -> None:
        self.committed[number] = self.begin(number, parts)
        self.names.add(f"{directory_of(number)}/_committed.json")

    def forget(self, prefix: str) -> None:
        self.names = {name for name in self.names if not name.startswith(prefix)}

    def listing(self) -> Listing:
        return Listing.of(self.names, "a test")

    def parts_of(self, number: int) -> list[str] | None:
        marker = f"{directory_of(number)}/_committed.json"
        return self.committed[number] if marker in self.names else None


class Reader:
    """Reads what is new, as Spark has it done, and keeps its offset in JSON."""

    def __init__(self, bucket: Bucket, *, fails: bool = True) -> None:
        self.bucket = bucket
        self.offset = json.dumps(Position().offset)
        self.lost: list[str] = []
        self.fails = fails

    def __call__(self, most: int | None = None, bound: Listing | None = None) -> list[str]:
        start = Position.of(json.loads(self.offset))
        listing = self.bucket.listing()
        listing = listing if bound is None else listing.within(bound)
        end = listing.plan(start, most, self.bucket.parts_of, self.on_loss)
        # What is read is listed anew, and may have grown.
        found = self.bucket.listing().between(start, end, self.bucket.parts_of, self.on_loss)
        self.offset = json.dumps(end.offset)
        return found

    def on_loss(self, what: str) -> None:
        self.lost.append(what)
        if self.fails:
            raise DataLossError(what)


@given(
    st.lists(st.sampled_from(["begin", "commit", "empty", "other", "read", "read one"])),
    st.integers(0, 3),
)
def test_each_object_is_read_once_whatever_others_are_called(steps: list[str], first: int) -> None:
    bucket, others, number = Bucket(), iter(OTHERS), first
    read, seen = Reader(bucket), []
    for step in steps:
        if step == "begin":
            bucket.begin(number, 4)
        elif step in ("commit", "empty"):
            bucket.commit(number, 3 if step == "commit" else 0)
            number += 1
        elif step == "other":
            bucket.names |= {name for name, _ in zip(others, range(1), strict=False)}
        else:
            seen += read(1 if step == "read one" else None)
    seen += read()
    assert read() == []
    named = [
        f"{directory_of(batch)}/{name}"
        for batch, names in bucket.committed.items()
        for name in names
    ]
    ours = [name for name in seen if name in named]
    assert ours == named
    assert sorted(set(seen) - set(ours)) == sorted(
        name for name in OTHERS if name in bucket.names and name.endswith(".parquet")
    )
    assert len(seen) == len(set(seen))


def test_what_an_attempt_left_in_a_batch_is_none_of_it() -> None:
    bucket = Bucket()
    bucket.commit(0, 1)
    bucket.names |= {"batch-0000000000/part-00000-late.parquet", "batch-0000000000/x/y.parquet"}
    assert Reader(bucket)() == ["batch-0000000000/part-00000-0.parquet"]


def test_hidden_names_are_passed_over() -> None:
    bucket = Bucket()
    bucket.names = {"_temporary/0/a.parquet", "x/.b.parquet", ".c.parquet", "d.csv", "e.parquet"}
    assert Reader(bucket)() == ["e.parquet"]


def test_a_query_that_ends_reads_what_was_there_at_its_start() -> None:
    bucket = Bucket()
    bucket.commit(0, 1)
    bucket.names.add("b.parquet")
    read, bound = Reader(bucket), bucket.listing()
    bucket.commit(1, 1)
    bucket.names.add("c.parquet")
    assert read(bound=bound) == ["batch-0000000000/part-00000-0.parquet", "b.parquet"]
    assert read(bound=bound) == []
    assert read() == ["batch-0000000001/part-00000-1.parquet", "c.parquet"]


def late(bucket: Bucket) -> None:
    bucket.names.add("a.parquet")


def replaced(bucket: Bucket) -> None:
    bucket.forget("batch-0000000002/part-00001")


def unread(bucket: Bucket) -> None:
    bucket.commit(3, 1)
    bucket.forget("batch-0000000002")


def uncommitted(bucket: Bucket) -> None:
    bucket.commit(3, 1)
    bucket.forget("batch-0000000002/_committed")


@pytest.mark.parametrize(
    ("accident", "match", "rest"),
    [
        (late, "1 objects came whose names are not after b.parquet", 2),
        (replaced, "object batch-0000000002/part-00001-2.parquet is gone", 1),
        (unread, "batches 2 to 2 are gone, though batch 3 is there", 1),
        (uncommitted, "batch 2 is not committed, though batch 3 is", 1),
    ],
)
def test_what_will_never_be_read_is_said(accident: object, match: str, rest: int) -> None:
    bucket = Bucket()
    for number in range(2):
        bucket.commit(number, 1)
    bucket.names.add("b.parquet")
    strict, lenient = Reader(bucket), Reader(bucket, fails=False)
    assert len(strict()) == len(lenient()) == 3
    bucket.commit(2, 2)
    assert callable(accident)
    accident(bucket)
    with pytest.raises(DataLossError, match=match):
        strict()
    # Who passes over it goes on behind it.
    assert len(lenient()) == rest
    assert lenient() == []
    assert match in lenient.lost[0]


def test_what_is_read_may_be_deleted() -> None:
    bucket = Bucket()
    bucket.commit(0, 2)
    bucket.names.add("a.parquet")
    read = Reader(bucket)
    assert len(read()) == 3
    bucket.forget("")
    bucket.commit(1, 1)
    bucket.names.add("b.parquet")
    assert len(read()) == 2


def test_a_replay_without_what_was_planned_is_refused() -> None:
    bucket = Bucket()
    bucket.names = {"a.parquet", "c.parquet"}
    reader = Reader(bucket)
    start = Position()
    end = bucket.listing().plan(start, None, bucket.parts_of, reader.on_loss)
    for change in ({"b.parquet"}, {"a.parquet"}):
        bucket.names ^= change
        with pytest.raises(DataLossError, match=r"there are \d objects of the 2 that were planned"):
            bucket.listing().between(start, end, bucket.parts_of, reader.on_loss)
        bucket.names ^= change


def test_a_listing_made_while_batches_are_committed_waits_for_the_next() -> None:
    # Its pages are of different moments: the marker sorts before the parts.
    bucket = Bucket()
    bucket.commit(0, 1)
    read = Reader(bucket)
    assert len(read()) == 1
    bucket.commit(1, 1)
    bucket.commit(2, 1)
    start = Position.of(json.loads(read.offset))
    for unseen in ("batch-0000000001/_committed.json", "batch-0000000001/"):
        names = {name for name in bucket.names if not name.startswith(unseen)}
        torn = Listing.of(names, "a test")
        assert torn.plan(start, None, bucket.parts_of, read.on_loss) == start
    assert len(read()) == 2


def test_batches_are_read_by_their_own_path_alone() -> None:
    with pytest.raises(OptionError, match=r"batches below path, as orders/batch-0000000000/_com"):
        Listing.of(["orders/batch-0000000000/_committed.json", "orders/a.parquet"], "a test")
    with pytest.raises(OptionError, match="is one batch of those under bucket/orders; name that"):
        check_path("bucket/orders/batch-0000000003", "a test")
    with pytest.raises(ConnectorError, match="begin with a new checkpoint"):
        Position.of({"after": "orders/a.parquet"})
