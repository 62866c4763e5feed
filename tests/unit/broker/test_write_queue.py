"""What waits for a coordinator's records: for its own, in order, whatever is refused between."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from penstock.broker.core.write_queue import WriteQueue, encode
from penstock.wire.records import decode_batch, iter_batches, parse_header

PRODUCER = (7, 3)


@dataclass(frozen=True)
class Record:
    """A change; one of more than a byte is too large for the log of these tests."""

    key: bytes
    value: bytes | None = b"v"


def records(count: int, key: bytes = b"k") -> list[Record]:
    return [Record(key, b"%d" % number) for number in range(count)]


def queue_with(*subjects: str) -> WriteQueue[str]:
    """A record about each, and an answer that waits for it."""
    queue = WriteQueue[str]()
    for subject in subjects:
        queue.add(subject, records(1, subject.encode()))
        assert queue.hold(subject, f"of {subject}")
    return queue


def keys(changes: list[Record]) -> str:
    return "".join(change.key.decode() for change in changes)


def written(queue: WriteQueue[str]) -> str:
    write = queue.next()
    return "" if write is None else keys(write.changes)


# ---------------------------------------------------------------------- holding


def test_what_tells_of_nothing_on_its_way_is_not_held() -> None:
    queue = WriteQueue[str]()
    assert not queue.hold("a", "answer")
    assert not queue.hold(None, "answer")
    queue.add("a", records(1))
    assert not queue.hold("b", "answer")


def test_what_is_held_waits_for_the_last_record_about_its_subject() -> None:
    queue = queue_with("a")
    assert queue.next() is not None
    assert queue.hold("a", "in flight")
    queue.add("b", records(1))
    queue.add("a", records(1))
    assert queue.hold("a", "gathered")
    assert queue.hold(None, "of all")
    assert queue.next() is None, "one at a time"
    assert queue.committed() == ["of a", "in flight"]
    assert not queue.in_flight
    assert queue.next() is not None
    assert queue.hold("b", "of b")
    assert queue.committed() == ["gathered", "of all", "of b"]
    assert not queue.hold("a", "answer")
    assert not queue.hold(None, "answer")


def test_what_waits_is_counted_without_what_is_in_flight() -> None:
    queue = WriteQueue[str]()
    queue.add("a", records(3))
    assert queue.pending_count == 3
    queue.next()
    queue.add("a", records(2))
    queue.add("a", records(4), PRODUCER)
    assert queue.pending_count == 6
    queue.committed()
    queue.next()
    assert queue.pending_count == 4
    queue.drop()
    assert queue.pending_count == 0


def test_a_transactions_records_are_a_write_of_their_own() -> None:
    queue = WriteQueue[str]()
    queue.add("a", records(1))
    queue.add("b", records(1))
    queue.add("a", records(1), PRODUCER)
    queue.add("b", records(1), PRODUCER)
    queue.add("a", records(1))
    assert queue.last_number == 3
    found = []
    while (write := queue.next()) is not None:
        found.append((write.number, write.producer, len(write.changes)))
        queue.committed()
    assert found == [(1, None, 2), (2, PRODUCER, 2), (3, None, 1)]


# ---------------------------------------------------------------------- refusals


def test_a_refused_write_takes_all_back_that_waits_behind_it() -> None:
    queue = queue_with("a")
    first = queue.next()
    queue.add("a", records(1, b"2"))
    queue.hold("a", "behind")
    queue.add("b", records(1, b"3"), PRODUCER)
    queue.hold("b", "far behind")
    taken = queue.refused()
    assert first is not None
    assert taken is not None
    assert (taken.number, keys(taken.changes)) == (first.number, "a23")
    assert (taken.refused, taken.others) == (["of a"], ["behind", "far behind"])
    assert not taken.for_itself
    assert (queue.pending_count, queue.next(), queue.hold(None, "answer")) == (0, None, False)


def test_a_transactions_write_is_refused_for_itself() -> None:
    for too_large in (False, True):
        queue = WriteQueue[str]()
        queue.add("a", records(1, b"1"), PRODUCER)
        queue.add("b", records(1, b"2"), PRODUCER)
        queue.hold("a", "refused")
        queue.next()
        queue.add("a", records(1, b"3"))
        queue.hold("a", "behind")
        taken = queue.refused(too_large=too_large)
        assert taken is not None
        assert keys(taken.changes) == "123"
        assert (taken.refused, taken.others, taken.for_itself) == (["refused"], ["behind"], True)


def test_of_a_write_that_is_too_large_only_what_is_too_large_is_refused() -> None:
    queue = queue_with("a", "b", "c", "d", "e")
    assert written(queue) == "abcde"
    queue.add("f", records(1, b"f"))
    assert queue.refused(too_large=True) is None
    assert queue.pending_count == 6
    assert written(queue) == "ab"
    assert queue.committed() == ["of a", "of b"]
    assert written(queue) == "cde"
    assert queue.refused(too_large=True) is None
    assert written(queue) == "c"
    taken = queue.refused(too_large=True)
    assert taken is not None
    assert keys(taken.changes) == "c"
    assert (taken.refused, taken.others, taken.for_itself) == (["of c"], [], True)
    assert not queue.hold("c", "answer")
    assert queue.pending_count == 3
    assert written(queue) == "de"
    assert queue.committed() == ["of d", "of e"]
    assert written(queue) == "f"


def test_with_what_is_too_large_all_is_taken_back_that_was_made_of_it() -> None:
    queue = queue_with("a", "b")
    assert written(queue) == "ab"
    assert queue.refused(too_large=True) is None
    queue.add("a", records(1, b"2"))
    queue.hold("a", "behind")
    queue.hold(None, "of all")
    queue.add("c", records(1, b"c"))
    queue.hold("c", "of c")
    queue.add("a", records(1, b"3"), PRODUCER)
    assert written(queue) == "a"
    taken = queue.refused(too_large=True)
    assert taken is not None
    assert keys(taken.changes) == "a23", "in the order in which they were made"
    assert (taken.refused, taken.others) == (["of a"], ["behind", "of all"])
    assert written(queue) == "bc"
    assert queue.committed() == ["of b", "of c"]
    assert queue.next() is None


def test_what_others_wait_for_behind_what_is_too_large_stays_as_it_was() -> None:
    queue = queue_with("a")
    queue.hold(None, "of all")
    queue.next()
    for subject in "abc":
        queue.add(subject, records(1, subject.encode()))
        queue.hold(subject, f"of {subject} behind")
    taken = queue.refused(too_large=True)
    assert taken is not None
    assert (taken.refused, taken.others) == (["of a"], ["of all", "of a behind"])
    assert queue.hold("b", "of b as well")
    assert written(queue) == "bc"
    assert queue.refused(too_large=True) is None
    assert written(queue) == "b"
    assert queue.committed() == ["of b behind", "of b as well"]
    assert written(queue) == "c"
    assert queue.committed() == ["of c behind"]


def test_what_is_added_at_once_is_not_torn() -> None:
    queue = WriteQueue[str]()
    queue.add("a", records(3))
    queue.hold("a", "answer")
    queue.next()
    taken = queue.refused(too_large=True)
    assert taken is not None
    assert len(taken.changes) == 3
    assert taken.refused == ["answer"]


def test_an_answer_that_came_before_a_record_that_is_too_large_is_given() -> None:
    queue = queue_with("a")
    queue.add("a", records(1, b"2"))
    queue.hold("a", "too large")
    queue.next()
    assert queue.refused(too_large=True) is None
    assert written(queue) == "a"
    assert queue.committed() == ["of a"]
    assert queue.hold("a", "behind")
    assert written(queue) == "2"
    taken = queue.refused(too_large=True)
    assert taken is not None
    assert (taken.refused, taken.others) == (["too large", "behind"], [])


def test_what_is_dropped_was_held() -> None:
    queue = queue_with("a")
    queue.next()
    queue.add("b", records(1))
    queue.hold("b", "of b")
    assert queue.drop() == ["of a", "of b"]
    assert (queue.in_flight, queue.next(), queue.hold("a", "answer")) == (None, None, False)


# ---------------------------------------------------------------------- any order


@dataclass(frozen=True)
class Answer:
    """Made when so many records had been added, of which these had been taken back."""

    subject: str | None
    count: int
    taken: frozenset[int]


@dataclass
class Model:
    """What the log has, and what became of answers and of what was refused."""

    log: list[tuple[str, int]]
    told: list[Answer]
    failed: list[Answer]
    taken: set[int]


Step = tuple[str, str | None, bool, bool]
steps = st.lists(
    st.tuples(
        st.sampled_from(["add", "add", "hold", "next", "done", "done", "refuse"]),
        st.sampled_from(["a", "b", "c", None]),
        st.booleans(),  # Of a transaction.
        st.integers(0, 5).map(lambda number: number == 0),  # Too large.
    ),
    max_size=60,
)


@given(steps)
def test_under_any_order(script: list[Step]) -> None:
    queue = WriteQueue[Answer]()
    model = Model([], [], [], set())
    added: list[tuple[str, int, bool]] = []
    held: list[Answer] = []
    for number, (what, subject, transactional, large) in enumerate(script):
        if what == "add" and subject is not None:
            value = b"%d%s" % (number, b"!" if large and not transactional else b"")
            added.append((subject, number, value.endswith(b"!")))
            change = Record(subject.encode(), value)
            queue.add(subject, [change], PRODUCER if transactional else None)
        elif what == "hold":
            item = Answer(subject, len(added), frozenset(model.taken))
            held.append(item)
            if not queue.hold(subject, item):
                model.told.append(item)
        elif what == "next":
            queue.next()
        elif queue.in_flight is not None:
            end_write(queue, model, refused=what == "refuse")
        check_told(model, added)
    while queue.in_flight is not None or queue.next() is not None:
        end_write(queue, model, refused=False)
        check_told(model, added)
    assert queue.pending_count == 0
    assert sorted(map(repr, model.told + model.failed)) == sorted(map(repr, held))
    in_log = {number for _, number in model.log}
    assert in_log.isdisjoint(model.taken)
    assert in_log | model.taken == {number for _, number, _ in added}
    for subject in "abc":
        of_subject = [number for name, number in model.log if name == subject]
        assert of_subject == sorted(of_subject), "out of order"
    assert not in_log & {number for _, number, large in added if large}


def end_write(queue: WriteQueue[Answer], model: Model, *, refused: bool) -> None:
    write = queue.in_flight
    assert write is not None
    large = any(change.value.endswith(b"!") for change in write.changes)
    if not refused and not large:
        model.log += [(c.key.decode(), int(c.value)) for c in write.changes]
        model.told += queue.committed()
        return
    taken = queue.refused(too_large=not refused)
    if taken is None:
        assert not refused
        return
    numbers = [int(change.value.rstrip(b"!")) for change in taken.changes]
    assert numbers == sorted(numbers)
    if not refused:
        assert len({change.key for change in taken.changes}) == 1, "others were written"
    model.taken.update(numbers)
    model.failed += taken.refused + taken.others


def check_told(model: Model, added: list[tuple[str, int, bool]]) -> None:
    """What was added before an answer about its subject is in the log, or the answer was made
    without it.
    """
    in_log = {number for _, number in model.log}
    for answer in model.told:
        for name, number, _ in added[: answer.count]:
            if answer.subject in (None, name):
                assert number in in_log | answer.taken


# ---------------------------------------------------------------------- bytes


def test_a_write_becomes_batches_of_its_transaction() -> None:
    queue = WriteQueue[str]()
    queue.add("a", [Record(b"k", b"v"), Record(b"k", None)], PRODUCER)
    write = queue.next()
    assert write is not None
    [(header, data)] = iter_batches(encode(write, 5))
    assert (header.producer_id, header.producer_epoch) == PRODUCER
    assert parse_header(data).is_transactional
    assert [(r.key, r.value) for r in decode_batch(data)] == [(b"k", b"v"), (b"k", None)]


def test_many_records_are_several_batches_none_of_which_is_too_large_for_the_topic() -> None:
    queue = WriteQueue[str]()
    changes = [Record(b"%d" % number, bytes(10_000)) for number in range(100)]
    queue.add("a", changes)
    write = queue.next()
    assert write is not None
    batches = list(iter_batches(encode(write, 5)))
    assert len(batches) > 1
    assert all(len(batch) < 300_000 for _, batch in batches)
    keys = [record.key for _, batch in batches for record in decode_batch(batch)]
    assert keys == [change.key for change in changes]
