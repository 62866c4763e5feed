from __future__ import annotations

import penstock.pipeline
from penstock.pipeline import errors


def test_every_error_can_be_caught_by_its_name_in_the_package() -> None:
    named = {name for name, value in vars(errors).items() if isinstance(value, type)}
    assert "PipelineError" in named
    assert named <= set(penstock.pipeline.__all__)
    assert all(getattr(penstock.pipeline, name) is getattr(errors, name) for name in named)
