from __future__ import annotations

import pytest

from penstock.broker.core.group_partition import java_string_hash, partition_for_group


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", 0),
        ("a", 97),
        ("hello", 99162322),
        ("billing", -109829509),
        ("polygenelubricants", -(2**31)),  # Java's best known awkward hash.
        ("café", 3045921),
        ("\U0001f600", 1772899),  # Two UTF-16 units: 0xD83D, 0xDE00.
    ],
)
def test_the_hash_is_that_of_java(text: str, expected: int) -> None:
    assert java_string_hash(text) == expected


def test_a_negative_hash_still_gives_a_partition() -> None:
    # Kafka masks the sign bit: the hash -2^31 becomes 0.
    assert partition_for_group("polygenelubricants", 7) == 0
    assert partition_for_group("billing", 16) == (-109829509 & 0x7FFFFFFF) % 16


def test_a_topic_without_partitions_keeps_no_group() -> None:
    with pytest.raises(ValueError, match="0 partitions"):
        partition_for_group("g", 0)
