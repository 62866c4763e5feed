"""The health check of the image asks /readyz where the node has an HTTP port."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from penstock.broker.http import NodeHttp, Reply

SCRIPT = Path(__file__).parents[3] / "deploy/docker/health.py"


@pytest.fixture
def health(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[ModuleType]:
    """The script, with settings of a file that is ours."""
    spec = importlib.util.spec_from_file_location("container_health", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "SETTINGS", tmp_path / "node.toml")
    yield module
    sys.modules.pop("container_health", None)


def listen_at(tmp_path: Path, port: int) -> None:
    (tmp_path / "node.toml").write_text(
        f'node.id = 1\ndata.dir = "{tmp_path}"\ncontroller.quorum.voters = "1@h:1"\n'
        f'metrics.listen = "0.0.0.0:{port}"\n'
    )


@pytest.mark.parametrize(("reason", "status"), [("", 0), ("the broker is fenced", 1)])
def test_it_is_what_the_node_says(
    health: ModuleType,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    reason: str,
    status: int,
) -> None:
    http = NodeHttp("127.0.0.1:0", {"/readyz": lambda _: Reply.verdict(reason)})
    try:
        listen_at(tmp_path, http.port)
        assert health.main() == status
        assert capsys.readouterr().out == f"{reason or 'it serves'}\n"
    finally:
        http.close()


def test_a_port_where_nobody_listens_is_no_health(
    health: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    http = NodeHttp("127.0.0.1:0", {})
    http.close()
    listen_at(tmp_path, http.port)
    assert health.main() == 1
    assert "does not answer" in capsys.readouterr().out
