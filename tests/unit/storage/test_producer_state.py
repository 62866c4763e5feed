from __future__ import annotations

import hypothesis.strategies as st
import pytest
from crc32c import crc32c
from hypothesis import given

from penstock.broker.core.producer_entry import BATCHES_KEPT
from penstock.broker.core.producer_stage import ProducerStage, check_marker
from penstock.broker.core.producer_state import (
    ANY_PRODUCER,
    Append,
    Duplicate,
    ProducerState,
)
from penstock.broker.core.transactions import Marker
from penstock.wire.errors import (
    CorruptRecordError,
    DuplicateSequenceError,
    InvalidProducerEpochError,
    OutOfOrderSequenceError,
)
from penstock.wire.markers import MarkerType
from penstock.wire.records import BatchHeader, parse_header
from tests.unit.storage.storage_kit import batch, mark, transactional

WRAP = 2**31


def header(
    sequence: int, count: int = 1, *, producer: int = 7, epoch: int = 0, offset: int = 0
) -> BatchHeader:
    values = ["v"] * count
    return parse_header(batch(*values, producer=(producer, epoch, sequence), base_offset=offset))


def state_after(*headers: BatchHeader) -> ProducerState:
    state = ProducerState()
    offset = 0
    for one in headers:
        assert isinstance(state.check(one), Append)
        state.record(one, offset, now_ms=1)
        offset += one.record_count
    state.validate()
    return state


@given(
    writes=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 4), st.booleans()), max_size=40),
    part=st.floats(0, 1),
)
def test_what_is_handed_over_goes_on_as_the_whole_would(
    writes: list[tuple[int, int, bool]], part: float
) -> None:
    """A replica that begins anew has the state below its start, and sees the batches after it."""
    whole, written, offset = ProducerState(), [], 0
    epochs, sequences = [0, 0, 0], [0, 0, 0]
    for producer, count, bumps in writes:
        if bumps and sequences[producer]:
            epochs[producer], sequences[producer] = epochs[producer] + 1, 0
        one = header(
            sequences[producer], count, producer=producer, epoch=epochs[producer], offset=offset
        )
        whole.record(one, offset, 1)
        written.append(one)
        sequences[producer] += count
        offset += count
    start = round(part * offset)
    handed = whole.handed_over(start)
    state = ProducerState.decode(handed)[0] if handed else ProducerState()
    state.validate()
    for one in written:
        if one.next_offset > start:
            state.record(one, one.base_offset, 1)
    state.validate()
    assert state.forgotten_up_to == whole.forgotten_up_to
    for producer in range(3):
        mine, theirs = state.entry(producer), whole.entry(producer)
        assert (mine is None) == (theirs is None)
        if mine is not None and theirs is not None:
            assert (mine.producer_epoch, mine.batches) == (theirs.producer_epoch, theirs.batches)
            assert mine.contiguous <= theirs.contiguous


def test_a_busy_producer_lets_nobody_overtake_itself_where_a_replica_begins() -> None:
    """Of whom nothing is handed over nothing is taken before what it wrote is copied."""
    whole = state_after(*(header(sequence) for sequence in range(8 + BATCHES_KEPT)))
    whole.record(header(0, producer=9), 100, 1)
    below, _, _ = ProducerState.decode(whole.handed_over(8) or ProducerState().encode(0, -1))
    for producer in (7, 5):  # The busy one, and one that never wrote.
        with pytest.raises(OutOfOrderSequenceError):
            below.check(header(9, producer=producer))


def test_more_producers_than_fit_into_a_message_are_not_handed_over() -> None:
    state = ProducerState()
    for producer in range(5001):
        if producer == 5000:
            assert 0 < len(state.handed_over(1)) < 900_000
        state.record(header(0, producer=producer), 0, 1)
    assert state.handed_over(1) == b""


def test_whoever_was_handed_over_counts_as_seen_now() -> None:
    """The leader's clock is another one: theirs may be forgotten by the first look at them."""
    state = state_after(header(0), header(0, producer=8))
    state.bound_ages(7_000, 7_000)
    for now_ms in (5, 9_000_000):
        begun = ProducerState.begun_at(2, state.handed_over(2), now_ms)
        for producer in (7, 8):
            entry = begun.entry(producer)
            assert entry is not None
            assert entry.last_seen_ms == now_ms


def test_batches_in_order_are_appended() -> None:
    state_after(header(0, 3), header(3, 2), header(5))


