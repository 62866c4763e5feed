"""The image that these tests run nodes from, built of this checkout."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from penstock.chaos.backends.containers import DockerEngine
from penstock.chaos.errors import PlanError

ROOT = Path(__file__).resolve().parents[2]
BASE = "penstock-base:bookworm"
IMAGE = "penstock:test"
BUILD_S = 1200


def make(*command: str) -> None:
    """Run it, or skip all tests that want what it makes."""
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=BUILD_S, check=False
    )
    if done.returncode:
        pytest.skip(f"{' '.join(command)} failed, as without a network: {done.stderr[-500:]}")


@pytest.fixture(scope="session")
def image() -> str:
    """Its name. Skips where there is no engine, or nothing to make a base image of."""
    try:
        engine = DockerEngine()
    except PlanError as error:
        pytest.skip(str(error))
    try:
        engine.image(BASE)
    except PlanError:
        if shutil.which("debootstrap") is None:
            pytest.skip(f"there is no image {BASE}, and no debootstrap to make it with")
        make("deploy/docker/make-base", BASE)
    finally:
        engine.close()
    make("make", "image", f"BASE={BASE}", f"IMAGE={IMAGE}")
    return IMAGE
