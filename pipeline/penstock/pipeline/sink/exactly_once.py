"""Exactly once: tasks write attempts, and the driver commits those that count, once for a batch.

Everything that a batch writes becomes visible by one ``CommitGroup``. Spark notes after it that the
batch is done; where that note is missing it repeats the batch, whose tasks then find it committed
and write nothing.

A repetition says by its number alone that it is one. So two writes of one batch under one sink id
would be taken for a write and its repetition, and the second be dropped without a word. The mark
that attempts carry tells them apart: a batch that was committed under the mark of this very
execution was written by another write of it. One that was committed before is a repetition, for
the first write that says so: it claims the repetition for this execution in a group beside, and a
second one that finds the claim is another write.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Final

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import WriterCommitMessage

from penstock.client import (
    AttemptWriter,
    GroupCommit,
    GroupCommitConflictError,
    GroupCommits,
    PenstockError,
    StaleGroupCommitError,
    TransactionAbortableError,
)
from penstock.client.config import AttemptConfig, CommitConfig
from penstock.pipeline.errors import SharedSinkIdError, StaleCheckpointError
from penstock.pipeline.sink.failures import write_failed
from penstock.pipeline.sink.identity import Epoch, Place, mark_of, marked, place_of
from penstock.pipeline.sink.plan import SinkPlan
from penstock.pipeline.sink.replays import Content, plan_of
from penstock.pipeline.sink.rows import by_topic
from penstock.pipeline.sink.verdict import TaskDone, committed_meanwhile, verdict
from penstock.pipeline.sink_options import Delivery
from penstock.wire.transactional_ids import parse_handle

_LOG: Final = logging.getLogger("penstock.pipeline")

# In front, where no group of a query or a writer has it: a sink id may end in anything.
_CLAIMS: Final = "spark-replays-"
# The task of an attempt that is none of Spark's: its numbers of partitions do not go so far.
_NO_TASK: Final = 999_999_999


def write(plan: SinkPlan, batches: Iterator[pa.RecordBatch]) -> TaskDone:
    """In a task: write its rows under an attempt of its own; its handle goes to the driver."""
    context = TaskContext.get()
    assert context is not None  # Spark calls this in tasks alone.
    place = place_of(context, plan.options, plan.alone)
    epoch = place.epoch
    with _commits(plan, epoch.group) as commits:
        if epoch.of_query:
            last = commits.last_committed()
            _check_not_older(epoch, last.epoch_number)
            if last.epoch_number == epoch.number:
                # What is upstream may count on having been asked for its rows.
                rows = sum(batch.num_rows for batch in batches)
                return TaskDone(epoch, committed_by=_mark_of(last), rows=rows)
        try:
            handle, rows = _write_rows(plan, commits, place, batches)
        except TransactionAbortableError as error:
            # The client's own advice is to abort and begin anew, which is Spark's part here.
            failed = write_failed(place, error)
            raise failed from failed.__cause__
        return TaskDone(epoch, handle, rows=rows)


def commit(plan: SinkPlan, messages: Sequence[WriterCommitMessage | None], *, one: bool) -> None:
    """In the driver, when all tasks are done. ``one``: a batch has no write but this."""
    found = verdict(messages)
    if found is None:
        return
    epoch = found.epoch
    # Who numbers its writes itself says by the number that one is the repetition of another.
    shared = epoch.of_query and not one and plan.options.transaction is None
    checkpoint = plan.options.checkpoint if epoch.of_query else None
    content = Content(found.rows, plan_of(checkpoint, epoch.number))
    with _commits(plan, epoch.group) as commits:
        if found.committed_by is not None:
            if shared and found.committed_by == epoch.mark:
                raise _shared(epoch)
            if plan.options.checks_replays:
                _check_same(epoch, commits.last_committed(), content)
            if shared:
                _claim(plan, epoch)
            _LOG.info("%s is committed already; nothing was written again", epoch.name)
            return
        winners = list(found.winners)
        with ExitStack() as stack:
            if shared and not winners:
                # Without rows there are no attempts, and somebody has to carry the mark.
                attempt = marked(epoch.mark)
                writer = commits.begin_attempt(epoch.number, _NO_TASK, attempt)
                winners.append(stack.enter_context(writer).prepare())
            try:
                # Nobody repeats a write of its own, and nothing follows it.
                commits.commit(
                    epoch.number,
                    winners,
                    ends_group=not epoch.of_query,
                    metadata=content.encode(),
                )
            except GroupCommitConflictError as error:
                raise committed_meanwhile(epoch) from error
            except StaleGroupCommitError as error:
                raise _older(epoch, commits.last_committed().epoch_number) from error


def abort(plan: SinkPlan, messages: Sequence[WriterCommitMessage | None]) -> None:
    """In the driver, when the write is given up: readers wait no longer for what was prepared.

    Of tasks that Spark killed it has no message. A write that belongs to no query is over for good,
    so committing nothing of it aborts theirs as well. A batch of a query is written again under its
    number, so only what is known is aborted: whoever begins an attempt again fences the one before.
    What is left is aborted by the next commit of its group, or by its timeout.
    """
    if plan.options.delivery is not Delivery.EXACTLY_ONCE:
        return
    done = [message for message in messages if isinstance(message, TaskDone)]
    if not any(message.epoch is not None and message.epoch.of_query for message in done):
        _end_alone(plan)
    handles = [message.handle for message in done if message.handle is not None]
    attempts = [handle.attempt for handle in map(parse_handle, handles) if handle is not None]
    for group in {attempt.group for attempt in attempts}:
        with _commits(plan, group) as commits:
            for attempt in attempts:
                if attempt.group == group:
                    _abort(commits, attempt.epoch_number, attempt.task, attempt.attempt)


def _end_alone(plan: SinkPlan) -> None:
    try:
        with _commits(plan, plan.alone) as commits:
            commits.commit(0, [], ends_group=True)
    except PenstockError as error:
        _LOG.warning("attempts of a write that failed are left to their timeout: %s", error)


def _abort(commits: GroupCommits, number: int, task: int, attempt: int) -> None:
    try:
        with commits.begin_attempt(number, task, attempt):
            pass  # Which is not prepared, and so aborted.
    except StaleGroupCommitError:
        pass  # Its number is decided: it was committed, or aborted with that.
    except PenstockError as error:
        _LOG.warning("an attempt is left to its timeout: %s", error)


def _commits(plan: SinkPlan, group: str) -> GroupCommits:
    client = plan.options.client
    return GroupCommits(client.bootstrap_servers, group, **client.of(CommitConfig))


def _write_rows(
    plan: SinkPlan, commits: GroupCommits, place: Place, batches: Iterator[pa.RecordBatch]
) -> tuple[str | None, int]:
    """The handle of the attempt, None without rows, and how many. Whatever is raised aborts it."""
    writer: AttemptWriter | None = None
    count = 0
    with ExitStack() as stack:
        for batch in batches:
            count += batch.num_rows
            now_ms = int(time.time() * 1000)
            for topic, rows in by_topic(batch, plan.columns, plan.options.topic, now_ms):
                if writer is None:
                    writer = stack.enter_context(_begin(plan, commits, place))
                writer.send_arrow(topic, rows)
        return None if writer is None else writer.prepare(), count


def _begin(plan: SinkPlan, commits: GroupCommits, place: Place) -> AttemptWriter:
    return commits.begin_attempt(
        place.epoch.number,
        place.partition,
        place.attempt,
        **plan.options.client.of(AttemptConfig),
    )


def _check_not_older(epoch: Epoch, last_number: int) -> None:
    if last_number > epoch.number:
        raise _older(epoch, last_number)


def _older(epoch: Epoch, last_number: int) -> StaleCheckpointError:
    return StaleCheckpointError(
        f"the penstock sink: {epoch.name} is to be written, but batch {last_number} is committed "
        "already: the query's checkpoint is older than what the query has written (an old copy "
        "restored?), or another driver goes on with it. Nothing was written. Next: start from the "
        "newest checkpoint; where it is lost, set another sinkId, which writes anew, and so "
        f"twice, what batches {epoch.number} to {last_number} have written"
    )


def _check_same(epoch: Epoch, last: GroupCommit, content: Content) -> None:
    """Raises StaleCheckpointError where what is committed under the number is another batch."""
    if last.epoch_number != epoch.number:
        raise _older(epoch, last.epoch_number)
    before = Content.decode(last.metadata)
    if before is None or not content.differs_from(before):
        return
    raise StaleCheckpointError(
        f"the penstock sink: {epoch.name} is committed, with {before.rows} rows, and what comes "
        f"under its number now is another one, with {content.rows}: the query's checkpoint is "
        "older than what the query has written (a copy restored, or its newest files were lost). "
        "Nothing was written. Next: start from the newest checkpoint; where it is lost, set "
        f"another sinkId, which writes anew what batch {epoch.number} had already; where the query "
        "makes other rows of the same each time, set replay=trusted, which takes whatever comes "
        "under a committed number for what was written"
    )


def _mark_of(last: GroupCommit) -> int:
    """The mark of who committed it; 0, which hardly anyone has, where nobody left one."""
    found = parse_handle(last.winners[0]) if last.winners else None
    return 0 if found is None else mark_of(found.attempt.attempt)


def _claim(plan: SinkPlan, epoch: Epoch) -> None:
    """Take the repetition of an epoch for one write of this execution.

    Raises SharedSinkIdError where another write of it has.
    """
    with _commits(plan, _CLAIMS + epoch.group) as claims:
        last = claims.last_committed()
        if last.winners and _mark_of(last) == epoch.mark:
            raise _shared(epoch)
        number = last.epoch_number + 1
        try:
            with claims.begin_attempt(number, _NO_TASK, marked(epoch.mark)) as writer:
                claims.commit(number, [writer.prepare()])
        except (GroupCommitConflictError, StaleGroupCommitError) as error:
            raise _shared(epoch) from error


def _shared(epoch: Epoch) -> SharedSinkIdError:
    return SharedSinkIdError(
        f"the penstock sink: another write of this foreachBatch has written {epoch.name} already, "
        "and after a crash the two could not be told apart; nothing was written by this one. Next: "
        "leave the first write as it is, give this one its own option sinkId, which must stay the "
        "same from then on, and start the query again"
    )
