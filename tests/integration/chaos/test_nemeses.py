"""Each family of nemeses at real nodes: its faults hold, are healed, and break no promise."""

from __future__ import annotations

import json
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.integration.chaos.commands import Finished, finish, start
from tests.support import wait_until

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

Planned = tuple[str, str, Mapping[str, Any]]
HELD_MS = 2_000
HOUR_S = 3_600


def schedule(path: Path, faults: Sequence[Planned]) -> Path:
    """One a second at the earliest: each begins when the one before is healed."""
    entries = [
        {
            "at_ms": 1_000 * number,
            "hold_ms": HELD_MS,
            "fault": {"nemesis": name, "kind": name, "target": target, "parameters": parameters},
        }
        for number, (name, target, parameters) in enumerate(faults, 1)
    ]
    path.write_text(json.dumps(entries), encoding="utf-8")
    return path


def lines_of(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def run(tmp_path: Path, faults: Sequence[Planned]) -> tuple[Finished, list[dict[str, Any]]]:
    """What was judged, and the records of the faults; they held, were healed, and all was kept.

    The load ends when all faults are over, however long they take.
    """
    directory = tmp_path / "run"
    written = directory / "faults.jsonl"
    with start(
        *("run", "--duration", str(HOUR_S), "--seed", "7", "--rate", "1000"),
        *("--schedule", schedule(tmp_path / "faults.json", faults)),
        *("--out", directory, "--output", "json"),
    ) as process:
        try:
            wait_until(
                lambda: len(lines_of(written)) == len(faults) or process.poll() is not None,
                "all faults are over",
                timeout_s=240,
            )
            process.send_signal(signal.SIGINT)
            done = finish(process)
        finally:
            process.kill()
    assert done.status == 130, f"{done.stdout}\n{done.stderr}"
    records = lines_of(written)
    assert [one["fault"]["kind"] for one in records] == [name for name, _, _ in faults]
    for one in records:
        assert one["held"], one["error"]
        assert one["error"] == ""
    assert done.json["valid"] == "true"
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


def test_a_slow_disk_and_a_blackout(tmp_path: Path) -> None:
    _, [_, blackout] = run(
        tmp_path,
        [
            ("slow-disk", "a leader", {"delay_ms": 30}),
            ("blackout", "all", {"runs_ms": 500, "delay_ms": 2}),
        ],
    )
    assert blackout["held"]["struck"] == [1, 2, 3]


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


def test_clocks_jump_and_strobe(tmp_path: Path) -> None:
    run(
        tmp_path,
        [
            ("clock-jump", "a leader", {"offset_ms": 3_000_000, "strobe_ms": 0}),
            ("clock-jump", "all", {"offset_ms": -600_000, "strobe_ms": 0}),
            ("clock-strobe", "the active controller", {"offset_ms": -30_000, "strobe_ms": 10}),
        ],
    )


def test_few_descriptors_and_little_memory(tmp_path: Path) -> None:
    run(
        tmp_path,
        [
            ("few-descriptors", "a leader", {"more": 0}),
            ("little-memory", "random", {"more": 1 << 20}),
        ],
    )
