"""What `penstock quorum add` says while it waits."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError

import pytest

from penstock.cli.quorum_progress import progress, watch
from penstock.client.descriptions import QuorumDescription, QuorumVoter
from penstock.wire.errors import NetworkError, PenstockError


def quorum(match_index: int | None, *, node: int = 4, silent: bool = False) -> QuorumDescription:
    newcomer = None
    if match_index is not None:
        newcomer = QuorumVoter(node, "h", 9094, match_index, is_unreachable=silent)
    return QuorumDescription(
        1, 4, 90, 90, (), 1, 3, True, "leader", last_index=100, catching_up=newcomer
    )


@pytest.mark.parametrize(
    ("seen", "said"),
    [
        (quorum(None), ""),
        (quorum(-1), "controller 4 at h:9094 has not answered yet"),
        (quorum(60), "controller 4 at h:9094 has 60 of 100 entries"),
        (
            quorum(60, silent=True),
            "controller 4 at h:9094 has 60 of 100 entries and does not answer now",
        ),
        (quorum(7, node=5), "controller 4 waits for controller 5, which is being added"),
    ],
)
def test_how_far_it_is(seen: QuorumDescription, said: str) -> None:
    assert progress(seen, 4) == said


def test_what_changed_is_said_once_and_trouble_is_passed_over(
    capsys: pytest.CaptureFixture[str],
) -> None:
    over = threading.Event()
    script: list[QuorumDescription | PenstockError] = [
        quorum(-1), quorum(-1), NetworkError("lost"), quorum(60), quorum(60), quorum(99)
    ]  # fmt: skip
    answers: Iterator[QuorumDescription | PenstockError] = iter(script)

    def describe() -> QuorumDescription:
        answer = next(answers, None)
        if answer is None:
            over.set()
            return quorum(100)
        if isinstance(answer, PenstockError):
            raise answer
        return answer

    watch(describe, 4, over, look_seconds=0)
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.splitlines() == [
        "controller 4 at h:9094 has not answered yet",
        "controller 4 at h:9094 has 60 of 100 entries",
        "controller 4 at h:9094 has 99 of 100 entries",
    ]


@pytest.mark.parametrize("error", [CancelledError(), RuntimeError("the loop is closed")])
def test_the_end_of_the_command_is_no_trouble_of_its_own(
    error: Exception, capsys: pytest.CaptureFixture[str]
) -> None:
    over = threading.Event()

    def describe() -> QuorumDescription:
        over.set()  # The command ends, and its client with it.
        raise error

    watch(describe, 4, over, look_seconds=0)
    assert capsys.readouterr().err == ""


def test_what_nobody_expects_is_not_swallowed() -> None:
    def describe() -> QuorumDescription:
        raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        watch(describe, 4, threading.Event(), look_seconds=0)
