"""The sink with failures at chosen moments, each of which happens once; the rest is as it is.

``option("fail", ...)`` names the moment, ``option("marks", ...)`` a directory where is noted that
it came. With ``option("schedule", ...)`` in its place, a JSON list of moments, the batch of each
number stops at its moment until it is told by ``order_death`` which process is to be killed there.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import grpc
import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import WriterCommitMessage
from pyspark.sql.types import StructType

from penstock.pipeline.datasource import PenstockDataSource
from penstock.pipeline.sink.plan import SinkPlan
from penstock.pipeline.sink.writers import BatchWriter, StreamWriter
from penstock.v1 import transactions_pb2_grpc
from tests.support import wait_until

TASK_AFTER_WRITE = "task after write"
WORKER_IN_WRITE = "worker in write"
ALL_WORKERS_IN_WRITE = "all workers in write"
SHUFFLE_LOST = "shuffle lost"
TWIN = "twin"
AFTER_COMMIT = "after commit"
DRIVER_BEFORE_COMMIT = "driver before commit"
DRIVER_AFTER_COMMIT = "driver after commit"

_BATCH = "streaming.sql.batchId"

# For schedules.
IN_WRITE = "in write"
BEFORE_COMMIT = "before commit"
ANSWER_LOST = "answer lost"
COMMITTED = "committed"

_ORDER_TIMEOUT_S = 120.0


def scheduled(marks: Path, batch: int) -> Path:
    """What is there once a batch has come to its moment."""
    return marks / f"at {batch}"


def order_death(marks: Path, batch: int, process_id: int) -> None:
    """Have this process killed, and the batch go on."""
    order = marks / f"order {batch}"
    order.with_suffix(".part").write_text(str(process_id))
    order.with_suffix(".part").rename(order)


class Failure:
    """A moment; ``now`` is True the first time that each of ``whom`` comes to it."""

    def __init__(self, options: Mapping[str, str]) -> None:
        self.moment = options.get("fail", "")
        self.marks = Path(options["marks"])
        self.driver = int(options.get("driver", "0"))
        self.shuffles = Path(options.get("shuffles", ""))
        self.schedule: list[str] = json.loads(options.get("schedule", "[]"))

    def now(self, moment: str, whom: object = "") -> bool:
        return moment == self.moment and self._is_first(f"{moment} {whom}".strip())

    def _is_first(self, mark: str) -> bool:
        try:
            (self.marks / mark).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def victim(self, moment: str, batch: int) -> int | None:
        """Who is to be killed at this moment of this batch, by the test's order."""
        if batch >= len(self.schedule) or self.schedule[batch] != moment:
            return None
        if not self._is_first(scheduled(self.marks, batch).name):
            return None
        order = self.marks / f"order {batch}"
        wait_until(order.exists, f"the test says who is to die {moment}", _ORDER_TIMEOUT_S)
        return int(order.read_text())

    def kill_at(self, moment: str, batch: int) -> None:
        victim = self.victim(moment, batch)
        if victim is not None:
            os.kill(victim, signal.SIGKILL)

    def write(self, writer: Any, batches: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        context = TaskContext.get()
        assert context is not None
        task = context.partitionId()
        batches = self._dying(batches, task, int(context.getLocalProperty(_BATCH) or 0))
        if self.now(TWIN, task):
            # Another attempt at the same task, such as a speculative one, does all of it too.
            whole = list(batches)
            writer(iter(whole))
            context._taskAttemptId += 1 << 20
            batches = iter(whole)
        found: WriterCommitMessage = writer(batches)
        if self.now(TASK_AFTER_WRITE, task):
            raise RuntimeError("the task fails when it has written all")
        if task == 0 and self.now(SHUFFLE_LOST, context.stageId()):
            # The next attempt finds nothing to read, and the stage before has to be run again.
            for file in self.shuffles.glob("blockmgr-*/*/shuffle_*"):
                file.unlink()
            raise RuntimeError("the task fails, and what it has read is gone")
        return found

    def _dying(
        self, batches: Iterator[pa.RecordBatch], task: int, micro_batch: int
    ) -> Iterator[pa.RecordBatch]:
        for number, batch in enumerate(batches):
            if number and self.now(WORKER_IN_WRITE, task):
                os.kill(os.getpid(), signal.SIGKILL)
            if number and self.now(ALL_WORKERS_IN_WRITE):
                # The process that forks workers leads their group.
                assert os.getpgrp() == os.getppid()
                os.killpg(os.getpgrp(), signal.SIGKILL)
            if number:
                self.kill_at(IN_WRITE, micro_batch)
            yield batch

    def commit(self, commit: Callable[[], None], batch: int) -> None:
        """The driver's part, with what goes wrong around it."""
        if self.now(DRIVER_BEFORE_COMMIT):
            self._kill_driver()
        self.kill_at(BEFORE_COMMIT, batch)
        victim = self.victim(ANSWER_LOST, batch)
        with contextlib.nullcontext() if victim is None else dead_once_it_has_committed(victim):
            commit()
        self.kill_at(COMMITTED, batch)
        if self.now(DRIVER_AFTER_COMMIT):
            self._kill_driver()
        if self.now(AFTER_COMMIT):
            raise RuntimeError("the driver fails when the sink has committed")

    def _kill_driver(self) -> None:
        """Python and Java at once. Its workers, in a group of their own, live on for a while."""
        os.killpg(os.getpgid(self.driver), signal.SIGKILL)


@contextlib.contextmanager
def dead_once_it_has_committed(victim: int) -> Iterator[None]:
    """The commit is decided, and a process killed before anybody hears of it."""
    plain = transactions_pb2_grpc.TransactionsStub

    class Killing(plain):  # type: ignore[misc, valid-type]
        def __init__(self, channel: Any) -> None:
            super().__init__(channel)
            commit_group = self.CommitGroup

            async def answer_lost(request: Any, **more: Any) -> Any:
                answer = await commit_group(request, **more)
                if lost or answer.HasField("error"):
                    return answer
                lost.append(True)
                with contextlib.suppress(ProcessLookupError):  # It was the one before this.
                    os.kill(victim, signal.SIGKILL)
                raise grpc.aio.AioRpcError(  # type: ignore[call-arg]  # The stubs want more.
                    grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata()
                )

            self.CommitGroup = answer_lost

    lost: list[bool] = []
    transactions_pb2_grpc.TransactionsStub = Killing  # type: ignore[misc]
    try:
        yield
        assert lost
    finally:
        transactions_pb2_grpc.TransactionsStub = plain  # type: ignore[misc]


class FailingStreamWriter(StreamWriter):
    def __init__(self, plan: SinkPlan, failure: Failure) -> None:
        super().__init__(plan)
        self.failure = failure

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        return self.failure.write(super().write, iterator)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - Spark's.
        self.failure.commit(
            lambda: super(FailingStreamWriter, self).commit(messages, batchId), batchId
        )


class FailingBatchWriter(BatchWriter):
    def __init__(self, plan: SinkPlan, failure: Failure) -> None:
        super().__init__(plan)
        self.failure = failure

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        return self.failure.write(super().write, iterator)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        self.failure.commit(lambda: super(FailingBatchWriter, self).commit(messages), 0)


class FailingSource(PenstockDataSource):
    """``format("penstock-failing")``."""

    @classmethod
    def name(cls) -> str:
        return "penstock-failing"

    def __init__(self, options: Mapping[str, str]) -> None:
        own = ("fail", "marks", "driver", "shuffles", "schedule")
        super().__init__({name: value for name, value in options.items() if name not in own})
        self.failure = Failure(options)

    def writer(self, schema: StructType, overwrite: bool) -> BatchWriter:
        return FailingBatchWriter(super().writer(schema, overwrite)._plan, self.failure)

    def streamWriter(self, schema: StructType, overwrite: bool) -> StreamWriter:
        return FailingStreamWriter(super().streamWriter(schema, overwrite)._plan, self.failure)
