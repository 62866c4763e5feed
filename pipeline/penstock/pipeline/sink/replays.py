"""Whether a batch that comes under a committed number is that batch again, or another one.

Spark repeats a batch as it has planned it: by the file of its offsets, which it wrote into the
checkpoint before the batch ran first. Where that file is gone, since the checkpoint is a copy from
before the batch, Spark plans the batch anew, under the same number, with whatever there is by then.
To take that for the repetition would lose what the first one did not have. So each commit keeps
what was planned, and how many rows that was.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

_PLAN_BYTES: Final = 16


@dataclass(frozen=True, slots=True)
class Content:
    """What a batch has, as its commit keeps it."""

    rows: int
    plan: str
    """The digest of the batch's offsets in the checkpoint; "" where that could not be read."""

    def encode(self) -> bytes:
        """As metadata of the commit."""
        return json.dumps({"rows": self.rows, "plan": self.plan}).encode()

    @classmethod
    def decode(cls, metadata: bytes) -> Content | None:
        """What ``encode`` made; None for a commit from before there was any, or of another kind."""
        try:
            found = json.loads(metadata)
            return cls(int(found["rows"]), str(found["plan"]))
        except (KeyError, TypeError, ValueError):
            return None

    def differs_from(self, other: Content) -> bool:
        """Whether this is surely another batch than ``other``, which is committed.

        By their plans, where both are known: Spark repeats none but by the same file. Else by their
        rows, which are as many whenever the query is one that makes the same of the same. Without
        any there is nothing to lose: sources that hand a message out once repeat a batch so.
        """
        if self.plan and other.plan:
            return self.plan != other.plan
        return self.rows not in (0, other.rows)


def plan_of(checkpoint: str | None, number: int) -> str:
    """The digest of what the checkpoint at this place says of a batch; "" where it cannot be read.

    It can where the checkpoint is a directory of this machine, or one that is mounted: what other
    file systems have only Spark's own process reads.
    """
    parts = urlsplit(checkpoint or "")
    if not checkpoint or parts.scheme not in ("", "file"):
        return ""
    directory = checkpoint if not parts.scheme else unquote(parts.path)
    try:
        planned = Path(directory, "offsets", str(number)).read_bytes()
    except OSError:
        return ""
    return hashlib.sha256(planned).hexdigest()[: 2 * _PLAN_BYTES]
