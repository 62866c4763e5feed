"""As much of SQL as it takes to tell which view a statement defines, and what a query reads.

Spark parses the statements themselves. This is for what Spark's declarative pipelines do not tell
about those that they took.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

_TOKEN: Final = re.compile(
    r"""
    (?P<comment> --[^\n]* | /\*.*?\*/ )
    | (?P<text> '(?:[^'\\]|\\.)*' | "(?:[^"\\]|\\.)*" )
    | (?P<name> (?:`(?:[^`]|``)*`|\w+) (?:\s*\.\s*(?:`(?:[^`]|``)*`|\w+))* )
    | (?P<sign> \S )
    """,
    re.VERBOSE | re.DOTALL,
)
_KINDS: Final = {
    "VIEW": "view",
    "STREAMING TABLE": "table",
    "MATERIALIZED VIEW": "materialized view",
    "FLOW": "flow",
}
_HEAD: Final = re.compile(
    r"CREATE (?:OR (?:REFRESH|REPLACE) )?"
    r"(?:(?:TEMP |TEMPORARY )?(VIEW)|(STREAMING TABLE|MATERIALIZED VIEW|FLOW)) "
)
_AFTER_SOURCES: Final = frozenset(
    # ON and USING are none of them: behind a join's condition a comma is followed by a source.
    {"WHERE", "GROUP", "HAVING", "ORDER", "LIMIT", "WINDOW", "UNION", "EXCEPT", "INTERSECT"}
    | {"SELECT", "CLUSTER", "SORT", "DISTRIBUTE", "QUALIFY"}
)
_BEFORE_SOURCE: Final = frozenset({"FROM", "JOIN"})
# CREATE OR REPLACE GLOBAL TEMPORARY VIEW IF NOT EXISTS and a name.
_SHOWN_WORDS: Final = 10
_NO_SOURCE: Final = frozenset({"STREAM", "LATERAL", "TABLE"})


@dataclass(frozen=True, slots=True)
class Token:
    """A piece of SQL: where it begins, and what it is: ``text``, ``name`` or ``sign``."""

    kind: str
    text: str
    start: int

    @property
    def upper(self) -> str:
        """A key word as it is compared."""
        return self.text.upper()


@dataclass(frozen=True, slots=True)
class Definition:
    """A statement that defines something: its kind, its name, what it fills, and its query.

    ``target`` is the name itself but for a flow. ``query`` is empty where there is none.
    """

    kind: str
    name: str
    target: str
    query: str


def tokens(sql: str) -> Iterator[Token]:
    """The tokens of ``sql`` without comments; a name with dots in it is one."""
    for found in _TOKEN.finditer(sql):
        kind = found.lastgroup or ""
        if kind != "comment":
            yield Token(kind, found.group(), found.start())


def statements(sql: str) -> list[str]:
    """The statements of ``sql``, without the semicolons between them and without empty ones."""
    cuts = [token.start for token in tokens(sql) if token.text == ";"]
    parts = []
    start = 0
    for end in [*cuts, len(sql)]:
        if any(True for _ in tokens(sql[start:end])):
            parts.append(sql[start:end].strip())
        start = end + 1
    return parts


def definition(statement: str) -> Definition | None:
    """What a statement defines; None for SET and for whatever else defines nothing."""
    words = list(tokens(statement))
    head = _HEAD.match(" ".join(token.upper for token in words[:5]) + " ")
    if head is None:
        return None
    kind = _KINDS[head[1] or head[2]]
    rest = words[len(head[0].split()) :]
    if [token.upper for token in rest[:3]] == ["IF", "NOT", "EXISTS"]:
        rest = rest[3:]
    if not rest:
        return None
    name = plain_name(rest[0].text)
    start = _after_as(rest)
    query = statement[start:] if start is not None else ""
    if kind == "flow":
        target, query = _insert(query)
        return Definition(kind, name, target, query)
    return Definition(kind, name, name, query)


def unknown_creation(statement: str) -> str:
    """What a statement creates that ``definition`` does not know, as it is written up to its name
    or so; empty for any other statement.
    """
    words = list(tokens(statement))
    if not words or words[0].upper != "CREATE" or definition(statement) is not None:
        return ""
    shown: list[str] = []
    for token in words:
        if token.upper == "AS" or token.kind != "name":
            break
        shown.append(token.text)
    return " ".join(shown[:_SHOWN_WORDS])


def names_read(query: str) -> list[str]:
    """The names that a query reads, in their order, once each: of datasets, tables and CTEs."""
    found: dict[str, None] = {}
    depth = 0
    # Of each open parenthesis whether what stands there is a list of sources.
    in_sources = {0: False}
    expected = False
    for token in tokens(query):
        if token.text == "(":
            depth += 1
            in_sources[depth] = expected
            continue
        if token.text == ")":
            depth = max(0, depth - 1)
            expected = False
            continue
        if token.text == ",":
            expected = in_sources.get(depth, False)
            continue
        if token.kind == "name":
            if token.upper in _BEFORE_SOURCE:
                in_sources[depth] = expected = True
                continue
            if token.upper in _AFTER_SOURCES:
                in_sources[depth] = False
            elif expected and token.upper in _NO_SOURCE:
                continue
            elif expected:
                found[plain_name(token.text)] = None
        expected = False
    return list(found)


def plain_name(name: str) -> str:
    """A name without its back quotes and without white space around its dots."""
    return re.sub(r"\s*\.\s*", ".", name).replace("`", "")


def _after_as(words: list[Token]) -> int | None:
    """Where the query begins: behind the first AS that stands in no parentheses."""
    depth = 0
    for place, token in enumerate(words):
        depth += {"(": 1, ")": -1}.get(token.text, 0)
        if depth == 0 and token.kind == "name" and token.upper == "AS" and place + 1 < len(words):
            return words[place + 1].start
    return None


def _insert(query: str) -> tuple[str, str]:
    """The target and the query of INSERT INTO target BY NAME query."""
    words = list(tokens(query))
    upper = [token.upper for token in words]
    if "INTO" not in upper or upper.index("INTO") + 1 >= len(words):
        return "", query
    place = upper.index("INTO") + 1
    target = plain_name(words[place].text)
    rest = words[place + 1 :]
    if [token.upper for token in rest[:2]] == ["BY", "NAME"]:
        rest = rest[2:]
    return target, query[rest[0].start :] if rest else ""
