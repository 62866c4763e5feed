"""`penstock format`, without a node."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from penstock.cli.app import app


@pytest.mark.parametrize("more", [(), ("--found",)])
@pytest.mark.parametrize("empty", ["", " "])
def test_an_empty_cluster_id_is_refused_and_makes_none(
    tmp_path: Path, empty: str, more: tuple[str, ...]
) -> None:
    """What `--cluster-id "$CLUSTER_ID"` is in a shell that never heard of it."""
    data = tmp_path / "data"
    named = ("--data-dir", str(data), "--node-id", "2", "--cluster-id", empty)
    done = CliRunner().invoke(app, ["format", *named, *more])
    assert done.exit_code == 2
    assert "--cluster-id" in done.output
    assert "is empty" in done.output
    assert not data.exists()
