r"""Regular expressions over topic names that no pattern can make slow.

Python's ``re`` backtracks: a member that subscribed to ``(a+)+$`` could hang the coordinator of
everybody's groups. This is the part of RE2's syntax that subscriptions use, matched in time
linear in the name by a set of states (Thompson 1968), each set and letter looked up once:

    literals  .  [a-z] [^a-z]  \d \D \w \W \s \S  \. and other escaped punctuation
    ab  a|b  (a) (?:a)  a* a+ a? a{2} a{2,} a{2,5}, lazy forms too  ^ $

A pattern matches a topic when it matches the whole name. Look-around, back references and flags
are refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from penstock.wire.errors import InvalidRequestError

MAX_PATTERN_CHARS: Final = 512
MAX_STATES: Final = 1_000
_MAX_REPEAT: Final = 250  # Topic names are no longer than this.
_MAX_MEMO: Final = 50_000  # States in all remembered sets of a pattern, so a few megabytes.


class _SyntaxError(Exception):
    """What is wrong with a pattern, and where."""


@dataclass(frozen=True, slots=True)
class _Letters:
    """One letter out of ``ranges``, or with ``negated`` one outside of them."""

    ranges: tuple[tuple[str, str], ...]
    negated: bool = False

    def has(self, letter: str) -> bool:
        return any(low <= letter <= high for low, high in self.ranges) != self.negated


@dataclass(frozen=True, slots=True)
class _Sequence:
    parts: tuple[_Node, ...]


@dataclass(frozen=True, slots=True)
class _Choice:
    options: tuple[_Node, ...]


@dataclass(frozen=True, slots=True)
class _Repeat:
    body: _Node
    least: int
    most: int | None


@dataclass(frozen=True, slots=True)
class _Anchor:
    at_start: bool


_Node = _Letters | _Sequence | _Choice | _Repeat | _Anchor

_DIGITS: Final = (("0", "9"),)
_WORD: Final = (("0", "9"), ("A", "Z"), ("_", "_"), ("a", "z"))
_SPACE: Final = (("\t", "\r"), (" ", " "))
_CLASSES: Final = {
    "d": _Letters(_DIGITS),
    "D": _Letters(_DIGITS, negated=True),
    "w": _Letters(_WORD),
    "W": _Letters(_WORD, negated=True),
    "s": _Letters(_SPACE),
    "S": _Letters(_SPACE, negated=True),
}


class _Parser:
    """Recursive descent; ``self._at`` is the next letter's position."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0

    def parse(self) -> _Node:
        node = self._choice()
        if self._at < len(self._text):
            raise _SyntaxError(f"unmatched ) at position {self._at}")
        return node

    def _peek(self) -> str:
        return self._text[self._at : self._at + 1]

    def _take(self) -> str:
        letter = self._peek()
        if not letter:
            raise _SyntaxError("it ends too early")
        self._at += 1
        return letter

    def _skip(self, word: str) -> bool:
        if not self._text.startswith(word, self._at):
            return False
        self._at += len(word)
        return True

    def _choice(self) -> _Node:
        options = [self._sequence()]
        while self._skip("|"):
            options.append(self._sequence())
        return options[0] if len(options) == 1 else _Choice(tuple(options))

    def _sequence(self) -> _Node:
        parts: list[_Node] = []
        while self._peek() not in ("", "|", ")"):
            parts.append(self._repeat(self._atom()))
        return parts[0] if len(parts) == 1 else _Sequence(tuple(parts))

    def _repeat(self, body: _Node) -> _Node:
        start = self._at
        bounds = self._bounds()
        if bounds is None:
            return body
        if isinstance(body, _Anchor) and self._text[start - 1] != ")":
            raise _SyntaxError(f"nothing to repeat at position {start}")
        self._skip("?")  # Lazy or not, the same names match.
        at = self._at
        if self._skip("+") or self._bounds() is not None:
            raise _SyntaxError(f"nothing to repeat at position {at}")
        return _Repeat(body, *bounds)

    def _bounds(self) -> tuple[int, int | None] | None:
        simple: dict[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}
        letter = self._peek()
        if letter in simple:
            self._at += 1
            return simple[letter]
        if letter != "{":
            return None
        start = self._at
        end = self._text.find("}", start)
        low, comma, high = self._text[start + 1 : max(end, start + 1)].partition(",")
        digits = [part for part in (low, high) if part]
        if end < 0 or not low or not all(part.isascii() and part.isdigit() for part in digits):
            raise _SyntaxError(
                f"{{ at position {start} begins no repetition; write \\{{ for a brace"
            )
        self._at = end + 1
        least = int(low)
        most = int(high) if high else (None if comma else least)
        if least > (most if most is not None else least) or max(least, most or 0) > _MAX_REPEAT:
            raise _SyntaxError(
                f"the repetition at position {start} must rise and stay within {_MAX_REPEAT}"
            )
        return least, most

    def _atom(self) -> _Node:
        at = self._at
        letter = self._take()
        if letter == "(":
            return self._group(at)
        if letter == "[":
            return self._bracket(at)
        if letter == ".":
            return _Letters((), negated=True)
        if letter in "^$":
            return _Anchor(at_start=letter == "^")
        if letter == "\\":
            return self._escape(at)
        if letter in "*+?{":
            raise _SyntaxError(f"nothing to repeat at position {at}")
        return _Letters(((letter, letter),))

    def _group(self, at: int) -> _Node:
        if self._peek() == "?" and not self._skip("?:"):
            raise _SyntaxError(f"(? at position {at}: only (?: is known; no look-around, no flags")
        node = self._choice()
        if not self._skip(")"):
            raise _SyntaxError(f"( at position {at} is not closed")
        return node

    def _escape(self, at: int) -> _Letters:
        letter = self._take()
        if letter in _CLASSES:
            return _CLASSES[letter]
        if letter.isalnum():
            raise _SyntaxError(f"\\{letter} at position {at} is not known")
        return _Letters(((letter, letter),))

    def _bracket(self, at: int) -> _Letters:
        negated = self._skip("^")
        ranges: list[tuple[str, str]] = []
        first = True
        while first or self._peek() != "]":
            first = False
            if not self._peek():
                raise _SyntaxError(f"[ at position {at} is not closed")
            ranges += self._bracket_item()
        self._at += 1
        return _Letters(tuple(ranges), negated)

    def _bracket_item(self) -> tuple[tuple[str, str], ...]:
        at = self._at
        low = self._bracket_letter()
        if low.negated:
            raise _SyntaxError(f"a negated class at position {at} cannot stand in brackets")
        single = len(low.ranges) == 1 and low.ranges[0][0] == low.ranges[0][1]
        if not single or self._peek() != "-" or self._text[self._at + 1 : self._at + 2] == "]":
            return low.ranges
        self._at += 1
        high = self._bracket_letter()
        (start, _), (end, last) = low.ranges[0], high.ranges[0]
        if len(high.ranges) != 1 or end != last or high.negated or start > end:
            raise _SyntaxError(f"the range at position {at} is not one letter to a later one")
        return ((start, end),)

    def _bracket_letter(self) -> _Letters:
        at = self._at
        letter = self._take()
        return self._escape(at) if letter == "\\" else _Letters(((letter, letter),))


