"""Every line of a node's log that asks for attention is documented, and no other."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[3]
WHOLE = (ROOT / "docs/operating/log-lines.md").read_text(encoding="utf-8")
PAGE = WHOLE.partition("## To act on")[2]
LEVELS = {"warning", "error", "exception", "critical"}
LOGGERS = {"log", "_log", "logger"}


def nodes() -> Iterator[ast.AST]:
    for package in ("broker", "raft_meta"):
        for file in sorted((ROOT / package).rglob("*.py")):
            yield from ast.walk(ast.parse(file.read_text(encoding="utf-8")))


def events() -> set[str]:
    """What is logged at these levels, where it is said there and then."""
    found = set()
    for node in nodes():
        match node:
            case ast.Call(
                func=ast.Attribute(
                    attr=level, value=ast.Name(id=logger) | ast.Attribute(attr=logger)
                ),
                args=[ast.Constant(value=str(event)), *_],
            ) if level in LEVELS and logger in LOGGERS:
                found.add(event)
    return found


def documented() -> set[str]:
    rows = re.findall(r"^\| (`.*?`) \|", PAGE, re.MULTILINE)
    faults = PAGE.partition("## Faults of Penstock")[2]
    return {
        " ".join(name.split())
        for text in (*rows, faults)
        for name in re.findall(r"`([^`]+)`", text)
    }


def test_every_warning_and_error_is_documented() -> None:
    assert len(events()) > 50
    assert events() - documented() == set()


def test_nothing_is_documented_that_no_node_says() -> None:
    said = {
        node.value
        for node in nodes()
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    assert documented() - said == set()


SYNONYMS = {
    "node_id", "broker_id", "broker", "topic_name", "topic_id", "partition_id", "group_id",
    "member_id", "dir", "data_dir", "log_dir", "method_name", "rpc", "voter_id", "follower_id",
    "transaction_id", "cluster_id",
}  # fmt: skip
"""Other names for what has one in metrics: a search for that one would miss the line."""


def fields() -> set[str]:
    """The fields that lines are given, where they are said there and then."""
    return {
        keyword.arg
        for node in nodes()
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in LEVELS | {"info", "debug", "bind"}
        and getattr(node.func.value, "id", getattr(node.func.value, "attr", "")) in LOGGERS
        for keyword in node.keywords
        if keyword.arg is not None
    }


def test_fields_have_the_names_of_labels() -> None:
    documented_fields = {
        name
        for row in re.findall(r"^\| (`[^|]*`) \|", WHOLE.partition("## To act on")[0], re.MULTILINE)
        for name in re.findall(r"`([^`]+)`", row)
    }
    bound = {"node", "topic", "trace_id", "span_id", "logger"}  # These are added to lines.
    assert len(fields()) > 50
    assert fields() & SYNONYMS == set()
    assert documented_fields <= fields() | bound
