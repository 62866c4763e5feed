"""A table can have a title: benchmarks say in it what they measured."""

from __future__ import annotations

import pytest

from penstock.cli.output import print_table


def test_a_title_stands_above_its_table(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(("a", "b"), [("1", "2")])
    plain = capsys.readouterr().out
    print_table(("a", "b"), [("1", "2")], title="what was measured")
    assert capsys.readouterr().out == f"what was measured\n{plain}"
