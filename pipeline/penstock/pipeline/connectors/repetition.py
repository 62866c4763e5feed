"""Whether what ``foreachBatch`` gives a sink under a committed number is that batch again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from penstock.pipeline.errors import StaleCheckpointError
from penstock.pipeline.sink.replays import Content

_UNASKED: Final = -1


def check_repetition(before: Content | None, plan: str, rows: Callable[[], int], what: str) -> None:
    """Raises StaleCheckpointError where what comes is another batch than the one before.

    ``before`` is None where nobody kept what that one was. ``rows`` counts those that come now,
    which may take as long as to write them: it is asked only where the plans say nothing. ``what``
    names the batch and its place, as "batch 3 of table orders".
    """
    if before is None:
        return
    is_planned = bool(plan and before.plan)
    now = Content(_UNASKED if is_planned else rows(), plan)
    if not now.differs_from(before):
        return
    found = "by the checkpoint's plan of it" if is_planned else f"with {now.rows} rows"
    raise StaleCheckpointError(
        f"{what} is committed, with {before.rows} rows, and what comes under its number now is "
        f"another one, {found}: the query's checkpoint is older than what the query has written (a "
        "copy restored, or its newest files were lost); nothing was written; next: start from the "
        "newest checkpoint; where it is lost, write elsewhere or as another sink_id, which writes "
        "anew what this batch had already; where the query makes other rows of the same each "
        "time, pass checkpoint=, or checks_replays=False, which takes whatever comes under a "
        "committed number for what was written"
    )
