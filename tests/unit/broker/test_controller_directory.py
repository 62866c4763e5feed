"""Where brokers believe that the active controller is, and what comes of asking it."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from grpc import aio

from penstock.broker import controller_directory
from penstock.broker.controller_directory import ActiveController, ControllerDirectory
from penstock.raft_meta.connecting import NodeConnector
from penstock.v1 import controller_pb2
from penstock.wire.errors import (
    NotControllerError,
    NotEnoughVotersError,
    PenstockError,
    RequestTimedOutError,
)


@pytest.fixture
def directory() -> ControllerDirectory:
    connector: Any = None  # Nothing is connected to.
    return ControllerDirectory({3: ("old", 1)}, connector)


def test_an_older_epoch_is_ignored(directory: ControllerDirectory) -> None:
    directory.observe(3, 7, "c", 1)
    directory.observe(1, 6, "a", 1)
    assert directory.active == ActiveController(3, 7, "c:1")


def test_another_address_of_the_same_controller_is_taken(directory: ControllerDirectory) -> None:
    directory.observe(3, 7, "old", 1)  # Said by who has not heard yet that it was replaced.
    directory.observe(3, 7, "new", 1)
    assert directory.active == ActiveController(3, 7, "new:1")


async def test_the_same_news_wake_nobody(directory: ControllerDirectory) -> None:
    directory.observe(3, 7, "c", 1)
    news = directory._news
    directory.observe(3, 7, "c", 1)
    assert directory._news is news


# Asking the active controller.

REFUSED = (
    "failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:1: Failed to connect "
    "to remote host: Connection refused"
)
LONG_MS = 600_000
ENOUGH_S = 60.0


class Controllers:
    """What each attempt meets, the last of it again and again; and whether to go on."""

    def __init__(self, *outcomes: aio.AioRpcError | PenstockError | None) -> None:
        self.outcomes = list(outcomes)
        self.attempts = 0
        self.looks = 0
        self.has_majority_after = 1 << 60

    async def alter_voters(self, _stub: object, _left_s: float) -> Any:
        outcome = self.outcomes[min(self.attempts, len(self.outcomes) - 1)]
        self.attempts += 1
        match outcome:
            case aio.AioRpcError():
                raise outcome
            case PenstockError():
                return controller_pb2.AlterVotersResponse(error=outcome.to_proto())
            case _:
                return controller_pb2.AlterVotersResponse()

    async def require_founded(self) -> None:
        """It is."""

    async def require_majority(self) -> None:
        self.looks += 1
        if self.looks <= self.has_majority_after:
            raise NotEnoughVotersError("nobody answers; next: start them")


def failed(details: str, code: grpc.StatusCode = grpc.StatusCode.UNAVAILABLE) -> aio.AioRpcError:
    return aio.AioRpcError(code, aio.Metadata(), aio.Metadata(), details, None)


LOST = [failed("Socket closed"), failed("Deadline Exceeded", grpc.StatusCode.DEADLINE_EXCEEDED)]


@pytest.fixture
async def asking() -> AsyncIterator[ControllerDirectory]:
    directory = ControllerDirectory({3: ("127.0.0.1", 1)}, NodeConnector(None))
    directory.observe(3, 7, "127.0.0.1", 1)
    yield directory
    await directory.close()


async def asked(
    directory: ControllerDirectory,
    controllers: Controllers,
    timeout_ms: int = 100,
    *,
    gives_up: bool = True,
) -> controller_pb2.AlterVotersResponse:
    directory.while_none_is_active(controllers)
    answer: controller_pb2.AlterVotersResponse = await directory.call(
        controllers.alter_voters,
        lambda answer: answer.error if answer.HasField("error") else None,
        timeout_ms=timeout_ms,
        what="the change",
        gives_up=gives_up,
    )
    return answer


@pytest.mark.parametrize("lost", LOST, ids=lambda error: error.code().name)
async def test_a_question_whose_answer_was_lost_has_an_unknown_outcome(
    asking: ControllerDirectory, lost: aio.AioRpcError
) -> None:
    with pytest.raises(RequestTimedOutError, match=r"the change: .*outcome is unknown"):
        await asked(asking, Controllers(lost, failed(REFUSED)))


@pytest.mark.parametrize("nothing", [failed(REFUSED), NotControllerError("ask another")])
async def test_a_question_that_reached_nobody_who_acts_on_it_changed_nothing(
    asking: ControllerDirectory, nothing: aio.AioRpcError | PenstockError
) -> None:
    with pytest.raises(
        NotControllerError, match=r"Nothing was done; next: .*quorum status"
    ) as told:
        await asked(asking, Controllers(nothing))
    assert "unknown" not in told.value.message


@pytest.mark.parametrize("host", ["127.0.0.1", "nowhere.invalid"])
async def test_grpc_says_in_these_words_that_it_found_no_connection(
    asking: ControllerDirectory, host: str
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # And does not listen.
        asking.observe(3, 8, host, taken.getsockname()[1])
        with pytest.raises(NotControllerError, match=r"UNAVAILABLE .*Nothing was done"):
            await asking.call(
                lambda stub, _left_s: stub.AlterVoters(
                    controller_pb2.AlterVotersRequest(), timeout=ENOUGH_S
                ),
                lambda _answer: None,
                timeout_ms=100,
                what="the change",
            )


async def test_a_person_is_told_soon_that_there_is_no_majority(
    asking: ControllerDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(controller_directory, "_MAJORITY_MS", 10)
    with pytest.raises(
        NotEnoughVotersError, match="the change was not carried out: nobody answers; next: start"
    ):
        await asked(asking, Controllers(failed(REFUSED)), LONG_MS)


async def test_what_may_have_been_done_is_not_denied_when_there_is_no_majority_any_more(
    asking: ControllerDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(controller_directory, "_MAJORITY_MS", 10)
    with pytest.raises(RequestTimedOutError, match="outcome is unknown; nobody answers"):
        await asked(asking, Controllers(LOST[0], failed(REFUSED)), LONG_MS)


async def test_with_a_majority_an_election_is_waited_for(
    asking: ControllerDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(controller_directory, "_MAJORITY_MS", 10)
    controllers = Controllers(failed(REFUSED), failed(REFUSED), failed(REFUSED), None)
    controllers.has_majority_after = 0
    await asked(asking, controllers, LONG_MS)
    assert controllers.attempts == 4
    assert controllers.looks >= 1


async def test_no_election_takes_so_long_that_the_majority_is_looked_for(
    asking: ControllerDirectory,
) -> None:
    controllers = Controllers(failed(REFUSED), None)
    await asked(asking, controllers, LONG_MS)
    assert controllers.looks == 0


async def test_what_brokers_ask_for_themselves_is_asked_again_without_a_majority_too(
    asking: ControllerDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(controller_directory, "_MAJORITY_MS", 10)
    controllers = Controllers(failed(REFUSED), failed(REFUSED), None)
    await asked(asking, controllers, LONG_MS, gives_up=False)
    assert controllers.looks == 0
