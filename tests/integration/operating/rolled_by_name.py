"""A rolling restart of pods that have names; run where /etc/hosts is this process's own.

``python -m tests.integration.operating.rolled_by_name DIRECTORY`` prints what came of it as JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.integration.operating.load import Load, make_topic
from tests.integration.operating.stateful_set import StatefulSet

HOSTS = Path("/etc/hosts")


def main(directory: Path) -> None:
    pods = StatefulSet(directory, hosts=HOSTS)
    try:
        pods.start()
        make_topic(pods.bootstrap)
        load = Load(pods.bootstrap)
        try:
            load.wait_progress()
            load.pause_ms()
            lived = {pod.host for pod in pods.pods}
            pods.roll(pods.pre_stop)
            load.wait_progress()
            pause_ms = load.pause_ms()
        finally:
            records = load.finish(pods.bootstrap)
        moved = not lived & {pod.host for pod in pods.pods}
    finally:
        pods.close()
    json.dump({"pause_ms": pause_ms, "records": records, "moved": moved}, sys.stdout)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
