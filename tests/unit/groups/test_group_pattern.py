from __future__ import annotations

import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.broker.core.group_pattern import MAX_PATTERN_CHARS, TopicPattern
from penstock.wire.errors import InvalidRequestError

atoms = st.sampled_from(
    [
        r"a",
        r"b",
        r"-",
        r"\.",
        r"\-",
        r".",
        r"[ab]",
        r"[^a]",
        r"[a-c.]",
        r"[-a]",
        r"[a-]",
        r"[]a]",
        r"[\d_]",
        r"\d",
        r"\D",
        r"\w",
        r"\W",
        r"\s",
        r"\S",
        r"^",
        r"$",
        r"0",
        "",
    ]
)
quantifiers = st.sampled_from(["*", "+", "?", "*?", "+?", "??", "{2}", "{1,}", "{0,2}", "{1,3}?"])
patterns = st.recursive(
    atoms,
    lambda inner: st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map(lambda pair: f"({pair[0]}|{pair[1]})"),
        st.tuples(inner, quantifiers).map(lambda pair: f"(?:{pair[0]}){pair[1]}"),
    ),
    max_leaves=8,
)


@settings(max_examples=400, deadline=None)
@given(pattern=patterns, names=st.lists(st.text("abc.-_0 ", max_size=8), min_size=1, max_size=5))
def test_it_matches_what_pythons_engine_matches(pattern: str, names: list[str]) -> None:
    ours = TopicPattern(pattern)
    theirs = re.compile(pattern, re.ASCII)
    for name in names:
        assert ours.matches(name) == (theirs.fullmatch(name) is not None), (pattern, name)


@pytest.mark.filterwarnings("ignore:Possible")  # Python warns of sets that it may nest one day.
@settings(max_examples=500, deadline=None)
@given(text=st.text("ab()[]{}|*+?^$\\.-,20dx:", max_size=12))
def test_what_is_accepted_means_the_same_to_python_and_all_else_is_a_typed_error(text: str) -> None:
    try:
        ours = TopicPattern(text)
    except InvalidRequestError:
        return
    theirs = re.compile(text, re.ASCII)
    for name in ("", "a", "ab", "a-b", "2", "{2}", "]", "^a", "x"):
        assert ours.matches(name) == (theirs.fullmatch(name) is not None), name


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a(b", "( at position 1 is not closed"),
        ("a)b", "unmatched ) at position 1"),
        ("[a-", "ends too early"),
        ("[ab", "[ at position 0 is not closed"),
        ("*a", "nothing to repeat at position 0"),
        ("a**", "nothing to repeat at position 2"),
        ("a++", "nothing to repeat at position 2"),
        ("(?=a)", "no look-around"),
        (r"(a)\1", r"\1 at position 3 is not known"),
        ("a{3,1}", "must rise"),
        ("a{1,999}", "within 250"),
        ("a{x}", "begins no repetition"),
        ("[z-a]", "one letter to a later one"),
        ("a\\", "ends too early"),
        ("((a{200}){200}){200}", "too large"),
        ("a" * (MAX_PATTERN_CHARS + 1), "characters"),
    ],
)
def test_a_bad_pattern_is_refused_in_words(text: str, words: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        TopicPattern.parse(text)
    assert words in caught.value.message


@pytest.mark.parametrize("text", ["(a+)+$", "(a|a)*b", "(a*)*b", "(.*)*x", "(a|aa)+b"])
def test_no_pattern_makes_matching_slow(text: str) -> None:
    pattern = TopicPattern(text)
    started = time.process_time()
    for length in range(200, 249):
        assert not pattern.matches("a" * length + "!")
    assert time.process_time() - started < 30  # A backtracking engine needs ages for one of them.
