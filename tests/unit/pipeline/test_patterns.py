from __future__ import annotations

import pytest

from penstock.pipeline.errors import TransformError
from penstock.pipeline.functions.patterns import has_zone, parse_pattern


def test_letters_are_filled_in_and_the_rest_stays() -> None:
    assert parse_pattern("yyyy-MM'T'HH''s") == [
        ("y", 4), "-", ("M", 2), "T", ("H", 2), "'", ("s", 1),
    ]  # fmt: skip


def test_quotes_within_quotes() -> None:
    assert parse_pattern("'o''clock'") == ["o'clock"]


@pytest.mark.parametrize("pattern", ["MMM", "EEE", "hh", "VV", "Ymd", "yyy", "SSSSSSS"])
def test_letters_of_unsure_meaning_are_refused(pattern: str) -> None:
    with pytest.raises(TransformError, match="is not known here; next: write yyyy"):
        parse_pattern(pattern)


def test_an_open_quote_is_refused() -> None:
    with pytest.raises(TransformError, match="quote without end"):
        parse_pattern("yyyy'T")


def test_zones_are_told_from_text() -> None:
    assert has_zone("HH:mmX")
    assert not has_zone("HH:mm'X'")
