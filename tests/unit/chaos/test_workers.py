"""Workers and the runner's side of them, with real processes and clients of paper."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from penstock.chaos.history import FINAL, Event, History, Type, read_history
from penstock.chaos.worker import Tally, WorkerSpec
from penstock.chaos.workers import WorkerError, Workers
from penstock.chaos.workloads import ClientSpec, Plan
from tests.support import wait_until
from tests.unit.chaos.paper_worker import COMMAND, RECORDS

PLAN = Plan(7, 3, 1.0, 100.0, {"kind": ""})


def spec(*processes: str, kind: str = "", is_final: bool = False) -> WorkerSpec:
    clients = [ClientSpec(process, kind, 0, {"n": 1}) for process in processes]
    return WorkerSpec("paper", "127.0.0.1:1", PLAN, clients, "", is_final)


class Crew:
    """Workers, their history, and what they told of themselves."""

    def __init__(self, directory: Path, *specs: WorkerSpec) -> None:
        self.told: list[Mapping[str, Any]] = []
        self.workers = Workers(dict(enumerate(specs)), directory, self.told.append, COMMAND)

    def history(self) -> History:
        return read_history(*self.workers.histories)

    def wait_for_records(self, count: int) -> None:
        wait_until(lambda: len(self.history().events) >= count, f"{count} events are written")


def test_a_spec_travels_as_a_line() -> None:
    one = spec("a", "b", kind="x", is_final=True)
    assert "\n" not in one.line()
    assert WorkerSpec.of(one.line()) == one


def test_clients_run_until_they_are_stopped_and_what_was_under_way_is_ambiguous(
    tmp_path: Path,
) -> None:
    crew = Crew(tmp_path, spec("a", "b"), spec("c"))
    before = time.monotonic_ns()
    epoch_ns = crew.workers.begin()
    assert epoch_ns >= before
    crew.wait_for_records(3 * (2 * RECORDS + 1))
    crew.workers.stop()
    history = crew.history()
    for process in "abc":
        mine = [one for one in history.operations if one.invoked.p == process]
        assert [one.type for one in mine] == [Type.OK] * RECORDS + [Type.INFO]
    assert all(0 <= one.t < time.monotonic_ns() - epoch_ns for one in history.events)
    assert sum(one["records"] for one in crew.told) == 3 * RECORDS
    assert not any(crew.workers[number].alive for number in crew.workers.numbers)


def test_a_worker_that_is_killed_loses_nothing_and_comes_back_as_another(tmp_path: Path) -> None:
    crew = Crew(tmp_path, spec("a"))
    crew.workers.begin()
    crew.wait_for_records(2 * RECORDS + 1)
    crew.workers[0].kill()
    crew.workers.check()  # It was asked to.
    crew.workers.revive(0)
    crew.workers.revive(0)
    crew.wait_for_records(2 * (2 * RECORDS + 1))
    crew.workers.stop()
    assert {one.p for one in crew.history().events} == {"a", "a~2"}


def test_a_worker_can_be_paused_and_is_ended_all_the_same(tmp_path: Path) -> None:
    crew = Crew(tmp_path, spec("a"))
    crew.workers.begin()
    crew.workers[0].pause()
    crew.workers.stop()
    assert not crew.workers[0].alive


def test_final_reads_end_by_themselves_and_are_marked(tmp_path: Path) -> None:
    crew = Crew(tmp_path, spec("a", "b", is_final=True))
    crew.workers.begin(time.monotonic_ns())
    assert crew.workers.wait_finished(60)
    crew.workers.stop()
    assert {one.phase for one in crew.history().events} == {FINAL}


def test_final_reads_that_take_too_long_are_given_up(tmp_path: Path) -> None:
    crew = Crew(tmp_path, spec("a", kind="endless", is_final=True))
    crew.workers.begin()
    assert not crew.workers.wait_finished(0.1)
    crew.workers.stop()


def test_a_client_that_raises_is_a_fault_of_the_harness(tmp_path: Path) -> None:
    crew = Crew(tmp_path, spec("a", kind="broken"))
    crew.workers.begin()
    wait_until(lambda: not crew.workers[0].alive, "the worker ended")
    with pytest.raises(WorkerError, match=r"(?s)clients a ended by itself.*the pen is empty"):
        crew.workers.check()
    with pytest.raises(WorkerError, match="the pen is empty"):
        crew.workers.stop()


def test_a_worker_that_cannot_begin_says_why(tmp_path: Path) -> None:
    unknown = WorkerSpec("no such workload", "", PLAN, [], "")
    with pytest.raises(WorkerError, match="there is no workload 'no such workload'"):
        Crew(tmp_path, unknown).workers.begin()


def test_a_worker_ends_with_its_runner(tmp_path: Path) -> None:
    crew = Crew(tmp_path, spec("a"))
    crew.workers.begin()
    crew.wait_for_records(1)
    crew.workers[0]._orders.close()  # As the kernel does for a runner that is gone.
    wait_until(lambda: not crew.workers[0].alive, "the worker ended")
    crew.workers.stop()


def test_a_tally_counts_records_and_times_what_was_done() -> None:
    tally = Tally()
    asked = {"count": 4}
    runs = [[0, 0, "?damaged:1", 0, 1], [0, 1, "a", 0, 6]]
    for event in (
        Event(1_000_000, "a", Type.INVOKE, "append", asked),
        Event(4_000_000, "a", Type.OK, "append", asked),
        Event(5_000_000, "a", Type.INVOKE, "append", asked),
        Event(6_000_000, "a", Type.FAIL, "append", None, "X: no"),
        Event(5_000_000, "b", Type.INVOKE, "poll", {}),
        Event(9_000_000, "b", Type.OK, "poll", {"runs": runs}),
    ):
        tally.add(event)
    assert tally.take() == {
        "ok": 2,
        "fail": 1,
        "info": 0,
        "records": 11,
        "damaged": 1,
        "latencies_ms": [3.0],
    }
    assert tally.take()["records"] == 0