class _Automaton:
    """States by number: a set of letters and what follows, or free steps to other states."""

    def __init__(self) -> None:
        self.letters: list[_Letters | None] = []
        self.anchors: list[_Anchor | None] = []
        self.follow: list[tuple[int, ...]] = []
        self.final = self._new(None, None, ())

    def _new(
        self, letters: _Letters | None, anchor: _Anchor | None, follow: tuple[int, ...]
    ) -> int:
        if len(self.follow) >= MAX_STATES:
            raise _SyntaxError("its repetitions make it too large")
        self.letters.append(letters)
        self.anchors.append(anchor)
        self.follow.append(follow)
        return len(self.follow) - 1

    def add(self, node: _Node, then: int) -> int:
        """The state from which ``node`` is matched and ``then`` is reached."""
        match node:
            case _Letters():
                return self._new(node, None, (then,))
            case _Anchor():
                return self._new(None, node, (then,))
            case _Sequence(parts):
                for part in reversed(parts):
                    then = self.add(part, then)
                return then
            case _Choice(options):
                return self._new(None, None, tuple(self.add(option, then) for option in options))
            case _Repeat():
                return self._add_repeat(node, then)

    def _add_repeat(self, node: _Repeat, then: int) -> int:
        if node.most is None:
            loop = self._new(None, None, ())
            self.follow[loop] = (self.add(node.body, loop), then)
            then = loop
        else:
            end = then
            for _ in range(node.most - node.least):
                then = self._new(None, None, (self.add(node.body, then), end))
        for _ in range(node.least):
            then = self.add(node.body, then)
        return then

    def closure(self, states: frozenset[int], *, at_start: bool, at_end: bool) -> frozenset[int]:
        """All states reached without a letter."""
        reached = set(states)
        stack = list(states)
        while stack:
            state = stack.pop()
            anchor = self.anchors[state]
            blocked = anchor is not None and not (at_start if anchor.at_start else at_end)
            if blocked or self.letters[state] is not None:
                continue
            for other in self.follow[state]:
                if other not in reached:
                    reached.add(other)
                    stack.append(other)
        return frozenset(reached)

    def step(self, states: frozenset[int], letter: str) -> frozenset[int]:
        """Where one letter leads from closed states."""
        after: set[int] = set()
        for state in states:
            letters = self.letters[state]
            if letters is not None and letters.has(letter):
                after.update(self.follow[state])
        return self.closure(frozenset(after), at_start=False, at_end=False)


class TopicPattern:
    """A parsed pattern. Obtained by :meth:`parse`, which remembers recent ones."""

    def __init__(self, text: str) -> None:
        if len(text) > MAX_PATTERN_CHARS:
            raise InvalidRequestError(
                f"the topic pattern has {len(text)} characters; {MAX_PATTERN_CHARS} are allowed"
            )
        try:
            self._automaton = _Automaton()
            start = self._automaton.add(_Parser(text).parse(), self._automaton.final)
        except _SyntaxError as error:
            raise InvalidRequestError(f"the topic pattern {text!r}: {error}") from None
        self.text: Final = text
        self._start = frozenset({start})
        self._memo: dict[tuple[frozenset[int], str], frozenset[int]] = {}
        self._memo_size = 0

    @staticmethod
    @lru_cache(maxsize=64)
    def parse(text: str) -> TopicPattern:
        """The pattern. Raises InvalidRequestError that says what is wrong where."""
        return TopicPattern(text)

    def _remember(self, states: frozenset[int], letter: str, after: frozenset[int]) -> None:
        self._memo_size += len(after) + 1
        if self._memo_size > _MAX_MEMO:
            self._memo.clear()
            self._memo_size = len(after) + 1
        self._memo[states, letter] = after

    def matches(self, name: str) -> bool:
        """Whether the pattern matches the whole of ``name``, in time linear in its length."""
        automaton = self._automaton
        if not name:
            return automaton.final in automaton.closure(self._start, at_start=True, at_end=True)
        states = automaton.closure(self._start, at_start=True, at_end=False)
        for letter in name:
            after = self._memo.get((states, letter))
            if after is None:
                after = automaton.step(states, letter)
                self._remember(states, letter, after)
            states = after
            if not states:
                return False
        return automaton.final in automaton.closure(states, at_start=False, at_end=True)
