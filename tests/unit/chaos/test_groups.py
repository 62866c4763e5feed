"""Groups whose partitions have two owners or none, and zombies that commit."""

from __future__ import annotations

from penstock.chaos.checkers import Evidence, HeldFault
from penstock.chaos.checkers.groups import GroupComplete, GroupExclusive, ZombieCommit
from tests.unit.chaos.histories import FAIL, INFO, MS, Script, is_false, is_true, is_unknown

CALM = Evidence()


class GroupScript(Script):
    """The group g of the topic orders."""

    def listen(self, f: str, member: str, generation: int | None, *partitions: int) -> None:
        names = [f"orders-{partition}" for partition in partitions]
        asked = {"group": "g", "member": member, "generation": generation, "partitions": names}
        self.do(f"{member}/listener", f, asked)

    def given(self, member: str, generation: int, partition: int, offset: int, count: int) -> None:
        runs = [(partition, offset, "p", offset, count)] if count else []
        after = {partition: offset + count}
        self.poll(member, {partition: offset}, runs, after, member=member, generation=generation)

    def commit(self, member: str, generation: int, offset: int, partition: int = 0, **more) -> None:
        asked = {"group": "g", "member": member, "generation": generation}
        offsets = {f"orders-{partition}": offset}
        self.do(member, "commit-offsets", {**asked, "offsets": offsets}, **more)

    def committed(self, offset: int | None, partition: int = 0, *, final: bool = False) -> None:
        offsets = {} if offset is None else {f"orders-{partition}": offset}
        self.do("admin", "committed-offsets", {"group": "g"}, {"offsets": offsets}, final=final)


def moved() -> GroupScript:
    """Member a has both partitions, gives one to b, and stalls; b takes the other."""
    script = GroupScript()
    script.append("p", 0, 4, 0)
    script.append("p", 0, 4, 0, partition=1)
    script.do("a", "join", {"group": "g", "member": "a"})
    script.listen("assigned", "a", 1, 0, 1)
    script.given("a", 1, 0, 0, 2)
    script.given("a", 1, 1, 0, 2)
    script.commit("a", 1, 2, 0)
    script.commit("a", 1, 2, 1)
    script.do("b", "join", {"group": "g", "member": "b"})
    script.listen("revoked", "a", 2, 1)
    script.listen("assigned", "b", 2, 1)
    script.given("a", 2, 0, 2, 1)
    script.given("b", 2, 1, 2, 2)
    script.commit("b", 2, 4, 1)
    script.listen("assigned", "b", 3, 0)
    script.given("b", 3, 0, 2, 2)
    script.commit("a", 2, 3, 0, type_=FAIL)
    script.listen("lost", "a", 2, 0)
    script.commit("b", 3, 4, 0)
    return script


def test_partitions_that_move_are_one_members() -> None:
    is_true(GroupExclusive(), moved())
    is_true(ZombieCommit(), moved())
    is_true(GroupComplete(), moved())


def test_two_members_with_one_partition_in_one_generation() -> None:
    script = moved()
    script.listen("assigned", "c", 3, 1)
    says = "group g: in generation 3 both b and c have orders-1"
    is_false(GroupExclusive(), script, says)
    left = moved()
    left.do("b", "leave", {"group": "g", "member": "b"})
    left.listen("assigned", "c", 4, 1)
    is_true(GroupExclusive(), left)


def test_a_zombies_commit() -> None:
    script = moved()
    script.commit("a", 2, 3, 0)
    says = "a commit of orders-0 by a in generation 2 was accepted after b had acted on it in"
    verdict = is_false(ZombieCommit(), script, says)
    assert verdict.anomalies[0].records[0]["f"] == "poll"
    unanswered = moved()
    unanswered.commit("a", 2, 3, 0, type_=INFO)
    is_true(ZombieCommit(), unanswered)
    sent = moved()
    asked = {"txn": "t", "group": "g", "member": "a", "generation": 2, "offsets": {"orders-0": 3}}
    sent.do("a", "send-offsets", asked)
    is_false(ZombieCommit(), sent, "in generation 2 was accepted after b")


