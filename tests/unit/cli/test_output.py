"""Tables and numbers for people."""

from __future__ import annotations

import pytest

from penstock.cli.output import format_bytes, print_table


@pytest.mark.parametrize(
    ("count", "wanted"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.00 kB"), (2_370_789, "2.37 MB"), (7.5e12, "7500.00 GB")],
)
def test_bytes_in_the_unit_that_reads_best(count: float, wanted: str) -> None:
    assert format_bytes(count) == wanted


def test_a_row_in_a_pipe_is_never_cut(capsys: pytest.CaptureFixture[str]) -> None:
    long = "x" * 500
    print_table(("Name", "Size"), [(long, 1), (["a", "b"], None)], right=("Size",))
    lines = capsys.readouterr().out.splitlines()
    assert any(long in line and line.rstrip().endswith("1") for line in lines)
    assert any(line.split() == ["a,b", "-"] for line in lines)


def test_text_that_looks_like_markup_is_printed_as_it_is(
    capsys: pytest.CaptureFixture[str],
) -> None:
    print_table(("Name",), [("[bold]x[/bold]",), (r"back\slash[",)])
    printed = capsys.readouterr().out
    assert "[bold]x[/bold]" in printed
    assert r"back\slash[" in printed
