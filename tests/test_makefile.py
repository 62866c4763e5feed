"""What the Makefile promises about how targets run."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
# Neither ends before the other has begun: to open a named pipe is to wait for its other end.
PROBES = """
.PHONY: both first second
both:
\t@$(MAKE) --file=Makefile --file={file} --jobs=2 --output-sync=target first second
first:
\t@echo met > {pipe}
second:
\t@cat {pipe}
"""


def test_a_make_within_make_runs_two_targets_beside_each_other(tmp_path: Path) -> None:
    pipe, probes = tmp_path / "pipe", tmp_path / "probes.mk"
    os.mkfifo(pipe)
    probes.write_text(PROBES.format(file=probes, pipe=pipe))
    with subprocess.Popen(
        ["make", "--no-print-directory", "--file=Makefile", f"--file={probes}", "both"],
        cwd=ROOT,
        # As from a shell: under `make test` this is a make within make already.
        env={key: text for key, text in os.environ.items() if not key.startswith("MAKE")},
        stdout=subprocess.PIPE,
        text=True,
        process_group=0,
    ) as running:
        try:
            out, _ = running.communicate(timeout=30)
        except subprocess.TimeoutExpired:
            os.killpg(running.pid, 9)
            pytest.fail("the two were run one after the other")
    assert out.split() == ["met"]


def test_tests_run_where_bytecode_is_cached(tmp_path: Path) -> None:
    probe = tmp_path / "probe.mk"
    probe.write_text(".PHONY: probe\nprobe:\n\t@echo [$$PYTHONDONTWRITEBYTECODE]\n")
    done = subprocess.run(
        ["make", "--no-print-directory", "--file=Makefile", f"--file={probe}", "probe"],
        cwd=ROOT,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "[]"
