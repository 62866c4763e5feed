"""What the active controller refused, told to whoever counts it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from penstock.v1 import cluster_pb2

RefusalCounter = Callable[[str, int], None]
"""Called on the event loop with the command (or ``heartbeat``) and the error's code."""


def nobody_counts(_command: str, _code: int) -> None:
    """What counts where nobody looks."""


def codes_in(result: cluster_pb2.CommandResult) -> Iterator[int]:
    """The codes of what was refused: the whole command, or each of its partitions."""
    if result.HasField("error"):
        yield result.error.code
        return
    body = result.WhichOneof("body")
    if body in ("alter_partition", "elect_leaders", "alter_reassignments"):
        for entry in getattr(result, body).partitions:
            if entry.HasField("error"):
                yield entry.error.code
