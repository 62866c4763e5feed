"""What the sink writes through failures at every moment: nothing lost, nothing twice.

The same failures with ``delivery=at-least-once`` show that they do what is said of them.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from tests.pipeline import failing
from tests.pipeline.logs import repeated
from tests.pipeline.pipe import ROWS, Pipe

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

pytestmark = [pytest.mark.integration, pytest.mark.timeout(400)]


@pytest.mark.usefixtures("small_batches")
@pytest.mark.parametrize(
    "moment", [failing.TASK_AFTER_WRITE, failing.WORKER_IN_WRITE, failing.TWIN]
)
def test_tasks_that_fail_or_run_twice(pipe: Pipe, moment: str) -> None:
    pipe.feed(2)
    pipe.run_well(pipe.to_sink("penstock-failing", pipe.failing(moment)))
    assert pipe.failed == [f"{moment} 0", f"{moment} 1"]
    assert pipe.read() == pipe.wanted


@pytest.mark.usefixtures("small_batches")
def test_all_workers_are_killed_at_once(pipe: Pipe) -> None:
    pipe.feed(2)
    moment = failing.ALL_WORKERS_IN_WRITE
    pipe.run_well(pipe.to_sink("penstock-failing", pipe.failing(moment)))
    assert pipe.failed == [moment]
    assert pipe.read() == pipe.wanted


def test_at_least_once_shows_what_such_a_task_does(pipe: Pipe) -> None:
    pipe.feed(2)
    options = pipe.failing(failing.TASK_AFTER_WRITE, delivery="at-least-once")
    pipe.run_well(pipe.to_sink("penstock-failing", options))
    found = pipe.read()
    assert sorted(set(found)) == pipe.wanted
    # All that two tasks had written before they failed.
    assert len(found) == len(pipe.wanted) + ROWS


@pytest.mark.parametrize("delivery", ["exactly-once", "at-least-once"])
def test_a_crash_between_the_sinks_commit_and_sparks(pipe: Pipe, delivery: str) -> None:
    pipe.feed(2)
    options = pipe.failing(failing.AFTER_COMMIT, delivery=delivery)
    pipe.fail(pipe.to_sink("penstock-failing", options), "when the sink has committed")
    pipe.feed(1)
    pipe.run_well(pipe.to_sink("penstock", pipe.options(delivery=delivery)))
    found = pipe.read()
    assert sorted(set(found)) == pipe.wanted
    assert len(repeated(found)) == (0 if delivery == "exactly-once" else ROWS)


def test_a_shuffled_foreach_batch_that_is_repeated(pipe: Pipe) -> None:
    pipe.feed(3)

    def written(rows: DataFrame, _batch: int) -> None:
        shuffled = rows.repartition(3, "value").sortWithinPartitions("value")
        shuffled.write.format("penstock").mode("append").options(**pipe.options()).save()

    def crashing(rows: DataFrame, batch: int) -> None:
        rows.write.format("penstock").mode("append").options(**pipe.options()).save()
        if batch == 1:
            raise RuntimeError("the driver fails behind the write")

    pipe.fail(pipe.for_each(crashing), "fails behind the write")
    pipe.run_well(pipe.for_each(written))
    assert pipe.read() == pipe.wanted


@pytest.mark.usefixtures("small_batches")
@pytest.mark.parametrize(
    ("moment", "delivery"),
    [
        (failing.TASK_AFTER_WRITE, "exactly-once"),
        (failing.WORKER_IN_WRITE, "exactly-once"),
        (failing.SHUFFLE_LOST, "exactly-once"),
        (failing.TASK_AFTER_WRITE, "at-least-once"),
    ],
)
def test_tasks_of_a_shuffled_foreach_batch_that_fail(
    pipe: Pipe, moment: str, delivery: str
) -> None:
    pipe.feed(2)
    local = pipe.spark.conf.get("spark.local.dir") or ""
    options = pipe.failing(moment, delivery=delivery, shuffles=local)

    def write(rows: DataFrame, _batch: int) -> None:
        shuffled = rows.repartition(3, "value")
        shuffled.write.format("penstock-failing").mode("append").options(**options).save()

    pipe.run_well(pipe.for_each(write))
    if moment == failing.SHUFFLE_LOST:
        tracker = pipe.spark.sparkContext.statusTracker()
        for mark in pipe.failed:
            stage = tracker.getStageInfo(int(mark.removeprefix(moment)))
            assert stage is not None
            assert stage.currentAttemptId > 0, "the stage was to be run again, not the task alone"
        assert len(pipe.failed) == pipe.files
    else:
        assert pipe.failed == [f"{moment} {task}" for task in range(3)]
    found = pipe.read()
    assert sorted(set(found)) == pipe.wanted
    assert len(found) - len(pipe.wanted) == (0 if delivery == "exactly-once" else ROWS)


def twice(pipe: Pipe, *sink_ids: str, crash: bool = False) -> Callable[[DataFrame, int], None]:
    """A foreachBatch that writes each row as it is, and with a star."""

    def write(rows: DataFrame, _batch: int) -> None:
        for number, sink_id in enumerate(sink_ids):
            if number and crash:
                raise RuntimeError("the driver fails between the writes")
            marked = rows.selectExpr(f"value || '{'*' * number}' AS value")
            more = {"sinkId": sink_id} if sink_id else {}
            options = pipe.options(**more)
            marked.write.format("penstock").mode("append").options(**options).save()

    return write


def test_two_writes_of_a_batch_with_sink_ids_of_their_own(pipe: Pipe) -> None:
    pipe.feed(1)
    pipe.fail(pipe.for_each(twice(pipe, "", "stars", crash=True)), "between the writes")
    pipe.run_well(pipe.for_each(twice(pipe, "", "stars")))
    pipe.feed(1)
    pipe.run_well(pipe.for_each(twice(pipe, "", "stars")))
    assert pipe.read() == sorted([*pipe.wanted, *(f"{value}*" for value in pipe.wanted)])


@pytest.mark.parametrize("crash", [False, True])
def test_two_writes_of_a_batch_that_share_a_sink_id_are_an_error(pipe: Pipe, crash: bool) -> None:
    pipe.feed(1)
    if crash:
        # From the restart on both of them look like a repetition.
        pipe.fail(pipe.for_each(twice(pipe, "", "", crash=True)), "between the writes")
    for _ in range(2):
        said = pipe.fail(pipe.for_each(twice(pipe, "", "")), "SharedSinkIdError")
        assert "give this one its own option sinkId" in said
    assert pipe.read() == pipe.wanted
    # What the message says to do mends it.
    pipe.run_well(pipe.for_each(twice(pipe, "", "stars")))
    assert pipe.read() == sorted([*pipe.wanted, *(f"{value}*" for value in pipe.wanted)])


def test_two_writes_that_share_a_sink_id_are_an_error_also_where_the_first_has_no_rows(
    pipe: Pipe,
) -> None:
    pipe.feed(1)

    def write(rows: DataFrame, _batch: int) -> None:
        for which in ("false", "true"):
            some = rows.where(which).write.format("penstock").mode("append")
            some.options(**pipe.options()).save()

    pipe.fail(pipe.for_each(write), "SharedSinkIdError")
    assert pipe.read() == []


def restored(pipe: Pipe, *, batches: int) -> None:
    """The query's checkpoint is a copy from so many batches before the last one."""
    pipe.feed(2)
    pipe.run_well(pipe.to_sink("penstock", pipe.options()))
    old = pipe.directory / "old"
    shutil.copytree(pipe.checkpoint, old)
    pipe.feed(batches)
    pipe.run_well(pipe.to_sink("penstock", pipe.options()))
    shutil.rmtree(pipe.checkpoint)
    shutil.copytree(old, pipe.checkpoint)


