from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from penstock.client.core.accumulator import Accumulator, Batch
from penstock.wire.ids import TopicPartition
from penstock.wire.records import decode_batch, record_size_bound
from tests.unit.client.receipts import Names, accumulator_of_names, append

P0 = TopicPartition("t", 0)
P1 = TopicPartition("t", 1)


def make(
    batch_size: int = 1_000,
    memory: int = 10_000,
    linger: float = 5,
    timeout: float = 100,
    max_batch: int = 0,
) -> Accumulator[Names]:
    return accumulator_of_names(
        batch_size=batch_size,
        memory=memory,
        linger_ms=linger,
        timeout_ms=timeout,
        max_batch=max_batch,
    )


def put(
    accumulator: Accumulator[Names],
    value: bytes,
    partition: TopicPartition = P0,
    now: float = 0,
    name: int = 0,
) -> bool | None:
    taken = append(accumulator, partition, value, name, now)
    return None if taken is None else taken.wake


def test_records_of_a_partition_share_a_batch_and_wake_the_sender_once() -> None:
    accumulator = make()
    assert put(accumulator, b"a") is True
    assert put(accumulator, b"b") is False
    assert put(accumulator, b"c", P1) is True
    batch = accumulator.pop(P0)
    assert batch.record_count == 2
    assert accumulator.partitions() == [P1]


def test_a_batch_may_go_when_it_lingered_or_is_full_or_there_is_a_hurry() -> None:
    accumulator = make(batch_size=200)
    put(accumulator, b"a", now=10)
    assert accumulator.ready_at_ms(P0, hurry=False) == 15
    assert accumulator.ready_at_ms(P0, hurry=True) == float("-inf")
    assert put(accumulator, b"x" * 190, now=10) is True
    assert accumulator.ready_at_ms(P0, hurry=False) == float("-inf")
    assert accumulator.ready_at_ms(P1, hurry=True) == float("inf")


def test_full_memory_refuses_until_a_batch_is_judged_and_makes_batches_go_early() -> None:
    accumulator = make(memory=200, linger=1_000)
    assert put(accumulator, b"x" * 100) is True
    assert put(accumulator, b"x" * 100) is None
    assert accumulator.ready_at_ms(P0, hurry=False) == float("-inf")
    batch = accumulator.pop(P0)
    assert put(accumulator, b"x" * 100) is None
    assert accumulator.release(batch) is True
    assert put(accumulator, b"x" * 100) is not None


def test_a_full_batch_that_waits_goes_on_growing_up_to_the_largest() -> None:
    accumulator = make(batch_size=300, max_batch=1_000)
    woken = [put(accumulator, b"x" * 50, now=number) for number in range(30)]
    assert woken.index(True, 1) == 4
    assert woken.count(True) == 4  # Two batches, each when it begins and when it is full.
    assert accumulator.ready_at_ms(P0, hurry=False) == float("-inf")
    batch = accumulator.pop(P0)
    assert 900 < batch.size_bytes <= 1_000
    assert batch.record_count < 30 == batch.record_count + accumulator.records_waiting


def test_a_record_larger_than_the_memory_goes_alone() -> None:
    accumulator = make(memory=50)
    assert put(accumulator, b"x" * 500) is True
    assert put(accumulator, b"x") is None


def test_what_waits_too_long_or_for_a_missing_topic_is_taken_out() -> None:
    accumulator = make(timeout=100)
    put(accumulator, b"a", now=0)
    put(accumulator, b"b", TopicPartition("u", 0), now=50)
    assert accumulator.earliest_deadline_ms() == 100
    assert accumulator.pop_expired(99) == []
    [expired] = accumulator.pop_expired(100)
    assert expired.partition == P0
    [gone] = accumulator.pop_topic("u")
    assert gone.partition.topic == "u"
    assert accumulator.pop_all() == []
    assert accumulator.records_waiting == 0


def test_a_split_batch_keeps_its_records_and_is_settled_when_its_parts_are() -> None:
    accumulator = make()
    for number in range(5):
        put(accumulator, b"%d" % number, name=number)
    batch = accumulator.pop(P0)
    reserved = batch.reserved_bytes
    batch.encoded = batch.builder.build()
    parts = batch.split()
    values = [record.value for part in parts for record in decode_batch(part.builder.build())]
    assert values == [b"0", b"1", b"2", b"3", b"4"]
    assert [name for part in parts for name in part.receipt.names] == [0, 1, 2, 3, 4]
    assert sum(part.reserved_bytes for part in parts) == reserved
    assert not batch.settled
    parts[0].done = True
    assert not batch.settled
    parts[1].done = True
    assert batch.settled


class Accounting(RuleBasedStateMachine):
    """Whatever is appended, sent, judged and expired: memory is counted, order is kept."""

    def __init__(self) -> None:
        super().__init__()
        self.accumulator = make(batch_size=300, memory=2_000)
        self.sent: list[Batch[Names]] = []
        self.now = 0.0
        self.next = 0
        self.seen: dict[TopicPartition, int] = {}

    @rule(size=st.integers(0, 400), partition=st.sampled_from([P0, P1]))
    def append(self, size: int, partition: TopicPartition) -> None:
        used = self.accumulator.used_bytes
        self.next += 1
        taken = put(self.accumulator, b"x" * size, partition, self.now, self.next)
        if taken is None:
            assert self.accumulator.used_bytes == used
            assert used + record_size_bound(None, b"x" * size) > 2_000

    @rule(partition=st.sampled_from([P0, P1]))
    def send(self, partition: TopicPartition) -> None:
        if partition in self.accumulator.partitions():
            batch = self.accumulator.pop(partition)
            names = batch.receipt.names
            assert names == sorted(names)
            assert names[0] > self.seen.get(partition, 0)
            self.seen[partition] = names[-1]
            self.sent.append(batch)

    @rule(data=st.data())
    def judge(self, data: st.DataObject) -> None:
        if self.sent:
            index = data.draw(st.integers(0, len(self.sent) - 1))
            self.accumulator.release(self.sent.pop(index))

    @rule(step=st.integers(1, 60))
    def wait(self, step: int) -> None:
        self.now += step
        for batch in self.accumulator.pop_expired(self.now):
            assert batch.deadline_ms <= self.now
            self.accumulator.release(batch)

    @invariant()
    def accounts_balance(self) -> None:
        self.accumulator.validate(self.sent)


Accounting.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestAccounting = Accounting.TestCase
