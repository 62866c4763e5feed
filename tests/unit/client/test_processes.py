"""What becomes of clients when processes fork and end."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.unit.client.conftest import Background

# A process of its own: pytest's has threads and a gRPC server that are not what is tested.
SCRIPT = """
import asyncio, os, sys
from penstock.client import (
    AdminClient, AsyncAdminClient, AsyncConsumer, AsyncProducer, Consumer, ForkedProcessError,
    Producer,
)

def in_child(call):
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            call()
            os.write(writer, b"worked")
        except ForkedProcessError as error:
            os.write(writer, str(error).encode())
        finally:
            os._exit(0)
    os.close(writer)
    told = os.read(reader, 10_000).decode()
    os.close(reader)
    status = os.waitpid(child, 0)[1]
    print(status, told, flush=True)

def make_all():
    refused = []
    for kind in (
        AdminClient, AsyncAdminClient, AsyncConsumer, AsyncProducer, Consumer, Producer
    ):
        try:
            kind(sys.argv[1])
        except ForkedProcessError as error:
            refused.append(error)
    assert len(refused) == 6
    raise refused[-1]

with Producer(sys.argv[1]) as producer, Consumer(sys.argv[1], topics="t") as consumer:
    for _ in range(5):
        producer.send("t", b"v").result(10)
        consumer.poll(10)
        in_child(lambda: producer.send("t", b"from the child"))
        in_child(lambda: consumer.poll(10))
        in_child(make_all)
        in_child(lambda: in_child(make_all))
        in_child(producer.close)
    producer.send("t", b"last").result(10)

# A batch is open: records like those in it are looked at the least.
with Producer(sys.argv[1], linger_ms=60_000) as producer:
    producer.send("t", b"open")
    in_child(lambda: producer.send("t", b"from the child"))

async def main():
    producer = AsyncProducer(sys.argv[1], linger_ms=60_000)
    await producer.send("t", b"open")

    def send():
        try:
            producer.send("t", b"from the child").send(None)
        except StopIteration:
            pass

    in_child(send)
    await producer.close()

asyncio.run(main())
"""


def test_a_forked_child_refuses_and_the_parent_goes_on(background: Background) -> None:
    background.cluster.add_topic("t")
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT, background.cluster.bootstrap],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    *lines, beside_open, beside_open_async = result.stdout.splitlines()
    assert beside_open.startswith("0 this Producer was made in process")
    assert beside_open_async.startswith("0 this AsyncProducer was made in process")
    assert len(lines) == 30
    for sent, polled, made, grandchild, child, closed in zip(*[iter(lines)] * 6, strict=True):
        assert sent.startswith("0 this Producer was made in process")
        assert polled.startswith("0 this Consumer was made in process")
        for refused in (made, grandchild):
            assert refused.startswith("0 no Producer can be made in process")
        for told in (sent, polled, made, grandchild):
            assert "'spawn' start method" in told
        assert child == closed == "0 worked"
    assert background.cluster.values("t") == [b"v"] * 5 + [b"last", b"open", b"open"]


FORK_FIRST = """
import os, sys
from penstock.client import Producer

# Made, but not used: nothing of gRPC runs yet.
unused = Producer(sys.argv[1])
child = os.fork()
with Producer(sys.argv[1]) as producer:
    producer.send("t", b"v").result(10)
if child:
    assert os.waitpid(child, 0)[1] == 0
    unused.send("t", b"v").result(10)
    unused.close()
"""


def test_processes_forked_before_the_first_use_have_clients_of_their_own(
    background: Background,
) -> None:
    background.cluster.add_topic("t")
    result = subprocess.run(
        [sys.executable, "-c", FORK_FIRST, background.cluster.bootstrap],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (result.returncode, result.stderr) == (0, "")
    assert background.cluster.values("t") == [b"v"] * 3


SPAWN = """
import multiprocessing, sys
from penstock.client import Producer

def work(bootstrap):
    with Producer(bootstrap) as producer:
        producer.send("t", b"v").result(10)

if __name__ == "__main__":
    work(sys.argv[1])
    child = multiprocessing.get_context("spawn").Process(target=work, args=(sys.argv[1],))
    child.start()
    child.join(30)
    work(sys.argv[1])
    sys.exit(child.exitcode)
"""


def test_what_the_refusal_advises_works(background: Background, tmp_path: Path) -> None:
    background.cluster.add_topic("t")
    script = tmp_path / "program.py"
    script.write_text(SPAWN)
    result = subprocess.run(
        [sys.executable, str(script), background.cluster.bootstrap],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (result.returncode, result.stderr) == (0, "")
    assert background.cluster.values("t") == [b"v"] * 3


UNCLOSED = """
import sys
from penstock.client import Consumer, Producer
producer = Producer(sys.argv[1], linger_ms=60_000)
for number in range(100):
    producer.send("t", b"%d" % number)
consumer = Consumer(sys.argv[1], topics="t", group_id="g", auto_offset_reset="earliest")
consumer.poll(10)
"""


def test_a_program_that_ends_without_closing_loses_nothing(background: Background) -> None:
    background.cluster.add_topic("t")
    result = subprocess.run(
        [sys.executable, "-c", UNCLOSED, background.cluster.bootstrap],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (result.returncode, result.stderr) == (0, "")
    assert background.cluster.values("t") == [b"%d" % number for number in range(100)]
    assert background.cluster.groups["g"].members == {}
