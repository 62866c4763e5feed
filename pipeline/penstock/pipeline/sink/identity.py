"""Who writes: the query, the batch, the task. Pure.

Spark does not tell Python writers which batch they write. It tells its tasks, in properties that
the threads of a query's driver hand down to them, and so within ``foreachBatch`` too.

A sink's commits are a group (``GroupCommits``) for each query and sink id, and the batch id is
their epoch number: Spark repeats a batch under its id, and begins the next one only after it. A
write may say both by itself, where Spark says nothing: behind Spark Connect the writes of a
``foreachBatch`` are jobs like any other.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from pyspark import TaskContext

from penstock.pipeline.sink_options import SinkOptions, group_of_query, group_of_writer

_QUERY: Final = "sql.streaming.queryId"
_BATCH: Final = "streaming.sql.batchId"
# Of one execution of a batch, with all that foreachBatch does in it: a number within a driver,
# which the others name. Unlike the job's group, no program sets these.
_EXECUTION: Final = ("spark.app.id", "spark.app.startTime", "spark.sql.execution.root.id")

_MARK_BITS: Final = 31
_TASK_ATTEMPT_BITS: Final = 32


@dataclass(frozen=True, slots=True)
class Epoch:
    """What is committed as a whole."""

    group: str
    number: int
    mark: int
    """Of the execution of a batch in which this was written: another one each time that Spark
    repeats the batch. What is written twice within one execution was two writes."""
    of_query: bool
    """Whether a repetition of the batch would commit under the same group and number."""

    @property
    def name(self) -> str:
        """For messages."""
        return f"batch {self.number} of {self.group}"


@dataclass(frozen=True, slots=True)
class Place:
    """One attempt at a task, and what it writes for."""

    epoch: Epoch
    partition: int
    attempt: int
    """Other attempts at the partition have others, speculative ones and those of another attempt at
    the stage too. Its upper half is the execution's mark, which so is in the group's commit."""


def place_of(context: TaskContext, options: SinkOptions, alone: str) -> Place:
    """Where a task runs. ``alone`` names the group of a write that belongs to no query."""
    get = context.getLocalProperty
    query, batch = get(_QUERY), get(_BATCH)
    if options.transaction is not None:
        writer, number = options.transaction
        epoch = Epoch(group_of_writer(writer, options.sink_id), number, _mark(get), of_query=True)
    elif query is None or batch is None:
        epoch = Epoch(alone, 0, 0, of_query=False)
    else:
        epoch = Epoch(group_of_query(query, options.sink_id), int(batch), _mark(get), of_query=True)
    low = context.taskAttemptId() % (1 << _TASK_ATTEMPT_BITS)
    return Place(epoch, context.partitionId(), epoch.mark << _TASK_ATTEMPT_BITS | low)


def mark_of(attempt: int) -> int:
    """The mark of the execution in which an attempt was."""
    return attempt >> _TASK_ATTEMPT_BITS


def marked(mark: int) -> int:
    """The number of an attempt of no task of this execution."""
    return mark << _TASK_ATTEMPT_BITS


def _mark(get: Callable[[str], str | None]) -> int:
    text = "/".join(get(name) or "" for name in _EXECUTION)
    digest = hashlib.sha256(text.encode()).digest()
    return int.from_bytes(digest[:4], "big") >> (32 - _MARK_BITS)
