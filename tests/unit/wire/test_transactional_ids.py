"""Ids of transactions, and what an attempt's id says."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.wire.errors import InvalidTransactionalIdError
from penstock.wire.transactional_ids import (
    MAX_TRANSACTIONAL_ID_BYTES,
    Attempt,
    AttemptHandle,
    check_commit_group,
    check_transactional_id,
    check_writing_id,
    coordinating_key,
    parse_attempt,
    parse_handle,
)

_TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=80)


@given(_TEXT, st.integers(0, 2**63 - 1), st.integers(0, 2**31 - 1), st.integers(0, 2**63 - 1))
def test_an_attempt_is_read_back_from_its_id(
    group: str, epoch_number: int, task: int, attempt: int
) -> None:
    named = Attempt(group, epoch_number, task, attempt)
    assert parse_attempt(named.transactional_id) == named
    assert coordinating_key(named.transactional_id) == group


@given(
    _TEXT,
    st.integers(0, 2**63 - 1),
    st.integers(0, 2**31 - 1),
    st.integers(0, 2**63 - 1),
    st.integers(0, 2**63 - 1),
)
def test_a_handle_is_read_back_from_its_text(
    group: str, epoch_number: int, task: int, attempt: int, producer_id: int
) -> None:
    handle = AttemptHandle(Attempt(group, epoch_number, task, attempt), producer_id)
    assert parse_handle(handle.text) == handle
    assert parse_handle(handle.attempt.transactional_id) is None
    assert parse_attempt(handle.text) is None


_NUMBERS = st.text("0123456789\u0663-+ _", max_size=20)


@given(_NUMBERS, _NUMBERS, _NUMBERS, _NUMBERS, _TEXT)
def test_no_two_texts_are_one_handle(
    producer_id: str, epoch_number: str, task: str, attempt: str, group: str
) -> None:
    text = f"{producer_id}@__attempt/{epoch_number}/{task}/{attempt}/{group}"
    attempt_id = text.partition("@")[2]
    named = parse_attempt(attempt_id)
    assert named is None or named.transactional_id == attempt_id
    handle = parse_handle(text)
    if handle is not None:
        assert handle.text == text
        assert max(handle.producer_id, handle.attempt.epoch_number) < 2**63
        assert handle.attempt.task < 2**31


@given(_TEXT)
def test_what_a_program_may_choose_is_no_attempt(transactional_id: str) -> None:
    try:
        check_transactional_id(transactional_id)
    except InvalidTransactionalIdError:
        return
    assert parse_attempt(transactional_id) is None
    assert coordinating_key(transactional_id) == transactional_id


def test_the_longest_group_has_attempts_whose_ids_are_allowed() -> None:
    longest = next(n for n in range(600, 0, -1) if _is_allowed("g" * n))
    attempt = Attempt("g" * longest, 2**63 - 1, 2**31 - 1, 2**63 - 1)
    assert len(attempt.transactional_id.encode()) == MAX_TRANSACTIONAL_ID_BYTES


def test_a_group_is_not_named_as_an_attempt() -> None:
    # Whoever looked for its coordinator would look for that of another group.
    with pytest.raises(InvalidTransactionalIdError, match="kept for the attempts"):
        check_commit_group("__attempt/1/2/3/other")


@pytest.mark.parametrize("number", ["01", "\u0661", "-1", "+1", ""])
def test_what_nobody_began_is_no_id_to_write_under(number: str) -> None:
    check_writing_id("__attempt/1/2/3/g")
    with pytest.raises(InvalidTransactionalIdError, match="kept for the attempts"):
        check_writing_id(f"__attempt/{number}/2/3/g")


def _is_allowed(group: str) -> bool:
    try:
        check_commit_group(group)
    except InvalidTransactionalIdError:
        return False
    return True


@pytest.mark.parametrize(
    ("transactional_id", "told"),
    [
        ("", "must not be empty"),
        ("x" * 513, "513 bytes"),
        ("\ud800", "UTF-8"),
        ("__attempt/1/2/3/g", "kept for the attempts"),
        ("__attempt/what", "kept for the attempts"),
        ("__attempt/01/2/3/g", "kept for the attempts"),
        ("__attempt/\u0661/2/3/g", "kept for the attempts"),
    ],
)
def test_ids_that_are_not_allowed(transactional_id: str, told: str) -> None:
    with pytest.raises(InvalidTransactionalIdError, match=told):
        check_transactional_id(transactional_id)
