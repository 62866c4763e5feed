"""Each family of nemeses at real nodes: its faults hold, are healed, and break no promise."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.integration.chaos.commands import chaos

pytestmark = [pytest.mark.integration, pytest.mark.timeout(400)]

Planned = tuple[str, str, Mapping[str, Any]]
GAP_MS = 6_000
HELD_MS = 2_000


def schedule(path: Path, faults: Sequence[Planned]) -> Path:
    entries = [
        {
            "at_ms": 1_000 + number * GAP_MS,
            "hold_ms": HELD_MS,
            "fault": {"nemesis": name, "kind": name, "target": target, "parameters": parameters},
        }
        for number, (name, target, parameters) in enumerate(faults)
    ]
    path.write_text(json.dumps(entries), encoding="utf-8")
    return path


def run(tmp_path: Path, faults: Sequence[Planned]) -> tuple[Any, list[dict[str, Any]]]:
    """What was judged, and the records of the faults; they held, were healed, and all was kept."""
    directory = tmp_path / "run"
    done = chaos(
        *("run", "--duration", 1 + len(faults) * GAP_MS / 1_000, "--seed", "7", "--rate", "1000"),
        *("--schedule", schedule(tmp_path / "faults.json", faults)),
        *("--out", directory, "--output", "json"),
    )
    assert done.status == 0, f"{done.stdout}\n{done.stderr}"
    lines = (directory / "faults.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    assert [one["fault"]["kind"] for one in records] == [name for name, _, _ in faults]
    for one in records:
        assert one["held"], one["error"]
        assert one["error"] == ""
    assert done.verdict_of("lost-write")["looked_at"] > 0
    assert done.verdict_of("recovery")["valid"] == "true"
    return done, records


def test_a_partition(tmp_path: Path) -> None:
    _, [ring, swizzle] = run(
        tmp_path,
        [
            ("majorities-ring", "a leader", {}),
            ("swizzle-clog", "all", {"pauses_ms": [300, 300]}),
        ],
    )
    assert len(ring["held"]["cut"]) == 3
    assert len(swizzle["held"]["order"]) == 2


def test_a_bad_network(tmp_path: Path) -> None:
    run(
        tmp_path,
        [
            ("slow", "all", {"latency_ms": 50, "jitter_ms": 25}),
            ("late-acks", "random", {"hold_ms": 500}),
        ],
    )


def test_bad_disks_and_a_blackout(tmp_path: Path) -> None:
    done, [failing, _] = run(
        tmp_path,
        [
            ("failing-sync", "a leader", {"errno": "EIO", "of_sync": True}),
            ("blackout", "all", {"runs_ms": 500, "delay_ms": 2}),
        ],
    )
    assert failing["held"]["may_end"] == "disk"
    assert done.verdict_of("crashes")["valid"] == "true"


def test_damaged_and_wrong_directories(tmp_path: Path) -> None:
    done, [flipped, _, wiped] = run(
        tmp_path,
        [
            ("flipped-bit", "random", {"where": "below", "stop": "terminate"}),
            ("swapped-directories", "random", {}),
            ("wiped-disk", "random", {}),
        ],
    )
    assert flipped["held"]["byte"] >= 0
    assert done.verdict_of("directory-refused")["looked_at"] == 3
    assert done.verdict_of("replicas-identical")["valid"] == "true"
    assert wiped["held"]["refused"] == wiped["held"]["struck"]


def test_members_come_and_go(tmp_path: Path) -> None:
    _, [_, moved] = run(
        tmp_path,
        [
            ("voter", "the active controller", {}),
            ("reassign", "some partitions", {"how": "fewer"}),
        ],
    )
    assert all(len(one["wanted"]) == 2 for one in moved["held"]["moves"])


def test_few_descriptors_and_little_memory(tmp_path: Path) -> None:
    run(
        tmp_path,
        [
            ("few-descriptors", "a leader", {"more": 0}),
            ("little-memory", "random", {"more": 1 << 20}),
        ],
    )
