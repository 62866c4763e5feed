"""`penstock chaos`: its exit statuses, `shrink` and `matrix` over runs of paper, and `sim`."""

from __future__ import annotations

import json
import shlex
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from penstock.chaos.errors import ClusterError, NotHereError
from penstock.chaos.judging import Judgement, write_judgement
from penstock.chaos.live import Gauge, Status
from penstock.chaos.nemeses import Fault, ScheduledFault
from penstock.chaos.run_plan import RunPlan
from penstock.chaos.runner import Outcome
from penstock.chaos.schedule import read_schedule, write_schedule
from penstock.chaos.simulator.named_workloads import WITHOUT
from penstock.chaos.simulator.named_workloads import WORKLOADS as SIMULATED
from penstock.chaos.simulator.simulation import Report, Simulation
from penstock.chaos.verdict import Anomaly, Valid, Verdict
from penstock.chaos.workloads.registry import WORKLOADS
from penstock.cli.app import app
from penstock.cli.chaos import commands, matrix, shrink
from penstock.cli.chaos.carry_out import as_scheduled
from penstock.cli.chaos.progress import Shown, describe
from penstock.cli.chaos.sim import _Runs

PLAN = RunPlan("append", "kill", 3, 10, 7, 100, 5)
Ending = Callable[[RunPlan, Sequence[ScheduledFault] | None], Judgement]


def verdict(valid: Valid, checker: str = "lost-write") -> Verdict:
    if valid is Valid.FALSE:
        return Verdict(checker, valid, 5, 1, [Anomaly("record 3 is gone")])
    return Verdict(checker, valid, 5, reason="who knows" if valid is Valid.UNKNOWN else "")


def faults(*times_ms: int) -> list[ScheduledFault]:
    return [ScheduledFault(at_ms, 10, Fault("kill", "kill", "random")) for at_ms in times_ms]


def stage(monkeypatch: pytest.MonkeyPatch, ending: Ending, *, interrupted: bool = False) -> None:
    """Have runs end so, without a cluster."""

    def carry_out(
        plan: RunPlan,
        directory: Path,
        *,
        faults: Sequence[ScheduledFault] | None = None,
        **_: Any,
    ) -> tuple[Outcome, Path]:
        judgement = ending(plan, faults)
        return Outcome(directory, judgement, interrupted), directory / "report.html"

    for module in (commands, shrink, matrix):
        monkeypatch.setattr(module, "carry_out", carry_out)


def chaos(*arguments: str | Path) -> Any:
    return CliRunner().invoke(app, ["chaos", *map(str, arguments)])


@pytest.mark.parametrize(
    ("valid", "interrupted", "status"),
    [
        (Valid.TRUE, False, 0),
        (Valid.FALSE, False, 1),
        (Valid.UNKNOWN, False, 3),
        (Valid.TRUE, True, 130),
        (Valid.UNKNOWN, True, 130),
        (Valid.FALSE, True, 1),
    ],
)
def test_the_verdict_is_the_exit_status(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, valid: Valid, interrupted: bool, status: int
) -> None:
    stage(monkeypatch, lambda *_: Judgement([verdict(valid)]), interrupted=interrupted)
    done = chaos("run", "--seed", "7", "--out", tmp_path / "run")
    assert done.exit_code == status
    assert f"verdict: {valid.value}" in done.stdout
    assert "report.html" in done.stdout
    assert ("lost-write: record 3 is gone" in done.stdout) == (valid is Valid.FALSE)


def test_what_a_verdict_stands_on_is_told_before_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    figures = {
        "faults": {"planned": 14, "held": 2, "failed": 0},
        "interrupted_after_s": 12.5,
        "not_judged": {"leaks": "it was too short"},
    }
    lost = Verdict("lost-write", Valid.FALSE, 5, 16, [Anomaly("record 3 is gone")] * 5)
    stage(monkeypatch, lambda *_: Judgement([lost], figures))
    done = chaos("run", "--out", tmp_path / "run")
    *_, third, more, ended, held, told, _ = done.stdout.splitlines()
    assert third == "lost-write: record 3 is gone"
    assert more == "lost-write: and 13 more, of which the report shows some"
    assert (ended, held) == ("ended by Ctrl-C after 12.5 s of load", "faults: 2 of 14")
    assert told == "verdict: false"
    assert "leaks not judged - - it was too short" in " ".join(done.stdout.split())
    stage(monkeypatch, lambda *_: Judgement([lost], {"faults": {"planned": 0, "held": 0}}))
    assert "faults: none were planned\nverdict:" in chaos("run", "--out", tmp_path / "b").stdout


