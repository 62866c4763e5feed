"""What pysyncobj 0.3.17 does with dumps of its state, and that ours never gets as far.

Our snapshots stand on its asking for none. S is its syncobj.py, Z its serializer.py.
"""

from __future__ import annotations

import os
from pathlib import Path

import pysyncobj.syncobj
import pytest

from penstock.raft_meta.engine import _NoSerializer
from tests.unit.raft_meta.attack_clusters import _shipped_classes, shipped_modules
from tests.unit.raft_meta.test_engine_contract import Bare

# The engine as shipped leaves files open (J:95).
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


class Alone:
    """The engine as installed, the only voter, with a dump of ours; it ticks by hand."""

    def __init__(self, directory) -> None:
        self.engine = shipped_modules()
        self.now_s = 10.0
        self.engine.syncobj.monotonicTime = lambda: self.now_s
        self.dump = directory / "dump"
        self.loaded: list[str] = []
        self.stored: list[tuple[str, tuple]] = []
        self.content: tuple | None = None  # Last entry, the one before it, and the nodes.
        self.fails = False
        classes = _shipped_classes()
        conf = self.engine.syncobj.SyncObjConf(
            autoTick=False,
            useFork=True,
            fullDumpFile=str(self.dump),
            serializer=self._store,
            deserializer=self._load,
            logCompactionMinTime=1e9,
        )
        wire = classes.Wire(lambda _target, _message: None)
        self.raft = self.engine.syncobj.SyncObj(classes.Peer("1"), [], conf=conf, transport=wire)
        self.log = self.raft._SyncObj__raftLog

    def _store(self, path: str, data: tuple) -> None:
        self.stored.append((path, data))
        with Path(path).open("wb") as file:
            file.write(b"new")
        if self.fails:
            raise ZeroDivisionError

    def _load(self, path: str) -> tuple:
        self.loaded.append(path)
        assert self.content is not None
        return self.content

    def tick(self, seconds: float = 0.0) -> None:
        self.now_s += seconds
        self.raft.doTick(0)

    def fill(self, last: int) -> None:
        """Entries up to ``last``, of term 1."""
        for index in range(2, last + 1):
            self.log.add(b"\x42%d" % index, index, 1)

    @property
    def indices(self) -> list[int]:
        return [entry[1] for entry in self.log[:]]


@pytest.mark.parametrize(
    ("before", "last"),
    [
        ((b"\x425", 5, 1), (b"\x426", 6, 1)),  # Killed after the dump was renamed.
        ((b"\x01", 1, 0), (b"\x42x", 2, 3)),  # The first entry is the dump's, the second is not.
    ],
)
def test_a_log_that_does_not_begin_with_the_dump_is_thrown_away(tmp_path, before, last):
    """S:1489-1495: which is why the engine is given no dump to load."""
    alone = Alone(tmp_path)
    alone.fill(9)
    alone.dump.write_bytes(b"old")
    alone.content = (last, before, set())
    alone.tick()
    assert alone.loaded == [str(alone.dump)]
    assert alone.log[:] == [before, last]


def test_a_log_that_begins_with_the_dump_is_kept(tmp_path):
    """S:1489-1495."""
    alone = Alone(tmp_path)
    alone.fill(9)
    alone.dump.write_bytes(b"old")
    alone.content = (alone.log[1], alone.log[0], set())
    alone.tick()
    assert alone.loaded == [str(alone.dump)]
    assert alone.indices == list(range(1, 10))


def test_a_dump_is_renamed_over_the_last_one_and_never_synced(tmp_path, monkeypatch):
    """Z:85-97: loss of power may leave the name and not the content."""
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", synced.append)
    alone = Alone(tmp_path)
    alone.tick(30)  # It elects itself, and its no-op is committed.
    alone.tick()
    alone.dump.write_bytes(b"old")
    alone.raft.forceLogCompaction()
    alone.tick()
    ((path, data),) = alone.stored
    assert path == f"{alone.dump}.tmp"
    assert [entry[1] for entry in data[:2]] == [alone.raft.raftLastApplied, 1]
    assert alone.dump.read_bytes() == b"new"
    assert synced == []


def test_a_dump_that_fails_is_swallowed_and_the_log_stays(tmp_path):
    """Z:85-97, S:1419: nobody is told."""
    alone = Alone(tmp_path)
    alone.tick(30)
    alone.tick()
    before = alone.indices
    alone.fails = True
    alone.raft.forceLogCompaction()
    for _ in range(3):
        alone.tick()
    assert len(alone.stored) == 1
    assert not alone.dump.exists()
    assert alone.indices == before


# Ours.


@pytest.fixture
def asked(monkeypatch):
    """The names that the engine asks of the serializer that stands in for its own."""
    names: list[str] = []

    class Watched(_NoSerializer):
        def __getattribute__(self, name):
            names.append(name)
            return super().__getattribute__(name)

    monkeypatch.setattr(pysyncobj.syncobj, "Serializer", Watched)
    return names


def test_ours_is_asked_for_no_dump_whatever_its_log_becomes(tmp_path, asked):
    """S:1411-1432, 1309-1331: neither by time, nor by length, nor by a peer far behind."""
    bare = Bare(tmp_path)
    bare.elect()
    for number in range(200):
        bare.raft.submit(b"%d" % number * 1000, lambda _result, _reason: None)
    bare.tick()
    bare.raft.acknowledge(2, bare.journal.last_index)
    bare.tick()
    assert bare.journal.commit_index == bare.journal.last_index == 202
    bare.journal.compact_to(150)
    bare.raft._bridge._send = lambda peer, _message: bare.raft.disconnect(peer)
    bare.raft.disconnect(2)
    for _ in range(50):
        bare.raft.saw(2)  # So that it goes on leading.
        bare.raft.send_from(3, 2)  # Far behind.
        bare.raft.connect(3)
        bare.tick(bare.raft.next_heartbeat_s() - bare.now_s + 0.001)
    bare.raft.saw(2)
    bare.tick(1e6)
    assert set(asked) == {"checkSerializing", "getTransmissionData", "cancelTransmisstion"}
    assert bare.journal.first_index == 150
    bare.journal.abandon()


def test_ours_loads_no_dump(tmp_path, asked):
    """S:625, 1489-1495: whatever lies about, its log is as the journal has it."""
    for name in ("dump", "snapshot", "journal.dump"):
        (tmp_path / name).write_bytes(b"anything")
    bare = Bare(tmp_path)
    bare.raft.deliver(
        2,
        {
            "type": "append_entries", "term": 1, "commit_index": 1, "prevLogIdx": 1,
            "prevLogTerm": 0, "entries": [(b"\x42a", 2, 1)],
        },
    )  # fmt: skip
    bare.tick()
    assert "deserialize" not in asked
    assert bare.journal.last_index == 2
    bare.journal.abandon()
