from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from penstock.pipeline.declarative import continuous
from penstock.pipeline.declarative.definitions import Pipeline, _take_sql
from penstock.pipeline.declarative.graph import GraphError, GraphFlow


def pipeline(text: str) -> Pipeline:
    made = Pipeline(cast("Any", SimpleNamespace()), "some-graph")
    _take_sql(made, text)
    return made


@pytest.mark.parametrize("create", ["CREATE VIEW", "CREATE TEMP VIEW", "CREATE OR REPLACE VIEW"])
def test_a_view_is_in_the_graph_and_made_by_a_continuous_run(create: str) -> None:
    found = pipeline(f"SET a = 1; {create} v AS SELECT * FROM lines")
    assert [(one.name, one.kind) for one in found.graph.datasets.values()] == [("v", "view")]
    assert found.graph.flows == [GraphFlow("v", "v", ("lines",))]
    assert found.views_in_sql == {"v": "SELECT * FROM lines"}
    assert found.unknown == []


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("CREATE GLOBAL TEMPORARY VIEW v AS SELECT 1", "CREATE GLOBAL TEMPORARY VIEW v"),
        ("CREATE VIEW db.v AS SELECT 1", "db.v (a view with a database in its name)"),
    ],
)
def test_what_a_continuous_run_cannot_make_is_refused_by_name(text: str, named: str) -> None:
    with pytest.raises(GraphError) as caught:
        continuous.start(cast("Any", None), pipeline(text))
    assert f"cannot do this: {named}; next: run without --continuous" in str(caught.value)
