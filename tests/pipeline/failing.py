"""The sink with failures at chosen moments, each of which happens once; the rest is as it is.

``option("fail", ...)`` names the moment, ``option("marks", ...)`` a directory where is noted that
it came.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import WriterCommitMessage
from pyspark.sql.types import StructType

from penstock.pipeline.datasource import PenstockDataSource
from penstock.pipeline.sink.plan import SinkPlan
from penstock.pipeline.sink.writers import BatchWriter, StreamWriter

TASK_AFTER_WRITE = "task after write"
WORKER_IN_WRITE = "worker in write"
TWIN = "twin"
AFTER_COMMIT = "after commit"
DRIVER_BEFORE_COMMIT = "driver before commit"
DRIVER_AFTER_COMMIT = "driver after commit"


class Failure:
    """A moment; ``now`` is True the first time that each of ``whom`` comes to it."""

    def __init__(self, options: Mapping[str, str]) -> None:
        self.moment = options["fail"]
        self.marks = Path(options["marks"])
        self.driver = int(options.get("driver", "0"))

    def now(self, moment: str, whom: object = "") -> bool:
        if moment != self.moment:
            return False
        try:
            (self.marks / f"{moment} {whom}".strip()).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def write(self, writer: Any, batches: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        context = TaskContext.get()
        assert context is not None
        task = context.partitionId()
        if self.now(TWIN, task):
            # Another attempt at the same task, such as a speculative one, does all of it too.
            whole = list(batches)
            writer(iter(whole))
            context._taskAttemptId += 1 << 20
            batches = iter(whole)
        found: WriterCommitMessage = writer(self._dying(batches, task))
        if self.now(TASK_AFTER_WRITE, task):
            raise RuntimeError("the task fails when it has written all")
        return found

    def _dying(self, batches: Iterator[pa.RecordBatch], task: int) -> Iterator[pa.RecordBatch]:
        for number, batch in enumerate(batches):
            if number and self.now(WORKER_IN_WRITE, task):
                os.kill(os.getpid(), signal.SIGKILL)
            yield batch

    def before_commit(self) -> None:
        if self.now(DRIVER_BEFORE_COMMIT):
            self._kill_driver()

    def _kill_driver(self) -> None:
        """Python and Java at once. Its workers, in a group of their own, live on for a while."""
        os.killpg(os.getpgid(self.driver), signal.SIGKILL)

    def after_commit(self) -> None:
        if self.now(DRIVER_AFTER_COMMIT):
            self._kill_driver()
        if self.now(AFTER_COMMIT):
            raise RuntimeError("the driver fails when the sink has committed")


class FailingStreamWriter(StreamWriter):
    def __init__(self, plan: SinkPlan, failure: Failure) -> None:
        super().__init__(plan)
        self.failure = failure

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        return self.failure.write(super().write, iterator)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - Spark's.
        self.failure.before_commit()
        super().commit(messages, batchId)
        self.failure.after_commit()


class FailingBatchWriter(BatchWriter):
    def __init__(self, plan: SinkPlan, failure: Failure) -> None:
        super().__init__(plan)
        self.failure = failure

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        return self.failure.write(super().write, iterator)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        self.failure.before_commit()
        super().commit(messages)
        self.failure.after_commit()


class FailingSource(PenstockDataSource):
    """``format("penstock-failing")``."""

    @classmethod
    def name(cls) -> str:
        return "penstock-failing"

    def __init__(self, options: Mapping[str, str]) -> None:
        own = ("fail", "marks", "driver")
        super().__init__({name: value for name, value in options.items() if name not in own})
        self.failure = Failure(options)

    def writer(self, schema: StructType, overwrite: bool) -> BatchWriter:
        return FailingBatchWriter(super().writer(schema, overwrite)._plan, self.failure)

    def streamWriter(self, schema: StructType, overwrite: bool) -> StreamWriter:
        return FailingStreamWriter(super().streamWriter(schema, overwrite)._plan, self.failure)
