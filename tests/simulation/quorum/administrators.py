"""Administrators, as the controllers see them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from penstock.v1 import cluster_pb2, controller_pb2
from penstock.wire.errors import ErrorCode
from tests.simulation.quorum.clients import Client

if TYPE_CHECKING:
    from tests.simulation.quorum.world import World

_OTHER_PART: Final = 0.35  # Of what is left after deletions and moves.


class Administrator(Client):
    """Makes, changes, moves and deletes topics, and asks until it is answered."""

    def __init__(self, world: World, node_id: int) -> None:
        super().__init__(world, node_id)
        self._topics: list[tuple[str, bytes]] = []
        self._count = 0
        self.spawn(self._work)

    async def _work(self) -> None:
        while True:
            await self.pause(0.02, self.world.settings.client_pause_s)
            if self.rng.random() < 0.05:
                self._repeat_something()
            if self._topics and self.rng.random() < self.world.settings.deletions:
                await self._delete()
            elif self._topics and self.rng.random() < 0.3:
                await self._move()
            elif self.rng.random() < _OTHER_PART:
                await self._do_something_else()
            else:
                await self._create()

    async def ask(self, command: cluster_pb2.Command, attempts: int = 12) -> Any:
        """The command's result, or None when nobody knows."""
        for _ in range(attempts):
            request = controller_pb2.ExecuteAdminRequest(command=command)
            response = await self.call("ExecuteAdmin", request)
            if response is not None:
                result = response.result
                if not result.HasField("error"):
                    self.world.checkers.acknowledged(result.index)
                    return result
                self.heed(result.error)
                if result.error.code not in (
                    ErrorCode.NOT_CONTROLLER,
                    ErrorCode.REQUEST_TIMED_OUT,
                    ErrorCode.STALE_CONTROLLER_EPOCH,
                    ErrorCode.DUPLICATE_PROPOSAL,
                ):
                    return result
            await self.pause(0.05, 0.3)
        return None

    async def _create(self) -> None:
        self._count += 1
        name, topic_id = f"t-{self.node_id}-{self._count}", self.rng.randbytes(16)
        command = cluster_pb2.Command(
            create_topic=cluster_pb2.CreateTopicCommand(
                name=name,
                topic_id=topic_id,
                partition_count=self.rng.randint(1, 3),
                replication_factor=self.rng.randint(1, 3),
            )
        )
        result = await self.ask(command)
        if result is not None and not result.HasField("error"):
            self._topics.append((name, topic_id))
            self.world.topics_promised[topic_id] = name

    async def _delete(self) -> None:
        name, topic_id = self._topics.pop(self.rng.randrange(len(self._topics)))
        self.world.topics_promised.pop(topic_id, None)  # Gone already where a majority was lost.
        delete = cluster_pb2.DeleteTopicCommand(name=name, topic_id=topic_id)
        result = await self.ask(cluster_pb2.Command(delete_topic=delete))
        if result is not None and not result.HasField("error"):
            self.world.topics_gone[topic_id] = name

    async def _move(self) -> None:
        """Give a partition other replicas, or cancel that."""
        _, topic_id = self.rng.choice(self._topics)
        brokers = sorted(self.world.broker_numbers())
        replicas = self.rng.sample(brokers, self.rng.randint(1, len(brokers)))
        entry = cluster_pb2.ReassignmentEntry(
            topic_id=topic_id,
            partition=self.rng.randrange(2),
            replicas=[] if self.rng.random() < 0.2 else replicas,
        )
        move = cluster_pb2.AlterReassignmentsCommand(partitions=[entry])
        await self.ask(cluster_pb2.Command(alter_reassignments=move), attempts=3)

    async def _do_something_else(self) -> None:
        """One of the commands that nothing is promised about but what holds for all of them."""
        commands = [self._unregister, self._alter_cluster]
        if self._topics:
            commands += [self._alter_topic, self._add_partitions, self._elect]
        command = self.rng.choice(commands)()
        result = await self.ask(command, attempts=3)
        if result is not None:
            how = "refused" if result.HasField("error") else "done"
            self.world.counts[f"{command.WhichOneof('body')}, {how}"] += 1

    def _unregister(self) -> cluster_pb2.Command:
        """Mostly refused, for the broker lives; one that is dead registers anew when it starts."""
        fenced = [number for number in self.world.broker_numbers() if self._is_down(number)]
        number = self.rng.choice(fenced or list(self.world.broker_numbers()))
        return cluster_pb2.Command(
            unregister_broker=cluster_pb2.UnregisterBrokerCommand(node_id=number)
        )

    def _is_down(self, number: int) -> bool:
        broker = self.world.brokers.get(number)
        return broker is None or broker.fenced

    def _alter_cluster(self) -> cluster_pb2.Command:
        key = self.rng.choice(("broker.disconnect.grace.ms", "leader.imbalance.check.interval.ms"))
        alter = cluster_pb2.AlterClusterConfigsCommand()
        if self.rng.random() < 0.3:
            alter.remove.append(key)
        else:
            alter.set[key] = self.rng.choice(("200", "500", "1000"))
        return cluster_pb2.Command(alter_cluster_configs=alter)

    def _alter_topic(self) -> cluster_pb2.Command:
        alter = cluster_pb2.AlterTopicConfigsCommand(topic=self.rng.choice(self._topics)[0])
        if self.rng.random() < 0.3:
            alter.remove.append("min.insync.replicas")
        else:
            alter.set["min.insync.replicas"] = self.rng.choice(("1", "2"))
        return cluster_pb2.Command(alter_topic_configs=alter)

    def _add_partitions(self) -> cluster_pb2.Command:
        more = cluster_pb2.CreatePartitionsCommand(
            topic=self.rng.choice(self._topics)[0], total_count=self.rng.randint(2, 5)
        )
        return cluster_pb2.Command(create_partitions=more)

    def _elect(self) -> cluster_pb2.Command:
        elect = cluster_pb2.ElectLeadersCommand(type=cluster_pb2.ELECTION_TYPE_PREFERRED)
        elect.partitions.add(
            topic_id=self.rng.choice(self._topics)[1], partition=self.rng.randrange(2)
        )
        return cluster_pb2.Command(elect_leaders=elect)

    def _repeat_something(self) -> None:
        """An entry that no rule of Raft would let into the log again: it must do nothing."""
        checkers = self.world.checkers
        indices = sorted(checkers.decided)
        entry = checkers.decided[self.rng.choice(indices)][1] if indices else b""
        process = self.world.some_leader()
        if entry[:1] == b"\x42" and process is not None:
            process.loop.enter(self._submit, process, entry[1:])

    def _submit(self, process: Any, payload: bytes) -> None:
        if process.shell._core.is_active:
            self.world.checkers.counts["entries repeated"] += 1
            future = process.quorum.submit(payload)

            def forget(done: Any) -> object:
                return done.cancelled() or done.exception()

            future.add_done_callback(forget)
