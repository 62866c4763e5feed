"""What becomes of clients when processes fork and end."""

from __future__ import annotations

import subprocess
import sys

from tests.unit.client.conftest import Background

# A process of its own: pytest's has threads and a gRPC server that are not what is tested.
SCRIPT = """
import os, sys
from penstock.client import ClientClosedError, Consumer, Producer

def in_child(call):
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            call()
            os.write(writer, b"worked")
        except ClientClosedError as error:
            os.write(writer, str(error).encode())
        finally:
            os._exit(0)
    os.close(writer)
    told = os.read(reader, 10_000).decode()
    os.close(reader)
    status = os.waitpid(child, 0)[1]
    print(status, told, flush=True)

with Producer(sys.argv[1]) as producer, Consumer(sys.argv[1], topics="t") as consumer:
    for _ in range(5):
        producer.send("t", b"v").result(10)
        consumer.poll(10)
        in_child(lambda: producer.send("t", b"from the child"))
        in_child(lambda: consumer.poll(10))
        in_child(producer.close)
    producer.send("t", b"last").result(10)
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
    lines = result.stdout.splitlines()
    assert len(lines) == 15
    for sent, polled, closed in zip(lines[::3], lines[1::3], lines[2::3], strict=True):
        assert sent.startswith("0 this Producer was made in process")
        assert "make a new Producer in the child" in sent
        assert polled.startswith("0 this Consumer was made in process")
        assert closed == "0 worked"
    assert background.cluster.values("t") == [b"v"] * 5 + [b"last"]


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
