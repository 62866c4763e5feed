"""Which topics metrics show by name: so many, and the others as one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, TypeVar

OTHER: Final = "(other)"
"""The label of all that are not shown by name. No topic has parentheses in its name."""

V = TypeVar("V")


class TopicLabels:
    """Gives names out until there are ``most``. A topic that got its name keeps it until it goes.

    So counters never change their label. Any thread.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._named: dict[str, None] = {}

    def label(self, topic: str) -> str:
        """What the topic is shown under."""
        if topic in self._named:
            return topic
        if len(self._named) >= self._most:
            return OTHER
        self._named[topic] = None
        return topic

    def keep(self, is_there: Callable[[str], bool]) -> None:
        """Forget whatever topic is not there: one that went may have been named once more since."""
        for topic in list(self._named):
            if not is_there(topic):
                self.forget(topic)

    def forget(self, topic: str) -> None:
        """The topic is no more: another may be named."""
        self._named.pop(topic, None)


def largest(
    values: Mapping[tuple[str, str], V], most: int, weight: Callable[[V], float]
) -> tuple[dict[tuple[str, str], V], list[V]]:
    """The heaviest ``most`` of them, and the values of the others."""
    if len(values) <= most:
        return dict(values), []
    ordered = sorted(values.items(), key=lambda item: (-weight(item[1]), item[0]))
    return dict(ordered[:most]), [value for _, value in ordered[most:]]
