"""Commits of engines: writers of attempts, and the driver that decides about them once."""

from __future__ import annotations

import asyncio
import json
import pickle
from collections.abc import Iterator
from typing import Any

import pytest

from penstock.client import (
    AsyncGroupCommits,
    ClientClosedError,
    ConfigurationError,
    GroupCommit,
    GroupCommitConflictError,
    GroupCommits,
    InvalidRequestError,
    InvalidTransactionalIdError,
    InvalidTxnStateError,
    ProducerFencedError,
    RecordTooLargeError,
    StaleGroupCommitError,
    TransactionAbortableError,
    UnknownAttemptError,
)
from penstock.v1 import transactions_pb2
from tests.unit.client.conftest import Background
from tests.unit.client.fake_transactions import FakeTransactions
from tests.unit.client.test_producer import refusal
from tests.unit.client.transactional import asked


class Sync:
    """AsyncGroupCommits, or what it made, as the synchronous one."""

    def __init__(self, client: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._client, self._loop = client, loop

    def __getattr__(self, name: str) -> Any:
        member = getattr(self._client, name)
        if not callable(member):
            return member

        def call(*args: Any, **kwargs: Any) -> Any:
            found = self._loop.run_until_complete(member(*args, **kwargs))
            return Sync(found, self._loop) if name == "begin_attempt" else found

        return call

    def __enter__(self) -> Sync:
        return self

    def __exit__(self, *what: object) -> None:
        self._loop.run_until_complete(self._client.__aexit__(*what))


@pytest.fixture(params=["sync", "asyncio"])
def commits(request: pytest.FixtureRequest, background: Background) -> Iterator[Any]:
    background.cluster.add_topic("t")
    if request.param == "sync":
        with GroupCommits(background.cluster.bootstrap, "q", retry_backoff_ms=10) as made:
            yield made
        return
    loop = asyncio.new_event_loop()
    loop.set_exception_handler(lambda loop, context: None)
    client = AsyncGroupCommits(background.cluster.bootstrap, "q", retry_backoff_ms=10)
    with Sync(client, loop) as other:
        yield other
    loop.close()


def write(commits: Any, number: int, task: int, attempt: int, value: bytes) -> str:
    with commits.begin_attempt(number, task, attempt, linger_ms=0) as writer:
        writer.send("t", value)
        prepared: str = writer.prepare()
        assert prepared == writer.handle
        return prepared


def test_winners_are_there_and_nobody_else(commits: Any, fake: FakeTransactions) -> None:
    assert commits.last_committed() == GroupCommit(-1)
    first = write(commits, 0, 0, 0, b"first")
    second = write(commits, 0, 0, 1, b"again")
    other = write(commits, 0, 1, 0, b"other")
    assert second.endswith("@__attempt/0/0/1/q")
    assert pickle.loads(pickle.dumps(second)) == json.loads(json.dumps(second)) == second
    assert fake.committed("t") == []
    assert commits.commit(0, [second, other]) is False
    assert commits.last_committed() == GroupCommit(0, (second, other))
    assert fake.committed("t") == [b"again", b"other"]
    assert commits.commit(0, (other, second)) is True
    with pytest.raises(GroupCommitConflictError):
        commits.commit(0, [first, other])
    with pytest.raises(StaleGroupCommitError):
        commits.begin_attempt(0, 0, 2)
    commits.commit(1, [])
    with pytest.raises(StaleGroupCommitError):
        commits.commit(0, [second, other])
    with pytest.raises(UnknownAttemptError):
        commits.commit(2, [first])


def test_a_commit_whose_answer_is_lost_is_found_to_be_one(
    commits: Any, fake: FakeTransactions
) -> None:
    winner = write(commits, 0, 0, 0, b"v")
    losses = iter(["lose"])
    fake.on_ask = lambda what, request: next(losses, None) if what == "CommitGroup" else None
    assert commits.commit(0, [winner]) is True
    assert fake.committed("t") == [b"v"]


def test_what_is_not_prepared_is_aborted_with_its_block(
    commits: Any, fake: FakeTransactions
) -> None:
    with commits.begin_attempt(0, 0, 0, linger_ms=0) as writer:
        writer.send("t", b"v")
        writer.flush()
    with pytest.raises(UnknownAttemptError):
        commits.commit(0, [writer.handle])
    with commits.begin_attempt(0, 1, 0, linger_ms=0) as prepared:
        prepared.send("t", b"v")
        handle = prepared.prepare()
        assert prepared.prepare() == handle, "whoever lost the answer may ask again"
        with pytest.raises(InvalidTxnStateError, match="it is prepared"):
            prepared.send("t", b"late")
        prepared.abort()
        with pytest.raises(InvalidTxnStateError, match="begin another one"):
            prepared.send("t", b"late")
    ends = asked(fake, transactions_pb2.EndTransactionRequest)
    assert [end.transactional_id for end in ends] == ["__attempt/0/0/0/q", "__attempt/0/1/0/q"]
    assert not any(end.commit for end in ends)


@pytest.mark.parametrize("sends", [False, True])
def test_an_attempt_is_aborted_with_its_block_where_nothing_left_for_a_broker(
    commits: Any, sends: bool
) -> None:
    with commits.begin_attempt(0, 0, 0, linger_ms=60_000) as writer:
        if sends:
            writer.send("t", b"v")
    with pytest.raises(UnknownAttemptError):
        commits.commit(0, [writer.handle])


def test_an_attempt_of_which_a_record_failed_is_not_prepared(
    commits: Any, fake: FakeTransactions
) -> None:
    async def refuse(node: Any, request: Any) -> Any:
        return refusal(request, RecordTooLargeError("too large for the topic"))

    fake.cluster.on_produce = refuse
    with commits.begin_attempt(0, 0, 0, linger_ms=0) as writer:
        writer.send("t", b"v")
        with pytest.raises(TransactionAbortableError, match="too large"):
            writer.prepare()


def test_the_same_attempt_begun_again_fences_the_one_before(
    commits: Any, fake: FakeTransactions
) -> None:
    with commits.begin_attempt(0, 0, 0, linger_ms=0) as old:
        old.send("t", b"old")
        old.flush()
        assert write(commits, 0, 0, 0, b"new") != old.handle
        old.send("t", b"late")
        with pytest.raises(ProducerFencedError):
            old.prepare()


def test_the_handle_of_a_writer_does_not_stand_for_one_that_began_the_same_attempt_again(
    commits: Any, fake: FakeTransactions
) -> None:
    first = write(commits, 0, 0, 0, b"first")
    with commits.begin_attempt(0, 0, 0, linger_ms=0) as second:
        second.send("t", b"half of the second")
        second.flush()
        with pytest.raises(UnknownAttemptError):
            commits.commit(0, [first])
        assert commits.last_committed() == GroupCommit(-1)
        second.send("t", b"the other half")
        second.prepare()
    commits.commit(0, [second.handle])
    assert fake.committed("t") == [b"half of the second", b"the other half"]
    assert commits.last_committed() == GroupCommit(0, (second.handle,))
    assert commits.commit(0, [second.handle]) is True
    with pytest.raises(GroupCommitConflictError):
        commits.commit(0, [first])


@pytest.mark.parametrize(
    "other",
    [
        "",
        "orders",
        "__attempt/0/0/0/q",
        "-1@__attempt/0/0/0/q",
        "01@__attempt/0/0/0/q",
        "1@__attempt/0/2147483648/0/q",
        "9223372036854775808@__attempt/0/0/0/q",
    ],
)
def test_what_is_no_handle_is_refused_before_anything_is_asked(
    commits: Any, fake: FakeTransactions, other: str
) -> None:
    with pytest.raises(InvalidRequestError, match=r"handles, as prepare\(\) returns them"):
        commits.commit(0, [other])
    for foreign in ("1@__attempt/0/0/0/other", "1@__attempt/1/0/0/q"):
        with pytest.raises(UnknownAttemptError, match="another group or epoch number"):
            commits.commit(0, [foreign])
    assert not fake.asked


def test_an_attempt_lasts_until_the_driver_commits(commits: Any, fake: FakeTransactions) -> None:
    with commits.begin_attempt(0, 0, 0), commits.begin_attempt(0, 1, 0, transaction_timeout_ms=9):
        pass
    requests = asked(fake, transactions_pb2.BeginAttemptRequest)
    assert [request.transaction_timeout_ms for request in requests] == [900_000, 9]
    assert all(len(request.instance_id) == 16 for request in requests)
    assert [(r.group, r.epoch_number, r.task, r.attempt) for r in requests] == [
        ("q", 0, 0, 0),
        ("q", 0, 1, 0),
    ]


def test_arguments_are_looked_at_before_anything_is_asked(
    commits: Any, fake: FakeTransactions, background: Background
) -> None:
    for numbers in ((-1, 0, 0), (0, 2**31, 0), (0, 0, "1"), (2**63, 0, 0)):
        with pytest.raises(InvalidRequestError, match="a whole number"):
            commits.begin_attempt(*numbers)
    with pytest.raises(InvalidRequestError, match="winners"):
        commits.commit(0, [7])
    with pytest.raises(ConfigurationError, match="transactional_id"):
        commits.begin_attempt(0, 0, 0, transactional="t")
    with pytest.raises(ConfigurationError, match="leave it out"):
        commits.begin_attempt(0, 0, 0, transactional_id="t")
    for make in (GroupCommits, AsyncGroupCommits):
        with pytest.raises(InvalidTransactionalIdError, match="must not be empty"):
            make(background.cluster.bootstrap, "")
        with pytest.raises(ConfigurationError, match="acks"):
            make(background.cluster.bootstrap, "q", acks=1)  # type: ignore[call-arg]
    assert not fake.asked
    commits.close()
    with pytest.raises(ClientClosedError):
        commits.begin_attempt(0, 0, 0)
    with pytest.raises(ClientClosedError):
        commits.last_committed()