def test_a_cluster_that_does_not_start_leaves_the_verdict_unknown(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(*_: Any) -> Judgement:
        raise ClusterError("the ports are taken; next: take others")

    stage(monkeypatch, fail)
    done = chaos("run", "--out", tmp_path / "run")
    assert done.exit_code == 3
    assert done.stderr.endswith("error: the ports are taken\nnext: take others\n")


def test_a_directory_that_has_something_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "diary.txt").write_text("dear diary", encoding="utf-8")
    done = chaos("run", "--out", tmp_path)
    assert done.exit_code == 2
    assert "it is not empty" in done.stderr


def test_a_status_is_one_line() -> None:
    fault = Fault("pause", "pause", "a leader")
    status = Status("load", 12.34, 60, 99, 1234.5, 10, 1, 2, 7.4, 31.6, fault, 3, 0)
    assert describe(status) == (
        " 12.3 of 60 s     1,234 records/s  p50 7 ms, p99 32 ms  failed 1, ambiguous 2  "
        "anomalies 0  [pause at a leader]"
    )
    kill = Fault("kill", "kill", "all")
    assert describe(status, [kill, fault]).endswith(
        "[pause at a leader; since the last line kill at all]"
    )
    assert describe(replace(status, fault=None), [fault]).endswith(
        "[no fault; since the last line pause at a leader]"
    )


def test_a_fault_between_two_lines_is_named_by_the_second(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: False, raising=False)
    gauge, shown = Gauge(60), Shown()
    shown.status(gauge.look("load", 0.0))
    gauge.fault(Fault("kill", "kill", "all"))
    gauge.fault(None)
    for elapsed_s in (1.0, 5.0, 10.0):
        shown.status(gauge.look("load", elapsed_s))
    lines = capsys.readouterr().err.splitlines()
    assert [line.count("kill at all") for line in lines] == [0, 1, 0]


@pytest.mark.parametrize(
    ("nemesis", "what"),
    [
        ("", "names none"),
        (",", "names none"),
        ("kill,none", "none breaks nothing, and is beside nothing"),
        ("kil", "there is no nemesis 'kil' (did you mean kill?)"),
    ],
)
def test_a_nemesis_that_is_none_is_refused(tmp_path: Path, nemesis: str, what: str) -> None:
    done = chaos("run", "--nemesis", nemesis, "--out", tmp_path / "run")
    assert done.exit_code == 2
    assert what in " ".join(done.stderr.replace("│", " ").split())
    assert not (tmp_path / "run").exists()


def plans_of(
    monkeypatch: pytest.MonkeyPatch, *arguments: str | Path
) -> tuple[RunPlan, Sequence[ScheduledFault] | None, Any]:
    """What a command line asks for."""
    asked: list[tuple[RunPlan, Sequence[ScheduledFault] | None]] = []

    def ending(plan: RunPlan, scheduled: Sequence[ScheduledFault] | None) -> Judgement:
        asked.append((plan, scheduled))
        return Judgement([verdict(Valid.TRUE)])

    stage(monkeypatch, ending)
    done = chaos(*arguments)
    assert done.exit_code == 0, done.output
    [(plan, scheduled)] = asked
    return plan, scheduled, done


