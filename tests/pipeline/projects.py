"""Projects of declarative pipelines for tests, and the commands that run them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.integration.cluster import environment_without_penstock
from tests.support import wait_until

# A deadline, not an expectation: on a busy machine Spark alone takes minutes to start.
SPARK_TIMEOUT_S = 240.0

SPEC = """\
name: lines
storage: {root}/storage
libraries:
  - glob:
      include: transformations/**
"""
PYTHON = """\
from pyspark import pipelines as dp
from pyspark.sql import functions as F

print("what a project prints is no output of the command")
dp.create_sink("out", "json", {{"path": "{directory}/out"}})


@dp.temporary_view
def lines():
    return spark.readStream.format("text").load("{directory}/in")


@dp.append_flow(target="out")
def upper():
    return spark.readStream.table("long_ones").select(F.upper("value").alias("value"))
"""
SQL = """\
-- Lines that are long enough; with a view of a view.
CREATE TEMPORARY VIEW long_ones AS SELECT * FROM STREAM(some);
CREATE TEMP VIEW some AS SELECT * FROM STREAM lines WHERE length(value) > 2;
"""


@dataclass(frozen=True)
class Project:
    """A directory with a project, whose commands run on Spark here or at ``remote``."""

    directory: Path
    remote: str | None = None

    def command(self, *words: str) -> list[str]:
        remote = ["--remote", self.remote] if self.remote else []
        return [sys.executable, "-m", "penstock.cli", "pipeline", *words, *remote]

    def call(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(*words),
            cwd=self.directory,
            env=environment(self.directory),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=SPARK_TIMEOUT_S,
            check=False,
        )

    def ok(self, *words: str) -> str:
        done = self.call(*words)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    @contextlib.contextmanager
    def running(self, *words: str) -> Iterator[subprocess.Popen[bytes]]:
        """The command ``run --continuous`` once its flows run, in a process group of its own."""
        log = self.directory / "run.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                self.command("run", "--continuous", *words),
                cwd=self.directory,
                env=environment(self.directory),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        try:
            wait_until(
                lambda: b" runs into " in log.read_bytes() or process.poll() is not None,
                "the flows run",
                SPARK_TIMEOUT_S,
            )
            assert process.poll() is None, log.read_text()
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def write(self, name: str, *lines: str) -> None:
        """A file for the source, which is there at once and whole."""
        path = self.directory / name
        path.write_text("".join(f"{line}\n" for line in lines))
        path.rename(self.directory / "in" / name)

    def written(self) -> list[str]:
        """The values in the sink's files, of those files that Spark has committed."""
        out = self.directory / "out"
        logs = [path for path in (out / "_spark_metadata").glob("[0-9]*") if path.suffix == ""]
        # A log of a batch is a line with its version and one for each file.
        entries = [line for log in logs for line in log.read_text().splitlines()[1:]]
        names = {Path(json.loads(entry)["path"]).name for entry in entries}
        texts = [(out / name).read_text() for name in names]
        return sorted(json.loads(line)["value"] for text in texts for line in text.splitlines())


def environment(directory: Path) -> dict[str, str]:
    """Of a program with its own Spark, for seconds: Java compiles it no better than it must."""
    return {
        **environment_without_penstock(),
        "TMPDIR": str(directory),
        "PYSPARK_SUBMIT_ARGS": (
            "--driver-memory 600m --driver-java-options -XX:TieredStopAtLevel=1 pyspark-shell"
        ),
    }


def files_project(directory: Path, remote: str | None = None) -> Project:
    """From text files, by a view in Python and two in SQL, to JSON files."""
    directory.mkdir(exist_ok=True)
    (directory / "in").mkdir()
    (directory / "transformations").mkdir()
    values = {"directory": directory, "root": directory.as_uri()}
    (directory / "spark-pipeline.yml").write_text(SPEC.format(**values))
    (directory / "spark-defaults.conf").write_text(
        f"spark.driver.memory 600m\nspark.local.dir {directory}\n"
    )
    (directory / "transformations" / "topics.py").write_text(PYTHON.format(**values))
    (directory / "transformations" / "views.sql").write_text(SQL)
    return Project(directory, remote)
