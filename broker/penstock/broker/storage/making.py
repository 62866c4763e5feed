"""The directories of new partitions, made many at once and away from the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from penstock.broker.storage.background import BackgroundJobs
from penstock.broker.storage.checkpoints import METADATA_FILE, write_atomically
from penstock.broker.storage.data_directory import DataDirectory
from penstock.broker.storage.placing import file_name
from penstock.wire.ids import TopicIdPartition

_NEW_FILE: Final = os.O_RDWR | os.O_CREAT | os.O_EXCL


class NewDirectories:
    """Makes the directories that empty logs are opened in. Used on the event loop.

    Each is on the disk, with all that is in it, before it can be taken: whose log it is before any
    file of the log, as where a log makes its directory itself. What could not be made is left to
    that, which says why.
    """

    def __init__(self, home: DataDirectory) -> None:
        self._home = home
        self._jobs = BackgroundJobs(f"make in {home.path}")
        self._made: dict[TopicIdPartition, Path] = {}

    def __contains__(self, key: TopicIdPartition) -> bool:
        return key in self._made

    async def make(self, wanted: Mapping[TopicIdPartition, tuple[Path, bytes]]) -> None:
        """Make these directories, with what their ``partition.metadata`` is to say.

        A disk that fails by that fails the data directory. Cancelled, it goes on: what it makes can
        be taken later.
        """
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Exception | None] = loop.create_future()

        def tell(error: Exception | None) -> None:
            if not done.done():
                done.set_result(error)

        def make() -> None:
            error = self._make(wanted)
            with contextlib.suppress(RuntimeError):  # The loop has ended.
                loop.call_soon_threadsafe(tell, error)

        self._jobs.run(make)
        error = await done
        if error is not None:
            self._home.translate(error, "making the directories of new partitions")

    def _make(self, wanted: Mapping[TopicIdPartition, tuple[Path, bytes]]) -> Exception | None:
        """In the thread; what failed first."""
        made: dict[TopicIdPartition, Path] = {}
        disk = self._home.disk
        try:
            for key, (directory, metadata) in wanted.items():
                with contextlib.suppress(FileExistsError):
                    disk.make_directory(directory)
                    made[key] = directory
                    write_atomically(disk, directory / METADATA_FILE, metadata)
            disk.sync_directory(self._home.path)  # Once for all of them.
            for key, directory in list(made.items()):
                os.close(disk.open(directory / file_name(0, "log"), _NEW_FILE))
                disk.sync_directory(directory)
                self._made[key] = made.pop(key)
        except OSError as error:
            for directory in made.values():
                disk.remove_tree(directory)
            return error
        return None

    def take(self, key: TopicIdPartition) -> Path | None:
        """The directory made for the partition, which is the caller's from now on."""
        return self._made.pop(key, None)

    def close(self) -> None:
        """Remove what nobody took: a start would ask what became of its records. Blocks."""
        self._jobs.wait()
        while self._made:
            _, directory = self._made.popitem()
            self._home.disk.remove_tree(directory)
