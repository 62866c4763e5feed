"""Build the codec with an address sanitiser and hammer it: ``make fuzz-codec ROUNDS=N SEED=S``.

Every round encodes some records, mutates the bytes, and has the sanitised codec and the reference
read them, which must agree. A read or a write past a buffer ends the process with the sanitiser's
report. Needs gcc and its libasan.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "proto" / "penstock" / "wire" / "_codec.pyx"
FLAGS = ["-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]


def sanitiser() -> str | None:
    """The sanitiser's library, which has to be loaded before all else; None without gcc."""
    try:
        command = ["gcc", "-print-file-name=libasan.so"]
        found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
    return str(Path(found).resolve()) if Path(found).is_absolute() else None


def hammer(library: str, *, rounds: int, seed: int) -> subprocess.CompletedProcess[str]:
    """Build and run; what the process said."""
    with tempfile.TemporaryDirectory() as directory:
        build = [sys.executable, "-c", BUILD, str(SOURCE), directory, *FLAGS]
        subprocess.run(build, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        [built] = Path(directory).glob("penstock/wire/_codec.*.so")
        arguments = [str(built), str(rounds), str(seed)]
        return subprocess.run(
            [sys.executable, "-m", "tests.fuzzing.hammer", *arguments],
            cwd=ROOT,
            env={
                **os.environ,
                "LD_PRELOAD": library,
                # Python's own allocator would hide where an object ends.
                "PYTHONMALLOC": "malloc",
                # Python itself keeps some memory to its end.
                "ASAN_OPTIONS": "detect_leaks=0",
            },
            capture_output=True,
            text=True,
            check=False,
        )


BUILD = """
import sys
from pathlib import Path
from hatch_build import compile_codec
compile_codec(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:], ["-fsanitize=address,undefined"])
"""


def main() -> int:
    parser = argparse.ArgumentParser(prog="make fuzz-codec", description=__doc__)
    parser.add_argument("--rounds", type=int, default=200_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    library = sanitiser()
    if library is None:
        sys.stderr.write("gcc with libasan is needed; install both\n")
        return 2
    result = hammer(library, rounds=options.rounds, seed=options.seed)
    sys.stdout.write(result.stdout)
    sys.stderr.write(result.stderr)
    return result.returncode


if __name__ == "__main__":
    sys.exit(main())
