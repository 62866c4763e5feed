"""A run that was: what its directory holds, to be judged and reported again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.chaos import completeness
from penstock.chaos.checkers import Checker, Evidence
from penstock.chaos.checkers.registry import CHECKERS, applicable, judge
from penstock.chaos.errors import PlanError
from penstock.chaos.evidence import read_evidence
from penstock.chaos.fault_thread import FaultRecord, read_faults
from penstock.chaos.history import History, read_history
from penstock.chaos.judging import VERDICT_FILE, Judgement, read_judgement, write_judgement
from penstock.chaos.report import write_report
from penstock.chaos.run_plan import PLAN_FILE, RunPlan, read_plan
from penstock.chaos.runner import (
    EVIDENCE_DIRECTORY,
    FAULTS_FILE,
    HISTORY_FILE,
    checkers_of,
    conclude,
)


@dataclass(frozen=True, slots=True)
class StoredRun:
    """Everything that a run left."""

    directory: Path
    plan: RunPlan
    history: History
    evidence: Evidence
    faults: Sequence[FaultRecord]

    def checkers(self) -> list[Checker]:
        """All that judge it."""
        return checkers_of(self.plan, self.evidence)


def read_run(directory: Path) -> StoredRun:
    """The run of a directory. Raises PlanError, HistoryError, EvidenceError."""
    history = directory / HISTORY_FILE
    if history.exists() and not (directory / PLAN_FILE).exists():
        raise PlanError(
            f"{directory} has a history and no {PLAN_FILE} that says of what run; next: "
            f"`penstock chaos check {history}` judges the history alone"
        )
    plan = read_plan(directory)
    if not history.exists():
        raise PlanError(
            f"{directory} has no {HISTORY_FILE}: its run never came to its end; next: name the "
            "directory of another run"
        )
    faults = read_faults(directory / FAULTS_FILE)
    held = [found for one in faults if (found := one.evidence()) is not None]
    evidence = read_evidence(directory / EVIDENCE_DIRECTORY, held)
    return StoredRun(directory, plan, read_history(history), evidence, faults)


def judge_again(run: StoredRun) -> Judgement:
    """What the checkers of today say of it; kept in its directory.

    What the runner itself found, such as a cluster that did not recover, is taken over. Of a
    history that is not the one that the run wrote nothing is said for certain.
    """
    judges = {*CHECKERS, completeness.CHECKER}
    before = Judgement([])
    if (run.directory / VERDICT_FILE).exists():
        before = read_judgement(run.directory)
    own = [one for one in before.verdicts if one.checker not in judges]
    sealed = before.figures.get(completeness.FIGURE)
    if sealed is not None:
        own += completeness.doubts(run.directory / HISTORY_FILE, run.history, sealed)
    judgement = conclude(run.plan, run.history, run.evidence, own, before.figures)
    judgement = _with_missing(judgement, run)
    write_judgement(judgement, run.directory)
    return judgement


def _with_missing(judgement: Judgement, run: StoredRun) -> Judgement:
    """Beside what is not judged, the files without which it cannot be."""
    missing = dict(judgement.figures["not_judged"])
    if not (run.directory / EVIDENCE_DIRECTORY).exists():
        missing[EVIDENCE_DIRECTORY] = f"{run.directory} has no {EVIDENCE_DIRECTORY}/"
    planned = (judgement.figures.get("faults") or {}).get("held", 0)
    if planned and not run.faults:
        missing["faults"] = f"{run.directory} has no {FAULTS_FILE}: faults are taken for none"
    if completeness.FIGURE not in judgement.figures:
        missing[completeness.CHECKER] = f"no {VERDICT_FILE} says how many events the run wrote"
    return Judgement(judgement.verdicts, {**judgement.figures, "not_judged": missing})


def judge_history(path: Path) -> Judgement:
    """What all checkers that it is about say of a history alone. Raises HistoryError."""
    history, evidence = read_history(path), Evidence()
    return Judgement(judge(applicable(history, evidence), history, evidence))


def report_stored(directory: Path) -> Path:
    """Write the report of a run by what its directory holds; where it is. Raises PlanError."""
    run = read_run(directory)
    return write_report(
        directory,
        plan=run.plan,
        history=run.history,
        evidence=run.evidence,
        faults=run.faults,
        judgement=read_judgement(directory),
        checkers=run.checkers(),
    )
