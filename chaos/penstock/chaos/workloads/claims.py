"""Topics that clients make and delete, and how each stays sure of which are its own.

A creation is known by a number that the client gives it as a config of the topic, a deletion names
the topic's id: so what was asked for and never answered can be found out later, and deleting it
again harms nobody's topic.
"""

from __future__ import annotations

from typing import Any, Final, Self

from penstock.chaos.recorder import Recorder
from penstock.chaos.workloads import Surroundings
from penstock.chaos.workloads.outcomes import is_refused, words_of
from penstock.client import (
    AsyncAdminClient,
    PenstockError,
    UnknownTopicIdError,
    UnknownTopicOrPartitionError,
)

NUMBER: Final = "segment.ms"
"""The config that tells by whom a topic was made: it does nothing where few records come."""
_LEAST: Final = 86_400_000
GONE: Final = (UnknownTopicIdError, UnknownTopicOrPartitionError)


class Claim:
    """One topic's name, as one client sees it. For one task.

    ``first`` is the first of the numbers for its creations; nobody else has any of the
    ``MOST_CREATIONS`` from there on.
    """

    MOST_CREATIONS: Final = 1_000_000

    @classmethod
    def of(
        cls, admin: AsyncAdminClient, surroundings: Surroundings, name: str, number: int
    ) -> Self:
        """Of a client that is the ``number``-th of its kind, in whichever of its lives it is."""
        _, _, life = surroundings.spec.process.partition("~")
        first = (number + 1_000 * int(life or 1)) * cls.MOST_CREATIONS
        return cls(admin, surroundings.recorder, name, first)

    def __init__(self, admin: AsyncAdminClient, recorder: Recorder, name: str, first: int) -> None:
        self.name: Final = name
        self.topic_id: str | None = None
        """That of the topic of this name, where this client has made it and not deleted it."""
        self._admin: Final = admin
        self._recorder: Final = recorder
        self._number = first + _LEAST
        self._in_doubt: set[int] = set()
        self._leaving: str | None = None
        self._gone: set[str] = set()

    async def create(self, f: str, asked: dict[str, Any], **how: Any) -> bool:
        """One operation: make the topic; whether it is certain that it was."""
        self._number += 1
        self._recorder.invoke(f, asked)
        configs = {**how.pop("configs", {}), NUMBER: self._number}
        try:
            made = await self._admin.create_topic(self.name, configs=configs, **how)
        except PenstockError as error:
            if is_refused(error):
                self._recorder.fail(words_of(error))
            else:
                self._in_doubt.add(self._number)
                self._recorder.info(words_of(error))
            return False
        self.topic_id = made.topic_id
        self._recorder.ok({**asked, "topic_id": made.topic_id})
        return True

    async def delete(self, f: str, asked: dict[str, Any]) -> bool:
        """One operation: delete the topic that is its own; whether it is certain that it was."""
        topic_id, self.topic_id = self.topic_id, None
        assert topic_id is not None
        self._recorder.invoke(f, asked)
        try:
            await self._admin.delete_topic(self.name, topic_id=topic_id)
        except PenstockError as error:
            if is_refused(error) and isinstance(error, GONE):
                self._gone.add(topic_id)
                self._recorder.fail(words_of(error))
            elif is_refused(error):
                self.topic_id = topic_id
                self._recorder.fail(words_of(error))
            else:
                self._leaving = topic_id
                self._recorder.info(words_of(error))
            return False
        self._gone.add(topic_id)
        self._recorder.ok({**asked, "topic_id": topic_id})
        return True

    async def settle(self) -> bool:
        """Find out what became of what was not answered; whether no deletion is left to be done.

        This is no operation of its own: the one that nobody knows of may be done at any time. A
        creation that nobody knows of is in nobody's way: if it was done, the name is taken.
        """
        try:
            if self._leaving is not None:
                await self._finish_leaving(self._leaving)
            if self._in_doubt and self.topic_id is None:
                await self._look()
        except PenstockError:
            return False
        return self._leaving is None

    async def _finish_leaving(self, topic_id: str) -> None:
        try:
            await self._admin.delete_topic(self.name, topic_id=topic_id)
        except GONE as error:
            if not is_refused(error):
                raise
        self._gone.add(topic_id)
        self._leaving = None

    async def _look(self) -> None:
        """Whether the topic of the name is of a creation that was never answered."""
        try:
            [found] = await self._admin.describe_topics([self.name])
        except GONE:
            return
        number = int(found.configs.get(NUMBER, 0))
        if number in self._in_doubt and found.topic_id not in self._gone:
            self._in_doubt.discard(number)
            self.topic_id = found.topic_id
