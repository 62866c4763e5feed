"""What ``make sim`` and ``make sim-mutants`` print, and how they end."""

from __future__ import annotations

import pytest

from penstock.chaos.simulator.bugs import BUGS
from tests.simulation.__main__ import SIMULATORS, main


@pytest.mark.simulation
def test_seeds_of_all_simulators_are_run_and_added_up(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seeds", "2", "--start", "3"]) == 0
    output = capsys.readouterr().out
    assert output.count("no promise was broken") == 4
    names = ("cluster:", "transactions:", "quiet:", "quorum:")
    assert sorted(names, key=output.index) == list(names)
    for figure, simulators in (("records committed", 3), ("transactions committed", 1)):
        lines = [line for line in output.splitlines() if figure in line]
        assert len(lines) == simulators
        assert all(int(line.split()[-1].replace(",", "")) > 0 for line in lines)
    speeds = [line for line in output.splitlines() if "virtual seconds a CPU second" in line]
    assert len(speeds) == 4
    assert all(float(line.split()[-1].replace(",", "")) > 0 for line in speeds)


@pytest.mark.simulation
def test_a_broken_promise_is_told_with_its_seed(capsys: pytest.CaptureFixture[str]) -> None:
    with BUGS["hw-ignores-a-member"].planted():
        assert main(["--sim", "cluster", "--seeds", "1", "--start", "4"]) == 1
    output = capsys.readouterr().out
    assert "python -m penstock.chaos.simulator --seed 4" in output
    assert "broken: [4]" in output


@pytest.mark.simulation
def test_mutants_of_all_are_told_with_the_seeds_they_took(
    capsys: pytest.CaptureFixture[str],
) -> None:
    names = ("acks-before-flush", "appends always cut", "marks-are-forgotten")
    chosen = [word for name in names for word in ("--only", name)]
    assert main(["--mutants", "--seeds", "20", *chosen]) == 0
    output = capsys.readouterr().out
    assert output.count("1 of 1 mutants caught") == 3
    assert "NOT CAUGHT" not in output


def test_no_mutant_of_one_has_the_name_of_another() -> None:
    names = [name for simulator in SIMULATORS.values() for name in simulator.mutants]
    assert len(names) == len(set(names))


def test_a_mutant_that_nobody_knows_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--mutants", "--only", "nothing"])
    assert "no such mutants: nothing" in capsys.readouterr().err
