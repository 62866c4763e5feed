"""Commands and options that any text of the sources names are there on the command line."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.cli.command_line import VALUE, bare_options, commands, complaints, options_of

ROOT = Path(__file__).parents[3]
_OTHER_PROGRAMS = {
    # `findmnt --target` of a data directory that is not there.
    "broker/penstock/broker/datadir.py": {"--target"},
    # That, and `chown --recursive`.
    "raft_meta/penstock/raft_meta/denied.py": {"--recursive", "--target"},
    # `journalctl --priority`.
    "broker/penstock/broker/logs.py": {"--priority"},
    # Those of `python -m penstock.cli.demo`.
    "cli/penstock/cli/demo/access_log.py": {"--data"},
    "cli/penstock/cli/demo/scenario.py": {"--data"},
}


def sources() -> list[Path]:
    trees = ("proto/penstock/wire", "raft_meta", "broker", "client", "cli")
    return [path for tree in trees for path in sorted((ROOT / tree).rglob("*.py"))]


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """Every text in a module with its line; what f-strings put in is VALUE."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    parts = {
        id(part)
        for node in ast.walk(tree)
        if isinstance(node, ast.JoinedStr)
        for part in ast.walk(node)
        if part is not node
    }
    for node in ast.walk(tree):
        if id(node) in parts:
            continue
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value
        elif isinstance(node, ast.JoinedStr):
            pieces = [one.value if isinstance(one, ast.Constant) else VALUE for one in node.values]
            yield node.lineno, "".join(str(piece) for piece in pieces)


def options_for(path: Path) -> frozenset[str]:
    """What may stand in a module without a command: the options of its own, or of any command."""
    module = ".".join(path.relative_to(ROOT).with_suffix("").parts[1:])
    every = list(commands())
    own = [one for one in every if getattr(one.callback, "__module__", "") == module]
    return frozenset().union(*(options_of(one) for one in own or every))


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_what_a_text_names_is_there(path: Path) -> None:
    known = options_for(path) | _OTHER_PROGRAMS.get(str(path.relative_to(ROOT)), set())
    wrong = []
    for line, text in texts(path):
        wrong += [f"line {line}: {complaint}" for complaint in complaints(text)]
        wrong += [f"line {line}: no option {name}" for name in bare_options(text) - known]
    assert wrong == []


@pytest.mark.parametrize(
    "text",
    [
        "see `penstock topic list`",
        "see penstock topics lists, and wait",
        "`penstock topics alter NAME --delete-configs KEY`",
        "`penstock -b HOST:PORT topics list --offset`",
        "`penstock topics --internal`",
    ],
)
def test_the_test_sees_what_is_not_there(text: str) -> None:
    assert list(complaints(text))


@pytest.mark.parametrize(
    "text",
    [
        "`penstock topics list`",
        "run penstock topics list, and wait",
        "`penstock topics alter {} --reset KEY --config=a=b`",
        "`penstock topics` has all of them",
        "the penstock command is not installed",
        "`penstock --help`",
    ],
)
def test_the_test_lets_pass_what_is_there(text: str) -> None:
    assert not list(complaints(text))


def test_options_without_a_command_are_found() -> None:
    assert bare_options("give --offset (`penstock topics list --internal`), or --x-y") == {
        "--offset",
        "--x-y",
    }