def test_being_assigned_is_acting() -> None:
    script = GroupScript()
    script.listen("assigned", "b", 3, 0)
    script.commit("a", 2, 3, 0)
    is_false(ZombieCommit(), script, "was accepted after b had acted on it in generation 3")
    meanwhile = GroupScript()
    asked = {"group": "g", "member": "a", "generation": 2, "offsets": {"orders-0": 3}}
    meanwhile.invoke("a", "commit-offsets", asked)
    meanwhile.listen("assigned", "b", 3, 0)
    meanwhile.complete("a", "commit-offsets")
    is_true(ZombieCommit(), meanwhile)


def test_the_generations_of_a_group_that_was_forgotten_begin_anew() -> None:
    script = GroupScript()
    script.append("p", 0, 8, 0)
    script.do("a", "join", {"group": "g", "member": "a"})
    script.listen("assigned", "a", 1, 0)
    script.listen("assigned", "a", 2, 1)
    script.given("a", 2, 0, 0, 4)  # It crashes, and has committed nothing.
    script.listen("assigned", "b", 1, 0)
    script.commit("b", 1, 4)
    is_true(GroupExclusive(), script)
    is_true(ZombieCommit(), script)
    script.listen("assigned", "c", 1, 0)  # Now nothing is forgotten any more.
    is_false(GroupExclusive(), script, "in generation 1 both b and c have orders-0")


def test_who_does_not_know_its_generation_claims_nothing() -> None:
    script = moved()
    script.listen("assigned", "c", None, 0, 1)
    script.listen("assigned", "d", None, 0, 1)
    script.commit("b", 2, 4, 1)
    is_true(GroupExclusive(), script)
    is_true(ZombieCommit(), script)


def test_a_partition_that_nobody_polls_is_left_out() -> None:
    script = moved()
    for step in range(40):
        script.t += 1000 * MS
        script.given("b", 3, 1, 4, 0)
        if step in {2, 39}:
            script.given("b", 3, 0, 4, 0)
    says = "group g: nobody polled orders-0 from 3.0 s to 40.1 s"
    is_false(GroupComplete(), script, says, evidence=CALM)
    is_true(GroupComplete(limit_ms=40_000), script, CALM)
    held = HeldFault("kill", "kill", 19_000 * MS, 19_500 * MS, 20_000 * MS, [1])
    verdict = is_true(GroupComplete(), script, Evidence(faults=[held]))
    assert verdict.figures["longest_left_out_ms"] > 15_000


def read_finally(script: GroupScript) -> None:
    """By a last member, long after the load: partition 1, and then partition 0."""
    script.t += 35_000 * MS
    script.do("auditor", "join", {"group": "g", "member": "auditor"}, final=True)
    for number in (1, 0):
        at = {number: 4}
        script.poll("auditor", at, [], at, member="auditor", generation=4, final=True)


def test_nobody_is_a_member_between_the_load_and_the_final_reads() -> None:
    script = moved()
    script.given("b", 3, 0, 4, 0)
    script.given("b", 3, 1, 4, 0)  # The last one of the load, and not about the other partition.
    read_finally(script)
    is_true(GroupComplete(), script, CALM)


def test_before_the_final_reads_a_partition_is_left_out_as_ever() -> None:
    script = moved()
    for _ in range(33):
        script.t += 1000 * MS
        script.given("b", 3, 1, 4, 0)
    read_finally(script)
    is_false(GroupComplete(), script, "nobody polled orders-0 from 0.0 s to 33.1 s", evidence=CALM)


def test_a_partition_that_is_written_and_never_polled_is_left_out() -> None:
    script = moved()
    script.append("p", 0, 4, 0, partition=7)
    is_unknown(GroupComplete(), script, "group g never polled orders-7")
    for _ in range(40):
        script.t += 1000 * MS
        script.given("b", 3, 1, 4, 0)
        script.given("b", 3, 0, 4, 0)
    is_false(GroupComplete(), script, "nobody polled orders-7", evidence=CALM)


def test_nothing_is_said_without_groups() -> None:
    is_unknown(GroupExclusive(), Script(), "no member was assigned a partition")
    is_unknown(GroupComplete(), Script(), "no member polled")
    is_unknown(ZombieCommit(), Script(), "no commit of a member was accepted")