def test_a_batch_without_producer_is_always_appended_and_not_remembered() -> None:
    state = ProducerState()
    plain = parse_header(batch("v"))
    assert isinstance(state.check(plain), Append)
    state.record(plain, 0, now_ms=1)
    assert len(state) == 0


def test_a_retry_gets_the_offsets_of_the_first_time() -> None:
    state = state_after(header(0, 3), header(3, 2))
    assert state.check(header(0, 3)) == Duplicate(0, 2)
    assert state.check(header(3, 2)) == Duplicate(3, 4)


def test_of_older_batches_only_the_presence_is_known() -> None:
    state = state_after(*(header(sequence) for sequence in range(BATCHES_KEPT + 2)))
    assert isinstance(state.check(header(2)), Duplicate)
    with pytest.raises(DuplicateSequenceError, match="in the log already"):
        state.check(header(1))


def test_a_gap_is_refused() -> None:
    state = state_after(header(0, 3))
    with pytest.raises(OutOfOrderSequenceError, match="sequences 4 to 4, but 3 comes next"):
        state.check(header(4))


def test_a_batch_that_overlaps_the_end_is_not_taken_for_a_duplicate() -> None:
    state = state_after(header(0, 3))
    with pytest.raises(OutOfOrderSequenceError):
        state.check(header(2, 2))


def test_a_producer_must_begin_with_sequence_0() -> None:
    with pytest.raises(OutOfOrderSequenceError, match="has written nothing here"):
        ProducerState().check(header(5))


def test_a_producer_that_may_have_been_forgotten_begins_anywhere() -> None:
    assert isinstance(ProducerState(forgotten_up_to=ANY_PRODUCER).check(header(5)), Append)


def test_what_lies_before_a_forgotten_producers_beginning_is_not_taken_for_a_duplicate() -> None:
    state = ProducerState(forgotten_up_to=ANY_PRODUCER)
    for sequence in range(5, 15):
        state.record(header(sequence), sequence, now_ms=1)
    with pytest.raises(DuplicateSequenceError):
        state.check(header(6))
    with pytest.raises(OutOfOrderSequenceError):
        state.check(header(3))


def test_a_new_epoch_begins_with_sequence_0() -> None:
    state = state_after(header(0, 3))
    with pytest.raises(OutOfOrderSequenceError, match="must begin with sequence 0"):
        state.check(header(3, epoch=1))
    assert isinstance(state.check(header(0, 3, epoch=1)), Append)


def test_an_old_epoch_is_fenced() -> None:
    state = state_after(header(0, 3), header(0, epoch=2))
    with pytest.raises(InvalidProducerEpochError, match="has epoch 2 by now"):
        state.check(header(3, epoch=1))


def test_after_the_largest_sequence_comes_0() -> None:
    state = ProducerState(forgotten_up_to=ANY_PRODUCER)
    state.record(header(WRAP - 2, 2), 0, now_ms=1)
    assert isinstance(state.check(header(0)), Append)
    state.record(header(0, 3), 2, now_ms=1)
    assert state.check(header(WRAP - 2, 2)) == Duplicate(0, 1)
    assert isinstance(state.check(header(3)), Append)


def test_a_batch_may_lie_across_the_wrap() -> None:
    state = ProducerState(forgotten_up_to=ANY_PRODUCER)
    state.record(header(WRAP - 1, 3), 0, now_ms=1)
    assert isinstance(state.check(header(2)), Append)
    assert state.check(header(WRAP - 1, 3)) == Duplicate(0, 2)


def test_a_stage_sees_its_own_batches_and_leaves_the_state_alone_until_commit() -> None:
    state = state_after(header(0))
    stage = ProducerStage(state)
    assert isinstance(stage.check(header(1)), Append)
    stage.record(header(1), 1, now_ms=1)
    assert stage.check(header(1)) == Duplicate(1, 1)
    assert isinstance(state.check(header(1)), Append)
    stage.commit()
    assert state.check(header(1)) == Duplicate(1, 1)


def test_a_silent_producer_is_known_as_long_as_its_transaction_is_open() -> None:
    """Who ends it must know its epoch, and whoever was fenced must not be let in meanwhile."""
    state = ProducerState()
    state.record(parse_header(transactional(producer=(7, 3, 0))), 0, now_ms=1000)
    assert state.expire(now_ms=90_000, expiration_ms=5000) == 0
    with pytest.raises(InvalidProducerEpochError):
        state.check(header(1, epoch=2))
    state.record(parse_header(mark(MarkerType.ABORT, 7)), 1, now_ms=90_000)
    assert state.expire(now_ms=95_000, expiration_ms=5000) == 1


