"""What the driver makes of what its tasks say. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pyspark.sql.datasource import WriterCommitMessage

from penstock.pipeline.errors import ConcurrentQueryError
from penstock.pipeline.sink.identity import Epoch


@dataclass(frozen=True)
class TaskDone(WriterCommitMessage):
    """What a task says to the driver when it is done."""

    epoch: Epoch | None
    """None where nothing is left to commit: delivery is at-least-once."""
    handle: str | None = None
    """Of what it has written; None where it has written nothing."""
    committed_by: int | None = None
    """The mark of the execution that has committed this batch before; None where it is new."""
    rows: int = 0
    """How many came, written or not."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is to be done about an epoch."""

    epoch: Epoch
    winners: tuple[str, ...]
    committed_by: int | None
    """The mark of the execution that has committed it before: nothing was written this time."""
    rows: int


def verdict(messages: Iterable[WriterCommitMessage | None]) -> Verdict | None:
    """Of all tasks of one write; None where there is nothing to commit.

    Raises ConcurrentQueryError where the batch was committed while they ran.
    """
    done = [message for message in messages if isinstance(message, TaskDone)]
    epoch = next((message.epoch for message in done if message.epoch is not None), None)
    if epoch is None:
        return None
    before = {message.committed_by for message in done}
    if len(before) > 1:
        raise committed_meanwhile(epoch)
    winners = tuple(message.handle for message in done if message.handle is not None)
    return Verdict(epoch, winners, before.pop(), sum(message.rows for message in done))


def committed_meanwhile(epoch: Epoch) -> ConcurrentQueryError:
    """Somebody else has committed the epoch, and what was written now is not in it."""
    return ConcurrentQueryError(
        f"the penstock sink: {epoch.name} was committed by somebody else while it was written; "
        "what was written now is aborted. Either the query runs twice (two drivers with one "
        "checkpoint): stop one. Or two writes of one foreachBatch run at the same time with the "
        "same sink id: give each its own option sinkId. Then start the query again"
    )
