"""The short version of ``make sim-mutants``: rules left out are noticed."""

from __future__ import annotations

import pytest

from tests.simulation.quorum.leaving_out import complaint, hunt
from tests.simulation.quorum.mutants import MUTANTS

BY_TESTS = [name for name, mutant in MUTANTS.items() if mutant.tests]
QUICKLY = [  # In the first seeds; the rest takes ``make sim-mutants``.
    "appends always cut",
    "previous term not compared",
    "no PreVote",
    "the journal is not flushed",
    "snapshots are not flushed",
    "a write without room passes for done",
    "failures are lived with",
    "an office is not given up",
    "recovery keeps what was known to be committed",
    "recovery leaves the lost ones voters",
    "stale broker epochs",
    "stale partition epochs",
    "fenced brokers in sync",
    "duplicates take effect",
    "let in before caught up",
    "leader epochs stay",
]
ENOUGH_SEEDS = 40


@pytest.mark.parametrize("name", MUTANTS)
def test_every_mutant_changes_the_code_as_it_is(name):
    assert MUTANTS[name].code() != MUTANTS[name].function.__code__


@pytest.mark.parametrize("test", {test for name in BY_TESTS for test in MUTANTS[name].tests})
def test_what_catches_a_mutant_finds_nothing_without_it(test):
    assert not complaint(test)


@pytest.mark.parametrize("name", BY_TESTS)
def test_a_rule_left_out_fails_its_test(name):
    assert hunt(MUTANTS[name], 0, 0) is not None


@pytest.mark.simulation
@pytest.mark.parametrize("name", QUICKLY)
def test_a_rule_left_out_is_noticed_by_a_seed(name):
    assert hunt(MUTANTS[name], 0, ENOUGH_SEEDS) is not None


def test_a_mutant_is_gone_when_its_block_ends():
    for mutant in MUTANTS.values():
        before = mutant.function.__code__
        with mutant.planted():
            assert mutant.function.__code__ is not before
        assert mutant.function.__code__ is before
