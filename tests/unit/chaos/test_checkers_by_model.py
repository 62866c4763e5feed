"""Correct executions of small models pass every checker; what is doctored at random is flagged."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from penstock.chaos.checkers import Evidence
from penstock.chaos.checkers.registry import applicable, judge
from penstock.chaos.verdict import Valid
from tests.unit.chaos.histories import FAIL, FAULTY, INFO, OK, Script

seeds = st.integers(0, 2**32)
Record = tuple[str, int]


def verdicts(script: Script, evidence: Evidence = FAULTY) -> dict[str, Valid]:
    history = script.history
    return {
        verdict.checker: verdict.valid
        for verdict in judge(applicable(history, evidence), history, evidence)
    }


@dataclass
class Log:
    """Two partitions; producers whose appends may fail or never be answered; readers."""

    random: Random
    script: Script = field(default_factory=Script)
    logs: list[list[Record | None]] = field(default_factory=lambda: [[], []])
    """None is a control record, or whatever else is no record."""
    numbers: dict[tuple[str, int], int] = field(default_factory=dict)
    positions: dict[tuple[str, int], int] = field(default_factory=dict)
    acknowledged: list[tuple[int, int]] = field(default_factory=list)
    failed: list[tuple[int, Record]] = field(default_factory=list)

    def append(self) -> None:
        producer, partition = self.random.choice("pqr"), self.random.randrange(2)
        first, count = self.numbers.get((producer, partition), 0), self.random.randint(1, 4)
        self.numbers[producer, partition] = first + count
        records = [(producer, first + at) for at in range(count)]
        type_ = self.random.choice([OK, OK, OK, FAIL, INFO])
        log = self.logs[partition]
        offset = len(log)
        if type_ is FAIL:
            self.failed += [(partition, record) for record in records]
        elif type_ is OK or self.random.random() < 0.5:
            log += records
            if self.random.random() < 0.2:
                log.append(None)
        if type_ is OK:
            self.acknowledged += [(partition, offset + at) for at in range(count)]
        self.script.append(producer, first, count, offset, type_=type_, partition=partition)

    def poll(self) -> None:
        reader, partition = self.random.choice("xy"), self.random.randrange(2)
        at = self.positions.get((reader, partition), 0)
        if self.random.random() < 0.1:
            at = self.random.randint(0, len(self.logs[partition]))
            self.script.seek(reader, at, partition)
        after = min(len(self.logs[partition]), at + self.random.randint(0, 6))
        self.read(reader, partition, at, after)
        self.positions[reader, partition] = after

    def read(
        self, reader: str, partition: int, at: int, after: int, *, final: bool = False
    ) -> None:
        runs: list[tuple[int, int, str, int, int]] = []
        for offset in range(at, after):
            record = self.logs[partition][offset]
            if record is None:
                continue
            last = runs[-1] if runs else None
            follows = last and last[1] + last[4] == offset and last[2] == record[0]
            if last and follows and last[3] + last[4] == record[1] and self.random.random() < 0.7:
                runs[-1] = (*last[:4], last[4] + 1)
            else:
                runs.append((partition, offset, *record, 1))
        ends = {partition: len(self.logs[partition])}
        self.script.poll(reader, {partition: at}, runs, {partition: after}, ends, final=final)

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.random.choice([self.append, self.poll])()

    def finish(self) -> None:
        for partition, log in enumerate(self.logs):
            at = 0
            self.script.seek("f", 0, partition, final=True, where="earliest")
            while at < len(log) or not log:
                after = min(len(log), at + self.random.randint(1, 9))
                self.read("f", partition, at, after, final=True)
                at = after
                if not log:
                    break

    def doctor(self, how: str) -> set[str]:
        """Break what a log promises; the checkers of which one is to find it."""
        assume(self.acknowledged)
        partition, offset = self.random.choice(self.acknowledged)
        log = self.logs[partition]
        if how == "truncate":
            del log[offset:]
            return {"lost-write"}
        if how == "hole":
            log[offset] = None
            log.append(None)
            return {"unseen-write"}
        if how == "move":
            log.append(log[offset])
            log[offset] = None
            # Where readers had it at the first offset as well, it is there twice.
            return {"inconsistent-offset", "duplicate"}
        if how == "double":
            log.append(log[offset])
            return {"duplicate"}
        if how == "reorder":
            record = log[offset]
            assert record is not None
            log.insert(0, (record[0], self.numbers[record[0], partition] - 1))
            # All others move up by one: what readers had been given before is there twice.
            return {"reorder", "duplicate"}
        if how == "phantom":
            log.append((self.random.choice("pqrs"), 1000))
            return {"phantom"}
        if how == "ghost":
            assume(self.failed)
            partition, failed = self.random.choice(self.failed)
            self.logs[partition].append(failed)
            return {"error-honesty"}
        at = self.positions.get(("x", partition), 0)
        if how == "skip":
            assume(at <= offset)
            self.script.poll("x", {partition: at}, [], {partition: offset + 1})
            return {"skipped-poll"}
        self.read("x", partition, at, at)
        self.read("x", partition, offset, offset)
        assume(at != offset)
        return {"poll-order"}


@given(seed=seeds)
@settings(max_examples=60, deadline=None)
def test_a_log_that_keeps_its_promises_passes(seed: int) -> None:
    model = Log(Random(seed))
    model.run(40)
    model.finish()
    found = verdicts(model.script)
    assert Valid.FALSE not in found.values(), found
    assert found["lost-write"] is Valid.TRUE or not model.acknowledged
    assert found["phantom"] is Valid.TRUE


BUGS = ("truncate", "hole", "move", "double", "reorder", "phantom", "ghost", "skip", "jump")


@pytest.mark.parametrize("how", BUGS)
@given(seed=seeds)
@settings(max_examples=25, deadline=None)
def test_a_log_that_breaks_a_promise_is_flagged(how: str, seed: int) -> None:
    model = Log(Random(seed))
    model.run(30)
    checkers = model.doctor(how)
    model.finish()
    found = verdicts(model.script)
    assert Valid.FALSE in {found[name] for name in checkers}, found


@dataclass
class Group:
    """Two partitions that are handed on between members, of which some do not hear of it."""

    random: Random
    script: Script = field(default_factory=Script)
    ends: list[int] = field(default_factory=lambda: [0, 0])
    committed: list[int] = field(default_factory=lambda: [0, 0])
    owner: list[str] = field(default_factory=lambda: ["", ""])
    owned_since: list[int] = field(default_factory=lambda: [0, 0])
    """Of each partition the generation in which its owner got it."""
    kept_since: int | None = None
    """The generation of the first commit: a group without offsets may be forgotten, and begin anew,
    so that nothing can be said of what was before."""
    position: dict[tuple[str, int], int] = field(default_factory=dict)
    generation_of: dict[str, int] = field(default_factory=dict)
    zombies: list[tuple[str, int, int]] = field(default_factory=list)
    generation: int = 0
    members: int = 0

    def listen(self, f: str, member: str, generation: int, partition: int) -> None:
        asked = {"group": "g", "member": member, "generation": generation}
        named = {**asked, "partitions": [f"orders-{partition}"]}
        self.script.do(f"{member}/listener", f, named)

    def write(self) -> None:
        partition, count = self.random.randrange(2), self.random.randint(1, 4)
        self.script.append(
            "p", self.ends[partition], count, self.ends[partition], partition=partition
        )
        self.ends[partition] += count

    def hand_on(self) -> None:
        partition = self.random.randrange(2)
        before, self.generation = self.owner[partition], self.generation + 1
        if before:
            if self.random.random() < 0.5:
                self.generation_of[before] = self.generation
                self.listen("revoked", before, self.generation, partition)
            else:
                self.zombies.append((before, partition, self.generation_of[before]))
                # A zombie has nothing any more, though it does not know.
                self.owner = ["" if owner == before else owner for owner in self.owner]
        self.members += 1
        self.take(partition, f"m{self.members}")

    def take(self, partition: int, member: str) -> None:
        self.owner[partition], self.owned_since[partition] = member, self.generation
        self.generation_of[member] = self.generation
        self.listen("assigned", member, self.generation, partition)
        self.position[member, partition] = self.committed[partition]

    def work(self) -> None:
        partition = self.random.randrange(2)
        if member := self.owner[partition]:
            self.poll(member, partition)

    def poll(self, member: str, partition: int) -> None:
        at = self.position[member, partition]
        after = min(self.ends[partition], at + self.random.randint(0, 5))
        runs = [(partition, at, "p", at, after - at)] if after > at else []
        self.script.poll(
            member, {partition: at}, runs, {partition: after}, {partition: self.ends[partition]},
            member=member, generation=self.generation_of[member],
        )  # fmt: skip
        self.position[member, partition] = after

    def commit(self) -> None:
        partition = self.random.randrange(2)
        if member := self.owner[partition]:
            offset = self.position[member, partition]
            if offset:
                self.committed[partition] = offset
                if self.kept_since is None:
                    self.kept_since = self.generation
                self.accept(member, partition, self.generation_of[member], offset)

    def accept(self, member: str, partition: int, generation: int, offset: int, **more) -> None:
        asked = {"group": "g", "member": member, "generation": generation}
        offsets = {f"orders-{partition}": offset}
        self.script.do(member, "commit-offsets", {**asked, "offsets": offsets}, **more)

    def zombie(self) -> None:
        if self.zombies:
            member, partition, generation = self.random.choice(self.zombies)
            offset = self.position[member, partition]
            self.accept(member, partition, generation, offset, type_=FAIL)

    def ask(self, *, final: bool = False) -> None:
        offsets = {f"orders-{number}": offset for number, offset in enumerate(self.committed)}
        told = {name: offset for name, offset in offsets.items() if offset}
        asked = {"group": "g"}
        self.script.do("admin", "committed-offsets", asked, {"offsets": told}, final=final)

    def run(self, steps: int) -> None:
        does = [self.write, self.write, self.hand_on, self.commit, self.zombie, self.ask]
        for _ in range(steps):
            self.random.choice([*does, self.work, self.work, self.work])()

    def finish(self) -> None:
        for partition in range(2):
            if not self.owner[partition]:
                self.generation += 1
                self.members += 1
                self.take(partition, f"m{self.members}")
            member = self.owner[partition]
            while self.position[member, partition] < self.ends[partition]:
                self.poll(member, partition)
            if end := self.ends[partition]:
                self.committed[partition] = end
                self.accept(member, partition, self.generation_of[member], end)
        self.ask(final=True)

    def doctor(self, how: str) -> set[str]:
        """Break what a group promises; the checkers of which one is to find it."""
        partition = self.random.randrange(2)
        member = self.owner[partition]
        assume(member)
        since = self.kept_since
        if how == "zombie":
            live = [
                one
                for one in self.zombies
                if self.owner[one[1]] and since is not None and self.owned_since[one[1]] >= since
            ]
            assume(live)
            zombie, partition, generation = self.random.choice(live)
            self.accept(zombie, partition, generation, self.committed[partition])
            return {"zombie-commit"}
        if how == "second owner":
            assume(since is not None)
            self.listen("assigned", member, self.generation_of[member], partition)
            self.listen("assigned", "other", self.generation_of[member], partition)
            return {"group-exclusive"}
        if how == "back":
            assume(self.committed[partition])
            self.committed[partition] -= 1
            self.ask()
            return {"committed-forward"}
        self.script.append("p", self.ends[partition], 1, self.ends[partition], partition=partition)
        self.ends[partition] += 1
        self.position[member, partition] = self.ends[partition]
        return {"group-processed"}


@given(seed=seeds)
@settings(max_examples=60, deadline=None)
def test_a_group_that_keeps_its_promises_passes(seed: int) -> None:
    model = Group(Random(seed))
    model.run(40)
    model.finish()
    found = verdicts(model.script)
    assert Valid.FALSE not in found.values(), found
    assert found["group-exclusive"] is Valid.TRUE


@pytest.mark.parametrize("how", ["zombie", "second owner", "back", "passed over"])
@given(seed=seeds)
@settings(max_examples=25, deadline=None)
def test_a_group_that_breaks_a_promise_is_flagged(how: str, seed: int) -> None:
    model = Group(Random(seed))
    model.run(40)
    checkers = model.doctor(how)
    model.finish()
    found = verdicts(model.script)
    assert Valid.FALSE in {found[name] for name in checkers}, found
