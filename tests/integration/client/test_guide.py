"""docs/client.md, followed from top to bottom: all of its Python, in one go, against real nodes."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.client import AdminClient
from tests.integration.cluster import running_cluster

pytestmark = pytest.mark.integration

GUIDE = Path(__file__).parents[3] / "docs/client.md"


def test_the_guide_runs(tmp_path: Path) -> None:
    blocks = re.findall(
        r"^```python\n(.*?)^```", GUIDE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )
    assert len(blocks) >= 10
    with running_cluster(tmp_path / "cluster") as cluster:
        with AdminClient(cluster.bootstrap) as admin:
            for topic in ("orders", "counts"):
                admin.create_topic(topic, 3, 3)
        program = tmp_path / "guide.py"
        program.write_text("\n\n".join(blocks).replace("localhost:9092", cluster.bootstrap))
        followed = subprocess.run(
            [sys.executable, "-W", "error", str(program)],
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
    assert (followed.returncode, followed.stderr) == (0, "")
    for said in ("b'two coffees'", "assigned: orders-0 orders-1", "committed: True"):
        assert said in followed.stdout