def test_a_silent_producer_is_forgotten_and_then_begins_anywhere() -> None:
    state = ProducerState()
    state.record(header(0), 0, now_ms=1000)
    state.record(header(0, producer=9), 1, now_ms=5000)
    assert state.expire(now_ms=6000, expiration_ms=5000) == 1
    assert state.entry(7) is None
    assert isinstance(state.check(header(44)), Append)
    assert isinstance(state.check(header(44, producer=3)), Append)
    with pytest.raises(OutOfOrderSequenceError):
        state.check(header(44, producer=8))


def test_a_marker_fences_older_epochs() -> None:
    state = state_after(header(0, 3))
    marker = header(-1, epoch=3)._replace(attributes=0x20)
    state.record(marker, 3, now_ms=1)
    with pytest.raises(InvalidProducerEpochError):
        state.check(header(3))
    with pytest.raises(OutOfOrderSequenceError):
        state.check(header(3, epoch=3))
    assert isinstance(state.check(header(0, epoch=3)), Append)


def big_state() -> ProducerState:
    state = state_after(*(header(sequence) for sequence in range(8)))
    state.record(header(0, 4, producer=2**40, epoch=3), 8, now_ms=77)
    state.forgotten_up_to = 5
    return state


def test_a_snapshot_gives_the_state_back() -> None:
    state = big_state()
    assert ProducerState.decode(state.encode(12, 4)) == (state, 12, 4)
    assert ProducerState.decode(ProducerState().encode(0, -1)) == (ProducerState(), 0, -1)


def ended_state() -> ProducerState:
    """Producers with each kind of mark and with none, with and without batches after it."""
    state = big_state()
    for producer, kind in ((8, MarkerType.ABORT), (9, MarkerType.COMMIT), (10, MarkerType.COMMIT)):
        state.record(parse_header(mark(kind, producer)), 20 + producer, 2, kind)
    for sequence in range(7):
        state.record(header(sequence, producer=10), 40 + sequence, 3)
    return state


def test_a_snapshot_keeps_what_marks_say() -> None:
    state = ended_state()
    found, *_ = ProducerState.decode(state.encode(50, 4))
    assert found == state
    assert [found.entry(one).mark for one in (7, 8, 9, 10)] == [  # type: ignore[union-attr]
        None,
        MarkerType.ABORT,
        MarkerType.COMMIT,
        MarkerType.COMMIT,
    ]
    below = ProducerState.decode(state.handed_over(45))[0]
    assert below.entry(10).mark is MarkerType.COMMIT  # type: ignore[union-attr]
    assert len(below.entry(10).batches) == 3  # type: ignore[union-attr]


def test_a_mark_that_is_not_copied_yet_is_not_handed_over() -> None:
    """The replica may lead before it comes: whoever sends it again must not be told it is there."""
    state = ProducerState()
    state.record(parse_header(transactional("a", producer=(8, 0, 0))), 5, 1)
    ends = parse_header(mark(MarkerType.COMMIT, 8))._replace(producer_epoch=1)
    state.record(ends, 6, 1, MarkerType.COMMIT)
    copied = ProducerState.begun_at(5, state.handed_over(5), now_ms=2)
    copied.record(parse_header(transactional("a", producer=(8, 0, 0))), 5, 2)
    assert [one.first_offset for one in copied.open_transactions()] == [5]
    again = Marker(8, 1, commit=True, coordinator_epoch=3)
    assert check_marker(again, copied.entry(8))
    # One that is committed comes before the replica can lead; one below is not copied at all.
    assert ProducerState.begun_at(7, state.handed_over(7), now_ms=2).entry(8) is not None
    state.transactions.committed(7)
    assert ProducerState.begun_at(5, state.handed_over(5), now_ms=2).entry(8) is not None


@pytest.mark.parametrize("version", [1, 2])
def test_a_snapshot_from_before_marks_were_remembered_is_read(version: int) -> None:
    state = big_state() if version == 1 else ended_state()
    data = bytearray(state.encode(50, 4))
    assert data[4:6] == bytes((0, 1 if version == 1 else 3)), "where there is none, as before"
    data[4:6] = version.to_bytes(2)
    position = 34
    for _ in range(len(state)):
        data[position + 22] &= 0x0F
        position += 23 + 24 * data[position + 22]
    data[6:10] = crc32c(data[10:]).to_bytes(4)
    found, *_ = ProducerState.decode(bytes(data))
    assert found.epochs() == state.epochs()
    assert found.transactions == state.transactions
    for producer, entry in found.entries():
        assert entry.mark is None
        assert entry.batches == state.entry(producer).batches  # type: ignore[union-attr]