def test_the_command_that_repeats_a_run_asks_for_the_same(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    plan, _, done = plans_of(
        monkeypatch,
        *("run", "--workload", "transfer", "--nemesis", "kill+quiet,netem", "--nodes", "5"),
        *("--duration", "33.5", "--seed", "12", "--rate", "17", "--interval", "4.5"),
        *("--recovery", "90", "--bug", "retries-are-appended-again", "--set", "tellers=2"),
        *("--backend", "docker", "--backend-set", "image=a b", "--out", tmp_path / "once"),
        *("--objective", "window=9000", "--objective", "kill-p99=3000"),
    )
    assert plan.objective == {"window": 9000, "kill-p99": 3000}
    penstock, chaos_, *words = shlex.split(plan.command())
    assert (penstock, chaos_) == ("penstock", "chaos")
    assert plan.command() in done.stderr
    again, _, _ = plans_of(monkeypatch, *words, "--out", tmp_path / "again")
    assert again == plan


def test_a_run_with_a_schedule_is_repeated_with_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write_schedule(faults(100, 200), tmp_path / "some.json")
    out = tmp_path / "run"
    _, scheduled, done = plans_of(
        monkeypatch, "run", "--schedule", tmp_path / "some.json", "--out", out
    )
    assert scheduled == faults(100, 200)
    # The file may be another one by then; what the run keeps is not.
    assert f"--schedule {out / 'schedule.json'}" in done.stderr


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("window=soon", "whole milliseconds"),
        ("window=-1", "whole milliseconds"),
        ("kill-p42=3", "kill-p50, kill-p99, window"),
        ("window", "KEY=VALUE is wanted"),
    ],
)
def test_an_objective_that_is_none_is_refused(tmp_path: Path, text: str, what: str) -> None:
    done = chaos("run", "--objective", text, "--out", tmp_path / "run")
    assert done.exit_code == 2
    assert what in " ".join(done.output.replace("│", " ").split())
    assert not (tmp_path / "run").exists()


# --- shrink


def failed_run(directory: Path, scheduled: list[ScheduledFault]) -> None:
    directory.mkdir(exist_ok=True)
    PLAN.write(directory)
    write_schedule(scheduled, directory / "schedule.json")
    write_judgement(Judgement([verdict(Valid.FALSE), verdict(Valid.TRUE, "reorder")]), directory)


def broken_by(*culprits: int, as_checker: str = "lost-write") -> Ending:
    def ending(_: RunPlan, scheduled: Sequence[ScheduledFault] | None) -> Judgement:
        times = {one.at_ms for one in scheduled or ()}
        broken = set(culprits) <= times
        return Judgement([verdict(Valid.FALSE if broken else Valid.TRUE, as_checker)])

    return ending


def test_shrink_leaves_the_faults_that_it_takes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    failed_run(tmp_path, faults(*range(100, 900, 100)))
    stage(monkeypatch, broken_by(300, 700))
    done = chaos("shrink", tmp_path, "--trials", "100", "--output", "json")
    assert done.exit_code == 0
    told = json.loads(done.stdout)
    assert told["faults"] == 2
    assert read_schedule(tmp_path / "smallest.json") == faults(300, 700)


