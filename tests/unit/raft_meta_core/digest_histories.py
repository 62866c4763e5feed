"""Applies logs and says what came of it: python digest_histories.py FILE, in any other process."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Collection
from pathlib import Path

from penstock.raft_meta.core.cluster_state import ClusterState

Log = list[tuple[int, bytes]]


def outcomes(log: Log, restarts: Collection[int] = ()) -> list[tuple[bytes, bytes, bytes]]:
    """After each entry: the state, what brokers learn, and the answer.

    After the entries at the positions ``restarts`` another controller goes on, from a snapshot.
    """
    state = ClusterState()
    found = []
    for position, (index, payload) in enumerate(log):
        applied = state.apply(index, payload)
        snapshot = state.snapshot()
        delta = (
            b"" if applied.delta is None else applied.delta.SerializeToString(deterministic=True)
        )
        found.append((snapshot, delta, applied.result.SerializeToString(deterministic=True)))
        if position in restarts:
            state = ClusterState.restore(snapshot)
    return found


def digests(logs: list[Log]) -> list[list[list[str]]]:
    """Of each log, what every entry led to."""
    return [
        [[hashlib.sha256(part).hexdigest() for part in outcome] for outcome in outcomes(log)]
        for log in logs
    ]


def to_json(logs: list[Log]) -> str:
    """Logs for another process."""
    return json.dumps([[(index, payload.hex()) for index, payload in log] for log in logs])


def from_json(text: str) -> list[Log]:
    """Logs of another process."""
    return [[(index, bytes.fromhex(payload)) for index, payload in log] for log in json.loads(text)]


if __name__ == "__main__":
    sys.stdout.write(json.dumps(digests(from_json(Path(sys.argv[1]).read_text()))))
