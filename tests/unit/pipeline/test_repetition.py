"""A batch that comes under a committed number, to a sink within ``foreachBatch``."""

from __future__ import annotations

from unittest.mock import Mock

import pytest

from penstock.pipeline.connectors.repetition import check_repetition
from penstock.pipeline.errors import StaleCheckpointError
from penstock.pipeline.sink.replays import Content


@pytest.mark.parametrize(
    ("before", "plan", "rows"),
    [
        (Content(3, "a"), "a", 4),  # By the plan it is the same, whatever rows it makes.
        (Content(3, ""), "a", 3),
        (Content(3, "a"), "", 3),
        (Content(3, ""), "", 0),  # As AMQP and MQTT repeat a batch.
        (None, "a", 4),
    ],
)
def test_what_is_taken_for_the_repetition(before: Content | None, plan: str, rows: int) -> None:
    check_repetition(before, plan, lambda: rows, "batch 1 of table t")


@pytest.mark.parametrize(
    ("before", "plan", "rows", "says"),
    [
        (Content(3, "a"), "b", 3, "another one, by the checkpoint's plan of it"),
        (Content(3, "a"), "", 4, "another one, with 4 rows"),
        (Content(3, ""), "b", 2, "another one, with 2 rows"),
    ],
)
def test_what_is_another_batch(before: Content, plan: str, rows: int, says: str) -> None:
    with pytest.raises(
        StaleCheckpointError, match=f"batch 1 of table t is committed, with 3 rows, .*{says}.*next:"
    ):
        check_repetition(before, plan, lambda: rows, "batch 1 of table t")


def test_rows_are_counted_only_where_the_plans_do_not_say_it() -> None:
    count = Mock(return_value=3)
    check_repetition(Content(3, "a"), "a", count, "batch 1")
    count.assert_not_called()
    check_repetition(Content(3, "a"), "", count, "batch 1")
    count.assert_called_once_with()
