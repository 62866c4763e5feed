"""The list of all checkers, and which of them judge what."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
from pathlib import Path

import pytest

from penstock.chaos import checkers
from penstock.chaos.checkers import Evidence, Sample
from penstock.chaos.checkers.registry import (
    CHECKERS,
    SUMMARIES,
    Settings,
    applicable,
    common,
    definition,
    judge,
    left_out,
)
from penstock.chaos.verdict import Valid
from tests.unit.chaos.histories import Script

S = 1_000_000_000
NO_EVIDENCE = Evidence()


def all_checkers() -> set[type]:
    """What has a name and checks, in all modules of the package."""
    found = set()
    for module in pkgutil.iter_modules(checkers.__path__):
        loaded = importlib.import_module(f"{checkers.__name__}.{module.name}")
        found |= {
            one
            for _, one in inspect.getmembers(loaded, inspect.isclass)
            if one.__module__ == loaded.__name__ and hasattr(one, "check") and hasattr(one, "name")
        }
    return found


def test_every_checker_is_listed_by_a_name_of_its_own() -> None:
    assert all_checkers() == set(SUMMARIES)
    assert len(CHECKERS) == len(SUMMARIES)


@pytest.mark.parametrize("name", CHECKERS)
def test_every_checker_is_defined(name: str) -> None:
    assert "anomaly is" in definition(name).replace("\n", " "), "what counts as one"
    assert not definition(name).splitlines()[-1].startswith(" ")
    assert 20 < len(SUMMARIES[CHECKERS[name]]) < 80


def checkers_within(call: str) -> set[str]:
    """The classes that tests of this directory name within calls of that name, or loop over."""
    found: set[str] = set()
    for path in Path(__file__).parent.glob("test_*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        lists = {
            one.targets[0].id: one.value
            for one in tree.body
            if isinstance(one, ast.Assign) and isinstance(one.targets[0], ast.Name)
        }
        for test in ast.walk(tree):
            if not isinstance(test, ast.FunctionDef) or not _calls(test, call):
                continue
            for one in ast.walk(test):
                within = lists.get(one.id) if isinstance(one, ast.Name) else None
                named = [one, *(ast.walk(within) if within is not None else ())]
                found |= {each.id for each in named if isinstance(each, ast.Name)}
    return found


def _calls(test: ast.FunctionDef, name: str) -> bool:
    return any(
        isinstance(one, ast.Call) and isinstance(one.func, ast.Name) and one.func.id == name
        for one in ast.walk(test)
    )


@pytest.mark.parametrize("control", ["is_false", "is_true"])
def test_every_checker_has_a_doctored_history_that_it_flags_and_a_clean_one(control: str) -> None:
    assert {one.__name__ for one in SUMMARIES} - checkers_within(control) == set()


def names(script: Script, evidence: Evidence = NO_EVIDENCE) -> set[str]:
    return {checker.name for checker in applicable(script.history, evidence)}


def test_what_a_history_holds_is_judged() -> None:
    script = Script()
    assert names(script) == {"availability"}
    script.append("p", 0, 1, 0)
    script.poll("r", {0: 0}, [(0, 0, "p", 0, 1)], {0: 1})
    assert {"lost-write", "poll-order", "phantom"} <= names(script)
    assert not {"acks-levels", "zombie-commit", "aborted-read", "seek-honoured"} & names(script)
    script.append("p", 1, 1, 1, acks="1")
    script.seek("r", 0)
    script.do("m/listener", "assigned", {"group": "g", "member": "m", "generation": 1})
    script.do("t", "commit", {"txn": "t"})
    found = {"acks-levels", "zombie-commit", "aborted-read", "seek-honoured"}
    assert found <= names(script)
    for f in ("write", "scan", "create", "delete", "transfer", "read-from"):
        asked = {"topic": "kv", "partition": 0, "register": "x", "txn": "t"}
        script.do("x", f, asked)
    compared = Script()
    compared.do("x", "cas", {"register": "x", "expected": None, "value": 1})
    assert "linearizable" in names(compared)
    found = {"linearizable", "compacted-last", "topic-ids", "deleted-records", "transfer-total"}
    assert found <= names(script)


def test_the_cluster_is_judged_as_far_as_evidence_was_gathered() -> None:
    assert [checker.name for checker in common(Evidence())] == ["availability"]
    assert set(left_out(Evidence())) == {
        "replicas-identical",
        "watermarks-forward",
        "one-leader",
        "stale-epoch",
        "leaks",
        "crashes",
        "directory-refused",
    }
    samples = [Sample(t * S, 1, 7, 1, 1, 1) for t in (0, 60, 119)]
    assert "leaks" in left_out(Evidence(samples=samples))
    samples.append(Sample(120 * S, 1, 7, 1, 1, 1))
    gathered = Evidence(samples=samples, logs={1: []})
    assert {checker.name for checker in common(gathered)} == {"availability", "leaks", "crashes"}


def test_what_is_told_of_a_run_reaches_its_checkers() -> None:
    script = Script()
    script.append("p", 0, 4, 0)
    script.final((0, 2, "p", 2, 2), start=2, end=4)
    for settings, valid in (
        (Settings(), Valid.FALSE),
        (Settings(expiring=frozenset({"orders"})), Valid.TRUE),
    ):
        found = judge(applicable(script.history, Evidence(), settings), script.history, Evidence())
        assert {one.checker: one.valid for one in found}["lost-write"] is valid


def test_a_checker_that_breaks_says_unknown() -> None:
    script = Script()
    script.append("p", 0, 4, 0)
    script.do("r", "poll", {"topic": "orders"}, {"runs": [["orders-0", "no offset"]]})
    found = judge([CHECKERS["lost-write"](), CHECKERS["crashes"]()], script.history, Evidence())
    assert [one.valid for one in found] == [Valid.UNKNOWN, Valid.UNKNOWN]
    assert found[0].reason.startswith("the checker broke: ValueError")
    assert found[1].reason == "no node's log was gathered"
