"""Where brokers believe that the active controller is."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.broker.controller_directory import ActiveController, ControllerDirectory


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
