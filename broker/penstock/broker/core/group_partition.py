"""Which partition of ``__consumer_offsets`` keeps a group, and so which broker coordinates it."""

from __future__ import annotations


def java_string_hash(text: str) -> int:
    """What Java's ``String.hashCode`` gives: 32 bits, signed, over UTF-16 code units."""
    units = text.encode("utf-16-be", "surrogatepass")
    value = 0
    for high, low in zip(units[::2], units[1::2], strict=True):
        value = (31 * value + (high << 8 | low)) & 0xFFFF_FFFF
    return value - (1 << 32) if value >= 1 << 31 else value


def partition_for_group(group_id: str, partition_count: int) -> int:
    """The partition of ``__consumer_offsets`` that keeps ``group_id``, as Kafka computes it.

    Raises ValueError unless ``partition_count`` is positive. The count of a cluster never
    changes once the topic exists, or groups would lose their offsets.
    """
    if partition_count <= 0:
        raise ValueError(f"a topic with {partition_count} partitions keeps no groups")
    return (java_string_hash(group_id) & 0x7FFF_FFFF) % partition_count
