"""What the benchmark of pipelines says of CPU, of real processes that end meanwhile."""

from __future__ import annotations

import subprocess
import sys

from bench.spark_footprint import CpuWatch

from tests.support import wait_until

BUSY = "import time; print(flush=True)\nwhile time.process_time() < 600: pass"


def test_what_a_process_used_counts_after_its_end() -> None:
    worker = subprocess.Popen([sys.executable, "-c", BUSY], stdout=subprocess.PIPE)
    try:
        assert worker.stdout is not None
        worker.stdout.readline()
        watch = CpuWatch([])
        wait_until(lambda: watch.seconds() > 0.2, "the worker has used some CPU")
        before_s = watch.seconds()
    finally:
        worker.kill()
        worker.communicate()
    assert watch.seconds() >= before_s
