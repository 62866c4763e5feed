from __future__ import annotations

import pytest

from penstock.pipeline.declarative.graph import (
    Dataset,
    Graph,
    GraphError,
    GraphFlow,
    as_dot,
    as_text,
    as_value,
    only_sinks_and_views,
    shown_options,
)


def a_graph() -> Graph:
    datasets = [
        Dataset("alerts", "sink", "penstock alerts"),
        Dataset("large", "view"),
        Dataset("Orders", "view"),
    ]
    flows = [
        GraphFlow("Orders", "Orders", (), ("penstock orders",)),
        GraphFlow("large", "large", ("spark_catalog.default.orders", "elsewhere")),
        GraphFlow("to_alerts", "alerts", ("large",)),
    ]
    return Graph({one.name: one for one in datasets}, flows)


def test_the_text_has_a_line_for_each_dataset_and_each_flow() -> None:
    assert as_text(a_graph()).splitlines() == [
        "alerts (sink, penstock alerts)",
        "  <- large by to_alerts",
        "large (view)",
        "  <- Orders",
        "Orders (view)",
        "  <- penstock orders",
    ]


def test_programs_get_the_same() -> None:
    assert as_value(a_graph()) == {
        "datasets": [
            {"name": "alerts", "kind": "sink", "detail": "penstock alerts"},
            {"name": "large", "kind": "view", "detail": ""},
            {"name": "Orders", "kind": "view", "detail": ""},
        ],
        "edges": [
            {"from": "penstock orders", "to": "Orders", "flow": "Orders"},
            {"from": "Orders", "to": "large", "flow": "large"},
            {"from": "large", "to": "alerts", "flow": "to_alerts"},
        ],
    }


def test_graphviz_gets_every_node_and_edge_quoted() -> None:
    graph = a_graph()
    graph.datasets['a"b'] = Dataset('a"b', "table")
    text = as_dot(graph)
    assert '  "penstock orders" [shape=box, style=dashed];' in text
    assert '  "alerts" [shape=cds, label="alerts\\npenstock alerts"];' in text
    assert '  "large" -> "alerts" [label="to_alerts"];' in text
    assert '  "Orders" -> "large";' in text
    assert '  "a\\"b" [shape=box, label="a\\"b"];' in text
    assert text.startswith("digraph pipeline {\n")
    assert text.endswith("\n}")


def test_what_is_read_stands_before_what_reads_it() -> None:
    assert a_graph().in_order() == ["Orders", "large", "alerts"]


def test_a_circle_is_an_error_that_names_it() -> None:
    graph = a_graph()
    graph.flows.append(GraphFlow("back", "Orders", ("large",)))
    with pytest.raises(GraphError, match="circle: alerts, large, Orders; next: "):
        graph.in_order()


def test_only_what_says_where_is_shown_of_options() -> None:
    given = {"Topic": "orders", "password": "secret", "penstock.bootstrap.servers": "host:1"}
    assert shown_options(given) == "orders"


def test_tables_are_refused_by_name() -> None:
    graph = a_graph()
    only_sinks_and_views(graph)
    graph.datasets["t"] = Dataset("t", "table")
    with pytest.raises(GraphError, match=r"tables: t \(table\); next: run without --continuous"):
        only_sinks_and_views(graph)