def test_a_checkpoint_that_is_older_than_what_was_written_is_refused(pipe: Pipe) -> None:
    restored(pipe, batches=2)
    said = pipe.fail(pipe.to_sink("penstock", pipe.options()), "StaleCheckpointError")
    assert "start from the newest checkpoint" in said
    assert pipe.read() == pipe.wanted


def test_a_checkpoint_from_just_before_the_last_batch_is_refused(pipe: Pipe) -> None:
    # Spark plans that batch anew, with what has come since: to take it for the repetition of the
    # one that is committed would lose that.
    restored(pipe, batches=1)
    written = pipe.wanted
    pipe.feed(1)
    said = pipe.fail(pipe.to_sink("penstock", pipe.options()), "StaleCheckpointError")
    assert f"is committed, with {ROWS} rows, and what comes under its number now" in said
    assert pipe.read() == written
    # Who sets it knows that nothing is missing; here it is, which so is known to be an option.
    pipe.run_well(pipe.to_sink("penstock", pipe.options(replay="trusted")))


@pytest.mark.parametrize("knows", [True, False], ids=["plans", "rows"])
def test_the_same_within_foreach_batch(pipe: Pipe, knows: bool) -> None:
    # Without its checkpoint the write knows a batch by the number of its rows.
    options = pipe.options(**({"checkpointLocation": str(pipe.checkpoint)} if knows else {}))
    extra = 0 if knows else 7

    def write(rows: DataFrame, batch_id: int) -> None:
        if batch_id == 1 and more:
            rows = rows.union(rows.limit(extra))
        rows.write.format("penstock").mode("append").options(**options).save()

    more = False
    pipe.feed(1)
    pipe.run_well(pipe.for_each(write))
    old = pipe.directory / "old"
    shutil.copytree(pipe.checkpoint, old)
    pipe.feed(1)
    pipe.run_well(pipe.for_each(write))
    written = pipe.wanted
    shutil.rmtree(pipe.checkpoint)
    shutil.copytree(old, pipe.checkpoint)
    more = True
    pipe.fail(pipe.for_each(write), "StaleCheckpointError")
    assert pipe.read() == written
