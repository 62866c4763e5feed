"""What the Makefile promises about how targets run."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections import Counter
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


def commands(target: str) -> list[list[str]]:
    """The calls of pytest that ``target`` consists of."""
    done = subprocess.run(
        ["make", "--no-print-directory", "--dry-run", "ARGS=", target],
        cwd=ROOT,
        env={key: text for key, text in os.environ.items() if not key.startswith("MAKE")},
        capture_output=True,
        text=True,
        check=True,
    )
    lines = done.stdout.replace("\\\n", " ").splitlines()
    return [shlex.split(line) for line in lines if " -m pytest " in line]


def files_of(command: list[str]) -> set[Path]:
    """The files of tests that a call of pytest is for."""
    paths = [word for word in command[command.index("pytest") + 1 :] if not word.startswith("-")]
    ignored = [word.removeprefix("--ignore=") for word in command if word.startswith("--ignore=")]
    for path in (*paths, *ignored):
        assert (ROOT / path).exists(), path
    found = {
        file
        for path in paths
        for file in ([ROOT / path] if path.endswith(".py") else (ROOT / path).rglob("test_*.py"))
    }
    return {file for file in found if not any(file.is_relative_to(ROOT / one) for one in ignored)}


PARTS = (
    ("test-integration", "test-integration-brokers", "test-integration-clients"),
    ("test-pipeline", "test-pipeline-programs", "test-pipeline-queries"),
)


@pytest.mark.parametrize("parts", PARTS, ids=[parts[0] for parts in PARTS])
def test_parts_that_run_beside_each_other_have_each_test_once(parts: tuple[str, ...]) -> None:
    whole, *halves = (files_of(*commands(part)) for part in parts)
    assert Counter(file for half in halves for file in half) == Counter(whole)


def test_all_tests_are_run_each_in_one_part_with_temporary_files_of_its_own() -> None:
    makefile = (ROOT / "Makefile").read_text()
    recipe = re.search(r"^test: .*\n((?:\t.*\n)+)", makefile, re.MULTILINE)
    assert recipe is not None
    called = re.findall(r"test-[a-z-]+", recipe[1])
    calls = [call for target in called for call in commands(target)]
    found = Counter(file for call in calls for file in files_of(call))
    # What wants a container engine, a Kubernetes, or the whole machine, is a target of its own.
    targets = ("test-docker", "test-kubernetes", "test-chaos")
    apart = [call for target in targets for call in commands(target)]
    rest = set((ROOT / "tests").rglob("test_*.py")).difference(*map(files_of, apart))
    assert found == Counter(rest)
    places = [word for call in calls for word in call if word.startswith("--basetemp=")]
    assert len(set(places)) == len(calls)
