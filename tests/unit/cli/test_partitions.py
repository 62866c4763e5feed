"""Plans of `penstock partitions reassign --file`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock.cli.partitions import _read_plan
from penstock.wire.errors import InvalidRequestError
from penstock.wire.ids import TopicPartition


def entry(partition: object, replicas: object) -> dict[str, object]:
    return {"topic": "orders", "partition": partition, "replicas": replicas}


def plan(tmp_path: Path, *entries: dict[str, object]) -> Path:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({"version": 1, "partitions": entries}))
    return path


def test_a_plan_is_read(tmp_path: Path) -> None:
    assert _read_plan(plan(tmp_path, entry(0, [4, 5]), entry(1, [5, 4]))) == {
        TopicPartition("orders", 0): [4, 5],
        TopicPartition("orders", 1): [5, 4],
    }


def test_a_partition_named_twice_is_refused_rather_than_chosen(tmp_path: Path) -> None:
    path = plan(tmp_path, entry(0, [4]), entry(1, [4]), entry(0, [5]))
    with pytest.raises(InvalidRequestError, match="names orders-0 more than once"):
        _read_plan(path)


@pytest.mark.parametrize(
    "text", ["", "[]", '{"partitions": 3}', '{"partitions": [{"topic": "orders"}]}']
)
def test_what_is_no_plan_shows_one(tmp_path: Path, text: str) -> None:
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(InvalidRequestError, match=r"plan\.json is no plan: wanted is {\"part"):
        _read_plan(path)
