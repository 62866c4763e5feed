"""`penstock topics`: how its refusals are explained."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from typer.testing import CliRunner

from penstock.cli import topics
from penstock.cli.app import app
from penstock.cli.settings import Settings
from penstock.wire.errors import InvalidConfigError


class RefusingAdmin:
    @contextmanager
    def connect(self, _settings: Settings) -> Iterator[RefusingAdmin]:
        yield self

    def create_topic(self, _name: str, **_asked: object) -> None:
        raise InvalidConfigError("unknown topic config 'retention.mss'")


def test_a_config_that_creating_refuses_is_not_corrected_by_options_it_lacks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(topics, "admin_client", RefusingAdmin().connect)
    words = ["topics", "create", "t", "--replication-factor", "1", "--config", "retention.mss=1"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 1
    assert result.stderr == (
        "error: unknown topic config 'retention.mss'\nnext: correct what --config KEY=VALUE names\n"
    )