def test_what_shrink_finds_is_repeated_by_the_command_that_it_prints(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    failed_run(tmp_path / "failed", faults(100, 300))
    bugged = replace(PLAN, bug="retries-are-appended-again", options={"readers": "1"})
    bugged.write(tmp_path / "failed")
    stage(monkeypatch, broken_by(300))
    done = chaos("shrink", tmp_path / "failed")
    [line] = [one for one in done.stdout.splitlines() if one.startswith("repeat: ")]
    _, _, _, *words = shlex.split(line)
    again, scheduled, _ = plans_of(monkeypatch, *words, "--out", tmp_path / "again")
    assert scheduled == faults(300)
    given = replace(again, nemesis=PLAN.nemesis)
    assert given == bugged


def test_faults_of_a_file_are_not_beside_others(tmp_path: Path) -> None:
    path = tmp_path / "some.json"
    write_schedule(faults(100), path)
    done = chaos("run", "--schedule", path, "--nemesis", "kill", "--out", tmp_path / "run")
    assert done.exit_code == 2
    assert "name one of them" in done.stderr


def test_a_run_is_called_by_the_faults_of_its_file_and_warns_of_late_ones(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    strange = ScheduledFault(9_000, 10, Fault("pause", "pause", "random"))
    plan = as_scheduled(PLAN, tmp_path / "some.json", [*faults(100, 200), strange])
    assert plan.nemesis == "kill,pause"
    assert "--nemesis" not in plan.command()
    write_schedule([*faults(100), strange], tmp_path / "some.json")
    run = ("run", "--schedule", tmp_path / "some.json", "--out", tmp_path / "run")
    _, _, done = plans_of(monkeypatch, *run, "--duration", "9")
    assert "warning: 1 of the 2 faults" in done.stderr
    _, _, done = plans_of(monkeypatch, *run, "--duration", "10")
    assert "warning" not in done.stderr


def test_shrink_tries_once_without_any_fault(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tried: list[int] = []

    def ending(plan: RunPlan, scheduled: Sequence[ScheduledFault] | None) -> Judgement:
        tried.append(len(scheduled or ()))
        return broken_by(100)(plan, scheduled)

    failed_run(tmp_path, faults(100, 200))
    stage(monkeypatch, ending)
    assert chaos("shrink", tmp_path, "--repeats", "3").exit_code == 0
    assert tried == [0, 1]


def test_shrink_says_when_the_failure_did_not_come_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    failed_run(tmp_path, faults(100, 200))
    stage(monkeypatch, broken_by(100, as_checker="reorder"))  # Another one than was broken.
    done = chaos("shrink", tmp_path)
    assert done.exit_code == 3
    assert "no trial failed again" in done.stdout
    assert read_schedule(tmp_path / "smallest.json") == faults(100, 200)


def test_shrink_keeps_to_its_trials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    failed_run(tmp_path, faults(*range(100, 900, 100)))
    stage(monkeypatch, broken_by(300, 700))
    done = chaos("shrink", tmp_path, "--trials", "5", "--output", "json")
    assert json.loads(done.stdout)["runs"] == 5


def test_a_run_that_broke_nothing_cannot_be_shrunk(tmp_path: Path) -> None:
    failed_run(tmp_path, faults(100))
    write_judgement(Judgement([verdict(Valid.TRUE)]), tmp_path)
    done = chaos("shrink", tmp_path)
    assert done.exit_code == 2
    assert "there is nothing to shrink" in done.stderr


@pytest.mark.parametrize("command", ["shrink", "report", "check"])
def test_a_directory_without_a_run_is_said_to_be_none(command: str, tmp_path: Path) -> None:
    done = chaos(command, tmp_path)
    assert done.exit_code == 2
    assert "is no plan of a run" in done.stderr


def test_what_is_no_history_is_said_to_be_none(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    path.write_text("good morning\n", encoding="utf-8")
    done = chaos("check", path)
    assert done.exit_code == 3
    assert "line 1 is no event of a history" in done.stderr
    assert chaos("check", tmp_path / "none.jsonl").exit_code == 2


# --- matrix and sim


@pytest.mark.parametrize(
    ("of_kill", "status"), [(Valid.TRUE, 0), (Valid.FALSE, 1), (Valid.UNKNOWN, 3)]
)
def test_the_matrix_is_as_good_as_its_worst_cell(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, of_kill: Valid, status: int
) -> None:
    stage(
        monkeypatch,
        lambda plan, _: Judgement([verdict(of_kill if plan.nemesis == "kill" else Valid.TRUE)]),
    )
    done = chaos(
        *("matrix", "-w", "append", "--nemesis", "pause,kill"),
        *("--out", tmp_path, "--output", "json"),
    )
    assert done.exit_code == status
    cells = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(one["nemesis"], one["verdict"]) for one in cells] == [
        ("pause", "true"),
        ("kill", of_kill.value),
    ]


def test_the_matrix_leaves_out_what_cannot_be_here(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def ending(plan: RunPlan, _: Sequence[ScheduledFault] | None) -> Judgement:
        if plan.nemesis == "power":
            raise NotHereError("the nemesis power needs disks, which are not had here")
        return Judgement([verdict(Valid.TRUE)])

    stage(monkeypatch, ending)
    done = chaos("matrix", "--out", tmp_path, "--output", "json")
    assert done.exit_code == 0
    cells = {one["nemesis"]: one for one in map(json.loads, done.stdout.splitlines())}
    assert cells["power"]["verdict"] == "left out"
    assert "needs disks" in cells["power"]["what"]
    assert cells["kill"]["verdict"] == "true"
    # Who names it wants it.
    assert chaos("matrix", "--nemesis", "kill,power", "--out", tmp_path).exit_code == 3


def test_the_matrix_goes_on_after_a_cell_that_never_ran(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def ending(plan: RunPlan, _: Sequence[ScheduledFault] | None) -> Judgement:
        if plan.nemesis == "kill":
            raise ClusterError("the ports are taken")
        return Judgement([verdict(Valid.TRUE)])

    stage(monkeypatch, ending)
    done = chaos("matrix", "-w", "append", "--nemesis", "kill,pause", "--out", tmp_path)
    assert done.exit_code == 3
    assert "the ports are taken" in done.stdout
    assert "append     pause     true" in done.stdout


@pytest.mark.parametrize("workload", SIMULATED)
def test_sim_has_a_workload_and_judges_what_it_is_about(workload: str) -> None:
    reports = [_Runs(workload, "", None, None).run(seed) for seed in (1, 4)]
    assert [(one.violation, one.judged) for one in reports] == [(None, Valid.TRUE)] * 2
    looked_at = {one.checker for report in reports for one in report.verdicts if one.looked_at}
    about = {
        "append": {"lost-write", "duplicate", "reorder", "skipped-poll", "acks-levels"},
        "churn": {"lost-write", "duplicate", "phantom"},
        "retention": {"lost-write", "poll-order"},
        "transfer": {"transfer-total", "processed-once", "transaction-offsets", "aborted-read"},
        "process": {"processed-once", "transaction-offsets", "aborted-read"},
        "group": {"group-exclusive", "zombie-commit", "processed-once"},
    }
    assert looked_at >= about[workload]
    kinds = Counter(fault.kind for report in reports for fault in report.faults)
    assert all(kinds[kind] for kind in SIMULATED[workload].often)
    assert ("transfer-total" in looked_at) == (workload == "transfer")


def test_sim_says_of_each_workload_of_runs_whether_it_has_it_or_why_not() -> None:
    assert SIMULATED.keys() | WITHOUT.keys() == WORKLOADS.keys()
    assert not SIMULATED.keys() & WITHOUT.keys()
    for name, why in WITHOUT.items():
        done = chaos("sim", "--workload", name)
        assert done.exit_code == 2
        assert why.split(",")[0][:20] in " ".join(done.output.replace("│", " ").split())


def test_sim_finds_a_bug_that_is_put_into_the_cores() -> None:
    done = chaos("sim", "--first", "1", "--seeds", "1", "--output", "json")
    summary = json.loads(done.stdout)
    assert (done.exit_code, summary["broken"], summary["verdicts"]) == (0, [], {"true": 1})
    bug = ("--bug", "any-replica-is-elected")
    bugged = chaos("sim", "--seeds", "4", *bug, "--no-shrink", "--output", "json")
    assert bugged.exit_code == 1
    *seeds, summary = map(json.loads, bugged.stdout.splitlines())
    assert [one["seed"] for one in seeds] == summary["broken"]
    assert all(one["violation"] for one in seeds)


def test_sim_says_why_a_seed_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    told = {
        1: [verdict(Valid.UNKNOWN), verdict(Valid.TRUE, "reorder")],
        2: [],
        3: [verdict(Valid.TRUE)],
    }

    plan = Simulation(1).plan

    def run(_: _Runs, seed: int) -> Report:
        return Report(seed, plan, [], verdicts=told[seed])

    monkeypatch.setattr(_Runs, "run", run)
    done = chaos("sim", "--first", "1", "--seeds", "2")
    assert done.exit_code == 3
    assert "seed 1 is unknown: lost-write: who knows" in done.stderr
    assert "seed 2 is unknown: nothing was left" in done.stderr
    done = chaos("sim", "--first", "1", "--seeds", "3", "--output", "json")
    assert done.exit_code == 0
    assert json.loads(done.stdout)["unknown"].keys() == {"1", "2"}


def test_what_sim_finds_is_repeated_by_the_command_that_it_prints() -> None:
    # It takes no fault: the first run with fewer shows it.
    done = chaos("sim", "--seeds", "1", "--bug", "retries-are-appended-again", "--output", "json")
    found = json.loads(done.stdout.splitlines()[0])
    assert (done.exit_code, found["faults"]) == (1, [])
    assert found["verdicts"]["duplicate"] == "false"
    penstock, chaos_, *arguments = found["repeat"].split()
    assert (penstock, chaos_) == ("penstock", "chaos")
    again = chaos(*arguments, "--no-shrink")
    assert again.exit_code == 1
    assert found["violation"] in again.stdout
    assert "duplicate (" in again.stdout
    assert found["repeat"] in again.stdout


@pytest.mark.parametrize(
    "wrong", [("--workload", "none"), ("--bug", "none"), ("--faults", "x"), ("--faults", "9999")]
)
def test_sim_says_what_it_does_not_know(wrong: tuple[str, str]) -> None:
    done = chaos("sim", "--seeds", "1", *wrong)
    assert done.exit_code == 2
    assert wrong[1] in done.output
