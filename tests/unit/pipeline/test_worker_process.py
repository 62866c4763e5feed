"""What Spark's Python processes spare themselves."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import gc
from penstock.pipeline.worker_process import settle_in

counts = []
for _ in range(3):
    kept = [[] for _ in range(1000)]
    settle_in()
    counts.append(gc.get_freeze_count())
    del kept
assert counts[0] > 1000, counts
assert counts[1] > counts[0] - 1000 and gc.get_freeze_count() > 1000, counts
before = gc.get_freeze_count()
kept = [[] for _ in range(1000)]
settle_in()
assert gc.get_freeze_count() == before, "a process settles in only once"
print(sum(type(one) is type for one in gc.get_objects()))
"""


def test_what_is_loaded_is_not_looked_at_again() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 100  # Classes that are loaded are thousands.
