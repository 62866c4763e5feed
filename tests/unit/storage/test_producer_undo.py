"""Taking back what appends changed gives what reading the log up to there would."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from penstock.broker.core import producer_undo
from penstock.broker.core.producer_stage import ProducerStage
from penstock.broker.core.producer_state import ProducerState
from penstock.broker.core.producer_undo import ProducerUndo
from penstock.wire.markers import MarkerType
from penstock.wire.records import BatchHeader, parse_header
from tests.unit.storage.storage_kit import batch, mark, transactional

NOW_MS = 1


def mark_in(header: BatchHeader) -> MarkerType | None:
    """What a mark says here, which its header does not tell: it depends on the offset."""
    return MarkerType(header.base_offset % 2) if header.is_control else None


class History:
    """A log's headers, its state and its undo, as a log keeps them."""

    def __init__(self) -> None:
        self.headers: list[BatchHeader] = []
        self.state = ProducerState()
        self.undo = ProducerUndo()
        self._next: dict[int, int] = {}

    @property
    def end(self) -> int:
        return self.headers[-1].next_offset if self.headers else 0

    def append(self, kinds: list[tuple[int, str]]) -> None:
        stage, begin, end = ProducerStage(self.state), self.end, self.end
        for producer, kind in kinds:
            header = self._header(producer, kind, end)
            stage.record(header, end, NOW_MS, mark_in(header))
            self.headers.append(header)
            end = header.next_offset
        self.undo.note(begin, end, stage)
        stage.commit()

    def _header(self, producer: int, kind: str, offset: int) -> BatchHeader:
        if kind == "marker":
            return parse_header(mark(MarkerType.ABORT, producer, base_offset=offset))
        if kind == "plain":
            return parse_header(batch("v", "w", base_offset=offset))
        sequence = self._next.get(producer, 0)
        self._next[producer] = sequence + 2
        make = transactional if kind == "transactional" else batch
        return parse_header(make("v", "w", producer=(producer, 0, sequence), base_offset=offset))

    def cut(self, end: int) -> bool:
        """Cut as a log does; False where what is there does not say what the state was."""
        found = self.undo.state_at(end, self.state) if self.state.touches(end) else None
        known = found is not None or not self.state.touches(end)
        state, offset = found or (self.state if known else self.replayed(end), end)
        assert offset <= end
        for header in self.headers:
            if offset <= header.base_offset < end:
                state.record(header, header.base_offset, NOW_MS, mark_in(header))
        self.state = state
        self.headers = [header for header in self.headers if header.base_offset < end]
        self.undo.cut(end)
        return known

    def replayed(self, end: int) -> ProducerState:
        state = ProducerState()
        for header in self.headers:
            if header.base_offset < end:
                state.record(header, header.base_offset, NOW_MS, mark_in(header))
        return state


KINDS = st.sampled_from(["plain", "idempotent", "transactional", "marker"])
APPENDS = st.lists(st.tuples(st.integers(0, 2), KINDS), min_size=1, max_size=4)


@given(
    steps=st.lists(
        st.one_of(
            st.tuples(st.just("append"), APPENDS),
            st.tuples(st.just("cut"), st.floats(0, 1)),
            st.tuples(st.just("commit"), st.floats(0, 1)),
        ),
        max_size=20,
    )
)
def test_a_cut_finds_the_state_that_reading_the_log_would(
    steps: list[tuple[str, list[tuple[int, str]] | float]],
) -> None:
    history, committed = History(), 0
    for kind, what in steps:
        if isinstance(what, list):
            history.append(what)
            continue
        ends = [0, *(header.next_offset for header in history.headers)]
        at = ends[round(what * (len(ends) - 1))]
        if kind == "commit":
            committed = max(committed, at)
            history.undo.committed(committed)
        else:
            assert history.cut(at) or at < committed
            committed = min(committed, at)
            assert history.state == history.replayed(history.end)


def test_what_is_committed_is_not_kept() -> None:
    history = History()
    for _ in range(3):
        history.append([(1, "idempotent")])
    history.undo.committed(3)
    assert len(history.undo) == 2  # The second append is committed in part.
    history.undo.committed(history.end)
    assert len(history.undo) == 0
    assert history.undo.state_at(2, history.state) is None


def test_an_append_that_concerns_no_producer_is_not_kept() -> None:
    history = History()
    history.append([(1, "plain")])
    assert len(history.undo) == 0


def test_no_more_is_kept_than_so_many_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(producer_undo, "MOST_BYTES", 3 * 400)
    history = History()
    for _ in range(5):
        history.append([(1, "idempotent")])
    ends = [0, *(header.next_offset for header in history.headers)]
    known = [history.undo.state_at(end, history.state) is not None for end in ends]
    assert known == [False, False, True, True, True, True]


def test_a_state_in_doubt_is_read_from_the_log() -> None:
    history = History()
    history.append([(1, "idempotent")])
    history.state.doubt(history.headers[0], 0)
    assert history.undo.state_at(0, history.state) is None
