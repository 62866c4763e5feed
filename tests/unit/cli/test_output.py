"""Tables and numbers for people."""

from __future__ import annotations

import io
import sys

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from penstock.cli import output
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


def test_what_a_terminal_would_obey_is_shown_and_not_sent(
    capsys: pytest.CaptureFixture[str],
) -> None:
    print_table(("Name", "Names"), [("a\x1b[2Jb\x00ü💥", ["c\rd"])])
    printed = capsys.readouterr().out
    assert r"a\x1b[2Jb\x00ü💥" in printed
    assert r"c\rd" in printed


def test_text_that_looks_like_markup_is_printed_as_it_is(
    capsys: pytest.CaptureFixture[str],
) -> None:
    print_table(("Name",), [("[bold]x[/bold]",), (r"back\slash[",)])
    printed = capsys.readouterr().out
    assert "[bold]x[/bold]" in printed
    assert r"back\slash[" in printed


CELLS = st.text(
    st.characters(exclude_categories=("C", "Z"), include_characters=" [é語\\"), max_size=9
).map(str.strip)


@given(rows=st.lists(st.tuples(CELLS, st.integers(), CELLS), max_size=4))
@example(rows=[])
def test_a_table_in_a_pipe_looks_as_on_a_wide_terminal(rows: list[tuple[str, int, str]]) -> None:
    texts = [[output._text(cell) for cell in row] for row in rows]
    columns, right = ("Name", "Count", "Of"), ("Count",)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "300")
        fitted = output._fitted(columns, texts, right)
    assert "".join(output._lines(columns, texts, right)) == fitted


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("count", "fitted"), [(1_000, True), (1_001, False)])
def test_a_long_table_is_not_fitted_to_the_terminal(
    monkeypatch: pytest.MonkeyPatch, count: int, fitted: bool
) -> None:
    """Fitting it would take seconds."""
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setattr("sys.stdout", Terminal())
    print_table(("Name",), [("x" * 60,)] * count)
    written = sys.stdout
    assert isinstance(written, Terminal)
    lines = written.getvalue().splitlines()
    assert ("x" * 60 not in written.getvalue()) == fitted
    assert len(lines) >= count


def test_a_cell_of_several_lines_is_one_line_in_a_pipe(
    capsys: pytest.CaptureFixture[str],
) -> None:
    print_table(("Name", "Size"), [("a\nb", 1)], right=("Size",))
    assert " a b       1 \n" in capsys.readouterr().out
