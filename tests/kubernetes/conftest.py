"""Whichever cluster the tests are given: nothing is done to one that was not named for that."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator

import pytest

from tests.kubernetes.installed import Installed, Load


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installed]:
    """overlays/dev, in a namespace that goes at the end."""
    kubeconfig = os.environ.get("KUBECONFIG", "")
    image = os.environ.get("PENSTOCK_TEST_IMAGE", "")
    if not kubeconfig or not image:
        pytest.skip(
            "it wants KUBECONFIG, a file that names a cluster to be tested on, and "
            "PENSTOCK_TEST_IMAGE, an image that its hosts have or can pull"
        )
    if shutil.which("kubectl") is None:
        pytest.skip("there is no kubectl")
    made = Installed(kubeconfig, image)
    try:
        made.install(tmp_path_factory.mktemp("overlay"))
        yield made
    finally:
        made.remove()


@pytest.fixture
def load(installed: Installed) -> Iterator[Load]:
    """A client that writes all the time."""
    made = Load(installed)
    try:
        yield made
    finally:
        made.remove()
