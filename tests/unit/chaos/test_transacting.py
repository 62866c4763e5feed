"""What a transactional client writes down of what its producer says."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from penstock.chaos.history import History, HistoryWriter, Operation, Type, read_history
from penstock.chaos.recorder import Recorder
from penstock.chaos.workloads import ClientSpec, Plan, Surroundings, transacting
from penstock.chaos.workloads.transacting import Fate, Transactor
from penstock.chaos.workloads.transfer import end
from penstock.client import (
    InvalidTxnStateError,
    NetworkError,
    PenstockError,
    ProducerFencedError,
    RecordMetadata,
    RequestTimedOutError,
    TransactionAbortableError,
)
from penstock.client.model import GroupMetadata

ABORTABLE = TransactionAbortableError("nothing of it is committed")
FENCED = ProducerFencedError("another producer has taken over")
SILENT = RequestTimedOutError("may be committed or not; call it again")


class PaperProducer:
    """Answers what it was told to; a call for which nothing is left succeeds."""

    made: list[PaperProducer]
    answers: dict[str, list[PenstockError]]

    def __init__(self, bootstrap: str, **settings: Any) -> None:
        self.settings = settings
        self.closed = False
        self.calls: list[str] = []
        self.offset = 0
        PaperProducer.made.append(self)

    async def _do(self, call: str) -> None:
        self.calls.append(call)
        answers = self.answers.get(call, [])
        if answers:
            raise answers.pop(0)

    async def begin_transaction(self) -> None:
        await self._do("begin")

    async def commit_transaction(self) -> None:
        await self._do("commit")

    async def abort_transaction(self) -> None:
        await self._do("abort")

    async def send_offsets_to_transaction(self, offsets: Any, group: Any) -> None:
        await self._do("send-offsets")

    async def send_many(self, topic: str, values: Any, **_: Any) -> Any:
        await self._do("append")
        self.offset += len(values)
        first = self.offset - len(values)
        return _Outcomes([RecordMetadata(topic, 0, first + at, 0) for at in range(len(values))])

    async def close(self, timeout_ms: float | None = None) -> None:
        self.closed = True


class _Outcomes:
    def __init__(self, outcomes: list[RecordMetadata]) -> None:
        self._outcomes = outcomes

    async def outcomes(self) -> list[RecordMetadata]:
        return self._outcomes


@pytest.fixture
def play(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Callable[[Transactor], Awaitable[None]]], History]:
    """Have a transactor play what is given; the history that it wrote."""
    PaperProducer.made, PaperProducer.answers = [], {}
    monkeypatch.setattr(transacting, "AsyncProducer", PaperProducer)
    monkeypatch.setattr(transacting, "PAUSE_S", 0)
    path = tmp_path / "history.jsonl"

    def perform(what: Callable[[Transactor], Awaitable[None]]) -> History:
        async def run() -> None:
            spec = ClientSpec("teller-1", "teller", 0)
            recorder = Recorder(writer, spec.process, 0)
            plan = Plan(7, 3, 1.0, 1.0)
            transactor = Transactor(
                Surroundings("nowhere", plan, spec, Random(7), recorder), topic="t", partitions=2
            )
            await what(transactor)
            await transactor.close()

        writer = HistoryWriter(path)
        asyncio.run(run())
        writer.close()
        return read_history(path)

    return perform


def of(history: History, f: str) -> list[Operation]:
    return list(history.of(f))


@pytest.mark.parametrize(
    ("answers", "fate", "type_"),
    [
        ([], Fate.COMMITTED, Type.OK),
        ([SILENT, SILENT], Fate.COMMITTED, Type.OK),
        ([ABORTABLE], Fate.ABORTED, Type.FAIL),
        ([SILENT, ABORTABLE], Fate.ABORTED, Type.FAIL),
        # It may have been committed by the attempt that had no answer.
        ([SILENT, FENCED], Fate.UNKNOWN, Type.INFO),
        ([FENCED], Fate.UNKNOWN, Type.INFO),
        ([NetworkError("gone")], Fate.UNKNOWN, Type.INFO),
        ([InvalidTxnStateError("none is open")], Fate.UNKNOWN, Type.INFO),
    ],
)
def test_a_commit_fails_only_where_that_is_promised(play, answers, fate, type_) -> None:
    async def commit(transactor: Transactor) -> None:
        PaperProducer.answers = {"commit": list(answers)}
        await transactor.begin()
        assert await transactor.commit() is fate
        assert transactor.has_committed is (fate is Fate.COMMITTED)

    (one,) = of(play(commit), "commit")
    assert one.type is type_


def test_a_commit_that_stays_silent_is_ambiguous(play, monkeypatch) -> None:
    monkeypatch.setattr(transacting, "_INSIST_S", 0.0)

    async def commit(transactor: Transactor) -> None:
        PaperProducer.answers = {"commit": [SILENT]}
        await transactor.begin()
        assert await transactor.commit() is Fate.UNKNOWN

    (one,) = of(play(commit), "commit")
    assert one.type is Type.INFO


@pytest.mark.parametrize(
    ("answers", "type_"),
    [([], Type.OK), ([FENCED], Type.FAIL), ([ABORTABLE], Type.FAIL), ([SILENT], Type.INFO)],
)
def test_a_zombie_asks_to_commit_what_its_successor_has_ended(play, answers, type_) -> None:
    async def haunt(transactor: Transactor) -> None:
        await transactor.begin()
        await transactor.append(0)
        assert await end(transactor, "zombie")
        assert not PaperProducer.made[0].closed
        await transactor.begin()
        PaperProducer.answers = {"commit": list(answers)}
        await transactor.haunt()
        await transactor.haunt()  # It is at rest now.
        assert await transactor.commit() is Fate.COMMITTED

    history = play(haunt)
    zombie, own = of(history, "commit")
    assert (zombie.invoked.p, own.invoked.p) == ("teller-1/zombie", "teller-1")
    assert zombie.type is type_
    first, second = of(history, "begin")
    assert zombie.invoked.value["txn"] == first.invoked.value["txn"]
    assert own.invoked.value["txn"] == second.invoked.value["txn"]
    one, other = PaperProducer.made
    assert one.settings["transactional_id"] == other.settings["transactional_id"]
    assert one.closed
    assert other.closed


def test_names_are_never_used_twice(play) -> None:
    async def live(transactor: Transactor) -> None:
        for _ in range(3):
            for _ in range(2):
                await transactor.begin()
                await transactor.append(1, 3)
                await transactor.commit()
            await transactor.come_back()

    history = play(live)
    txns = [one.invoked.value["txn"] for one in of(history, "begin")]
    assert len(set(txns)) == 6
    appends = [one.invoked.value for one in of(history, "append")]
    numbers = {(one["producer"], one["first"] + at) for one in appends for at in range(3)}
    assert len(numbers) == 18
    assert {one["txn"] for one in appends} == set(txns)


@pytest.mark.parametrize(
    ("ending", "answers", "goes_on", "calls"),
    [
        ("commit", {}, True, ["begin", "commit"]),
        ("abort", {}, True, ["begin", "abort"]),
        ("crash", {}, False, ["begin"]),
        ("commit", {"commit": [ABORTABLE]}, True, ["begin", "commit", "abort"]),
        ("commit", {"commit": [FENCED]}, False, ["begin", "commit"]),
        ("abort", {"abort": [FENCED]}, False, ["begin", "abort"]),
    ],
)
def test_after_an_end_the_same_producer_goes_on_where_it_can(
    play, ending, answers, goes_on, calls
) -> None:
    async def do(transactor: Transactor) -> None:
        PaperProducer.answers = {f: list(errors) for f, errors in answers.items()}
        await transactor.begin()
        assert await end(transactor, ending) is goes_on

    play(do)
    assert PaperProducer.made[0].calls == calls


def test_offsets_that_may_be_in_it_or_not_are_ambiguous(play) -> None:
    async def send(transactor: Transactor) -> None:
        group = GroupMetadata("g", "m", 4)
        await transactor.begin()
        assert await transactor.send_offsets(group, "processor-1.1", {"t-0": 7})
        PaperProducer.answers = {"send-offsets": [ABORTABLE]}
        assert not await transactor.send_offsets(group, "processor-1.1", {"t-0": 9})

    one, other = of(play(send), "send-offsets")
    assert (one.type, other.type) == (Type.OK, Type.INFO)
    assert one.invoked.value["generation"] == 4
