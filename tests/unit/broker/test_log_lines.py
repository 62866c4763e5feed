"""Every line of a node's log that asks for attention is documented, and no other."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/operating/log-lines.md").read_text(encoding="utf-8")
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
