"""Histories: events, how they pair, and the files that hold them."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.chaos.errors import HistoryError
from penstock.chaos.history import Event, History, HistoryWriter, Type, read_history
from penstock.chaos.recorder import Recorder

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=5)
numbers = st.integers(-(2**63), 2**63 - 1)
values = st.recursive(
    st.none() | numbers | st.booleans() | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=5,
)
events = st.builds(
    Event, st.integers(0, 2**63 - 1), texts, st.sampled_from(Type), texts, values, texts, texts
)  # fmt: skip


@given(event=events)
def test_an_event_is_its_line(tmp_path_factory: pytest.TempPathFactory, event: Event) -> None:
    path = tmp_path_factory.mktemp("history") / "history.jsonl"
    writer = HistoryWriter(path)
    writer.add(event)
    writer.close()
    try:
        assert list(read_history(path).events) == [event]
    except HistoryError:
        assert event.type is not Type.INVOKE, "it has no invocation"


def test_operations_are_what_was_asked_and_what_came_of_it(tmp_path: Path) -> None:
    first, second = tmp_path / "1", tmp_path / "2"
    for path, process in ((first, "a"), (second, "b")):
        writer = HistoryWriter(path)
        recorder = Recorder(writer, process, 0)
        recorder.invoke("append", {"first": 0})
        recorder.ok({"first": 0, "offset": 7})
        recorder.invoke("poll")
        recorder.fail("TOPIC: no such topic")
        recorder.invoke("poll")
        recorder.info("TIMEOUT: no answer")
        recorder.invoke("poll", 3)
        writer.close()
    history = read_history(first, second)
    assert [event.t for event in history.events] == sorted(event.t for event in history.events)
    mine = [one for one in history.operations if one.invoked.p == "a"]
    assert [one.type for one in mine] == [Type.OK, Type.FAIL, Type.INFO, Type.INFO]
    assert mine[0].value == {"first": 0, "offset": 7}
    assert mine[3].value == 3, "what was asked for, where nothing came of it"
    assert len(list(history.of("poll"))) == 6


def test_a_cut_last_line_is_left_out_and_any_other_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    whole = Event(1, "a", Type.INVOKE, "poll").line()
    path.write_text(f'{whole}\n{{"t":2,"p":"a","ty')
    assert len(read_history(path).operations) == 1
    path.write_text(f'{whole}\n{{"t":2,"p":"a"}}\n')
    with pytest.raises(HistoryError, match=r"history\.jsonl, line 2 is no event"):
        read_history(path)


@pytest.mark.parametrize(
    ("types", "says"),
    [
        ([Type.INVOKE, Type.INVOKE], "begins poll at 1 while its poll of 0 is under way"),
        ([Type.OK], "completes poll at 0, which it has not begun"),
        ([Type.INVOKE, Type.OK, Type.INFO], "completes poll at 2, which it has not begun"),
    ],
)
def test_a_process_has_one_operation_at_a_time(types: list[Type], says: str) -> None:
    with pytest.raises(HistoryError, match=says):
        History(Event(t, "a", type_, "poll") for t, type_ in enumerate(types))


def test_operations_are_found_by_what_they_are() -> None:
    events = [
        Event(t, process, type_, f)
        for t, (process, type_, f) in enumerate(
            [
                ("a", Type.INVOKE, "poll"),
                ("b", Type.INVOKE, "seek"),
                ("b", Type.OK, "seek"),
                ("a", Type.OK, "poll"),
                ("b", Type.INVOKE, "poll"),
            ]
        )
    ]
    history = History(reversed(events))
    assert [one.invoked.t for one in history.of("poll")] == [0, 4]
    assert [one.invoked.t for one in history.of("seek", "poll")] == [0, 1, 4]
    assert list(history.of("append")) == []
    assert (history.kinds, history.end_t) == ({"poll", "seek"}, 4)
    assert History([]).end_t == 0


def test_what_is_made_of_a_history_is_made_once() -> None:
    history = History([Event(0, "a", Type.INVOKE, "poll")])
    made = []

    def count(of: History) -> int:
        made.append(of)
        return len(of.operations)

    assert [history.derived(count), history.derived(count)] == [1, 1]
    assert made == [history]


def test_an_event_that_was_read_is_the_one_that_was_written(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    event = Event(7, "a", Type.INVOKE, "poll", {"first": [1]}, "", "final")
    path.write_text(event.line() + "\n")
    read = read_history(path).events[0]
    assert (read, hash(read), read.fields()) == (event, hash(event), event.fields())
    assert read != Event(7, "a", Type.INVOKE, "poll", {"first": [2]}, "", "final")
    assert read.line() == event.line()


def test_an_event_tells_soon_that_it_lacks_a_field(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    within = Event(1, "p", Type.INVOKE, "append", {"txn": "t1"})
    without = Event(2, "q", Type.INVOKE, "append", {"first": 0})
    assert [one.may_have("txn") for one in (within, without)] == [True, False]
    History([within, without]).write(path)
    assert [one.may_have("txn") for one in read_history(path).events] == [True, False]
    assert not Event(3, "p", Type.OK, "append").may_have("txn")
