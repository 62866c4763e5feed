"""What is said of a run's directory from which something is missing."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.chaos import completeness
from penstock.chaos.judging import Judgement, read_judgement, write_judgement
from penstock.chaos.run_plan import RunPlan
from penstock.chaos.stored_run import judge_again, read_run
from penstock.chaos.verdict import Valid, Verdict
from tests.unit.chaos.test_registers import Registers


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    """The directory of a run of registers that is true."""
    script = Registers()
    for number in range(9):
        script.write(number)
        script.read(number)
    script.read(8, final=True)
    RunPlan("register", "", 3, 10, 7, 100, 5).write(tmp_path)
    path = tmp_path / "history.jsonl"
    script.history.write(path)
    figures = {completeness.FIGURE: completeness.seal(path, script.history)}
    write_judgement(Judgement([Verdict("recovery", Valid.TRUE, 1)], figures), tmp_path)
    assert judge_again(read_run(tmp_path)).valid is Valid.TRUE
    return tmp_path


@pytest.mark.parametrize("left", [slice(26), slice(37)], ids=["a third", "an answer"])
def test_a_history_without_its_end_is_not_true(stored: Path, left: slice) -> None:
    path = stored / "history.jsonl"
    whole = path.read_bytes()
    path.write_bytes(b"".join(whole.splitlines(keepends=True)[left]))
    judgement = judge_again(read_run(stored))
    assert judgement.valid is Valid.UNKNOWN
    [told] = [one for one in judgement.verdicts if one.checker == "history"]
    assert "events, and the run wrote 38" in told.reason
    # So it is when it is asked again, and no more once the history is back.
    assert judge_again(read_run(stored)).valid is Valid.UNKNOWN
    path.write_bytes(whole)
    assert judge_again(read_run(stored)).valid is Valid.TRUE


def test_what_is_missing_is_named(stored: Path) -> None:
    before = read_judgement(stored)
    told = {**before.figures, "faults": {"planned": 4, "held": 2, "failed": 0}}
    write_judgement(Judgement(before.verdicts, told), stored)
    missing = judge_again(read_run(stored)).figures["not_judged"]
    assert missing["evidence"].endswith("has no evidence/")
    assert "has no faults.jsonl" in missing["faults"]
    assert missing["crashes"] == "no node's log was gathered"
    assert "history" not in missing
    (stored / "verdict.json").unlink()
    assert "no verdict.json says" in judge_again(read_run(stored)).figures["not_judged"]["history"]


def test_a_history_that_is_another_one_is_not_true(stored: Path) -> None:
    path = stored / "history.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"p":"r"', b'"p":"s"'))
    judgement = judge_again(read_run(stored))
    assert "is not what the run wrote" in read_judgement(stored).verdicts[1].reason
    assert judgement.valid is Valid.UNKNOWN
