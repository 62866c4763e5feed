"""The objects of each variant, made by each of the tools."""

from __future__ import annotations

import pytest

from tests.deploy.objects import VARIANTS, Object, built, rendered


@pytest.fixture(params=VARIANTS)
def variant(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=["kustomize", "helm"])
def objects(request: pytest.FixtureRequest, variant: str) -> list[Object]:
    return built(f"overlays/{variant}") if request.param == "kustomize" else rendered(variant)
