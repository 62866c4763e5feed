"""The last stable offset against its definition, whatever is appended, cut and committed."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given

from penstock.broker.core.producer_stage import ProducerStage
from penstock.broker.core.producer_state import ProducerState
from penstock.broker.core.producer_undo import ProducerUndo
from penstock.broker.core.transactions import OpenTransactions
from penstock.wire.markers import MarkerType
from penstock.wire.records import BatchHeader, parse_header
from tests.unit.storage.storage_kit import batch, mark, transactional

KINDS = ("plain", "transactional", "mark")
APPENDS = st.lists(st.tuples(st.integers(0, 4), st.sampled_from(KINDS)), min_size=1, max_size=5)
STEPS = st.one_of(
    st.tuples(st.just("append"), APPENDS),
    st.tuples(st.just("append"), APPENDS),
    st.tuples(st.just("cut"), st.floats(0, 1)),
    st.tuples(st.just("commit"), st.floats(0, 1)),
    st.tuples(st.just("restart"), st.floats(0, 1)),
)


def header(kind: str, producer_id: int, offset: int) -> BatchHeader:
    """A batch of two records, or a mark."""
    if kind == "mark":
        return parse_header(mark(MarkerType.ABORT, producer_id, base_offset=offset))
    if kind == "plain":
        return parse_header(batch("v", "w", base_offset=offset))
    return parse_header(transactional("v", "w", producer=(producer_id, 0, -1), base_offset=offset))


def stable_by_definition(headers: list[BatchHeader], high_watermark: int) -> int:
    """The last stable offset, each time from the beginning of the log."""
    first: dict[int, int] = {}
    for one in headers:
        if one.base_offset >= high_watermark:
            break
        if one.is_control:
            if one.last_offset < high_watermark:
                first.pop(one.producer_id, None)
        elif one.is_transactional:
            first.setdefault(one.producer_id, one.base_offset)
    return min([high_watermark, *first.values()])


class Transactions:
    """A log's headers and what is made of them, as a log does it."""

    def __init__(self) -> None:
        self.headers: list[BatchHeader] = []
        self.state = ProducerState()
        self.undo = ProducerUndo()
        self.committed = 0

    @property
    def end(self) -> int:
        return self.headers[-1].next_offset if self.headers else 0

    def append(self, kinds: list[tuple[int, str]]) -> None:
        stage, begin = ProducerStage(self.state), self.end
        for producer_id, kind in kinds:
            made = header(kind, producer_id, self.end)
            stage.record(made, made.base_offset, 1)
            self.headers.append(made)
        self.undo.note(begin, self.end, stage)
        stage.commit()

    def boundary(self, part: float, *, above: int = 0) -> int:
        ends = [above, *(one.next_offset for one in self.headers if one.next_offset > above)]
        return ends[round(part * (len(ends) - 1))]

    def cut(self, end: int) -> None:
        found = self.undo.state_at(end, self.state)
        assert found is not None or not self.state.touches(end)
        state, reached = found or (self.state, end)
        for one in self.headers:
            if reached <= one.base_offset < end:
                state.record(one, one.base_offset, 1)
        self.state = state
        self.undo.cut(end)
        self.headers = [one for one in self.headers if one.base_offset < end]

    def restart(self, at: int) -> None:
        """What was written down at an offset is read, and what follows."""
        state = ProducerState()
        for one in self.headers:
            if one.base_offset < at:
                state.record(one, one.base_offset, 1)
        state.transactions.committed(min(self.committed, at))
        state.transactions = OpenTransactions.decode(state.transactions.encode())
        for one in self.headers:
            if one.base_offset >= at:
                state.record(one, one.base_offset, 1)
        self.state = state
        self.undo.clear()
        self.undo = ProducerUndo()

    def commit(self, offset: int) -> None:
        self.committed = offset
        self.undo.committed(offset)
        self.state.transactions.committed(offset)


@given(steps=st.lists(STEPS, max_size=25))
def test_it_is_where_the_oldest_undecided_transaction_begins(
    steps: list[tuple[str, list[tuple[int, str]] | float]],
) -> None:
    log, before = Transactions(), 0
    known_from = 0
    for kind, what in steps:
        if isinstance(what, list):
            log.append(what)
        elif kind == "commit":
            log.commit(log.boundary(what, above=log.committed))
        elif kind == "restart":
            log.restart(log.boundary(what))
            known_from = log.end
        elif (end := log.boundary(what, above=max(log.committed, known_from))) < log.end:
            log.cut(end)
        for high_watermark in {log.committed, *(h.next_offset for h in log.headers)}:
            if high_watermark >= log.committed:
                found = log.state.transactions.stable_offset(high_watermark)
                assert found == stable_by_definition(log.headers, high_watermark)
        stable = log.state.transactions.stable_offset(log.committed)
        assert stable >= before
        before = stable


def test_a_transaction_is_open_until_its_mark_is_committed() -> None:
    log = Transactions()
    log.append([(1, "transactional")])
    log.append([(1, "mark")])
    stable = log.state.transactions.stable_offset
    assert [stable(high_watermark) for high_watermark in (0, 1, 2, 3)] == [0, 0, 0, 3]
    log.commit(3)
    assert stable(3) == 3


def test_a_cut_of_a_mark_opens_its_transaction_again() -> None:
    log = Transactions()
    log.append([(1, "transactional"), (2, "transactional")])
    log.append([(2, "mark"), (1, "mark")])
    log.commit(5)
    log.cut(5)
    log.append([(3, "plain")])
    log.commit(log.end)
    assert log.state.transactions.stable_offset(log.end) == 0


def test_what_is_remembered_of_marks_goes_once_they_are_committed() -> None:
    log = Transactions()
    for _ in range(100):
        log.append([(1, "transactional"), (1, "mark")])
    size = len(log.state.transactions.encode())
    log.commit(log.end)
    assert len(log.state.transactions.encode()) == size - 100 * 16