def test_a_kind_of_mark_that_there_is_not_is_not_believed() -> None:
    data = bytearray(ended_state().encode(50, 4))
    data[34 + 22] |= 0x30
    data[6:10] = crc32c(data[10:]).to_bytes(4)
    with pytest.raises(CorruptRecordError, match="a mark of kind 3"):
        ProducerState.decode(bytes(data))


def test_a_mark_is_that_of_its_epoch() -> None:
    state = state_after(header(0))
    ended = parse_header(mark(MarkerType.ABORT, 7))._replace(producer_epoch=1)
    state.record(ended, 1, 1, MarkerType.ABORT)
    state.record(ended, 2, 1, MarkerType.COMMIT)  # By a leader that had forgotten the producer.
    assert state.entry(7).mark is MarkerType.ABORT  # type: ignore[union-attr]
    state.record(header(0, epoch=2), 3, 1)
    assert state.entry(7).mark is None  # type: ignore[union-attr]


@given(at=st.integers(0, 10_000), bit=st.integers(0, 7))
def test_a_damaged_snapshot_is_never_believed(at: int, bit: int) -> None:
    data = bytearray(big_state().encode(12, 4))
    data[at % len(data)] ^= 1 << bit
    with pytest.raises(CorruptRecordError):
        ProducerState.decode(bytes(data))


def test_a_snapshot_cut_short_is_never_believed() -> None:
    data = big_state().encode(12, 4)
    for size in range(len(data)):
        with pytest.raises(CorruptRecordError):
            ProducerState.decode(data[:size])


@given(
    sent=st.lists(st.tuples(st.integers(1, 4), st.booleans()), max_size=30),
    resend=st.lists(st.integers(0, 29), max_size=10),
)
def test_no_retry_of_what_was_sent_is_ever_appended_again(
    sent: list[tuple[int, bool]], resend: list[int]
) -> None:
    """Whatever was appended stays a duplicate, however late its retry comes."""
    state = ProducerState()
    sequence = offset = 0
    appended: list[tuple[BatchHeader, int]] = []
    for count, twice in sent:
        one = header(sequence, count)
        for _ in range(1 + twice):
            answer = state.check(one)
            if isinstance(answer, Append):
                state.record(one, offset, now_ms=1)
                appended.append((one, offset))
                offset += count
            else:
                assert answer == Duplicate(appended[-1][1], offset - 1)
        sequence += count
    assert offset == sequence
    for index in resend:
        if index < len(appended):
            one, at = appended[index]
            try:
                assert state.check(one) == Duplicate(at, at + one.last_offset_delta)
            except DuplicateSequenceError:
                assert index < len(appended) - BATCHES_KEPT


def test_a_copy_doubts_what_the_state_does_and_a_snapshot_knows_no_doubts() -> None:
    state = state_after(header(0, offset=0))
    state.doubt(header(1, producer=8, offset=1), 5)
    assert state.copy() == state
    assert state.touches(1)
    assert not state.touches(2)
    assert (state.doubts_from(1), state.doubts_from(2)) == (True, False)
    decoded, _, _ = ProducerState.decode(state.encode(2, 1))
    assert decoded != state
    assert not decoded.doubted


def test_as_many_records_as_the_doubted_batch_are_needed_to_be_it() -> None:
    state = ProducerState()
    doubted = header(0, 2, offset=3)
    state.doubt(doubted, 5)
    assert state.check(header(0, 2)) == Duplicate(3, 4)
    assert state.check(header(0, 2)._replace(crc=5)) == Duplicate(3, 4)
    assert state.check(header(0, 2)._replace(crc=6)) == Append()
    assert state.check(header(0, 1)._replace(crc=doubted.crc)) == Append()


def test_a_doubted_batch_says_nothing_of_who_wrote_after_it() -> None:
    state = ProducerState()
    state.doubt(header(4, offset=0), 5)
    state.record(header(0), 1, now_ms=1)
    with pytest.raises(OutOfOrderSequenceError):
        state.check(header(5))
    assert state.check(header(1)) == Append()
