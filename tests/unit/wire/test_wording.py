from __future__ import annotations

import pytest

from penstock.wire.wording import counted


@pytest.mark.parametrize(
    ("number", "noun", "verb", "text"),
    [
        (0, "record", "", "0 records"),
        (1, "record", "", "1 record"),
        (2, "batch", "", "2 batches"),
        (1, "record", "was", "1 record was"),
        (3, "record", "was", "3 records were"),
        (0, "record", "is", "0 records are"),
    ],
)
def test_nouns_and_verbs_follow_the_number(number: int, noun: str, verb: str, text: str) -> None:
    assert counted(number, noun, verb) == text
