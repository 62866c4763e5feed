from __future__ import annotations

import pytest

from penstock.pipeline.declarative.sql import (
    Definition,
    definition,
    names_read,
    statements,
    unknown_creation,
)


def test_statements_end_at_semicolons_that_are_no_text() -> None:
    text = "SET a = 1; -- not; here\nSELECT ';', \"x;\", `a;b` /* ; */ FROM t;\n -- the end\n;"
    assert statements(text) == [
        "SET a = 1",
        "-- not; here\nSELECT ';', \"x;\", `a;b` /* ; */ FROM t",
    ]


@pytest.mark.parametrize(
    ("statement", "expected"),
    [
        (
            "create temporary view big as select * from stream lines",
            Definition("view", "big", "big", "select * from stream lines"),
        ),
        (
            "CREATE OR REFRESH STREAMING TABLE IF NOT EXISTS `a`.b (i INT COMMENT 'as') AS SELECT",
            Definition("table", "a.b", "a.b", "SELECT"),
        ),
        ("CREATE STREAMING TABLE t", Definition("table", "t", "t", "")),
        (
            "CREATE MATERIALIZED VIEW m COMMENT 'as it is' AS WITH x AS (SELECT 1) SELECT * FROM x",
            Definition("materialized view", "m", "m", "WITH x AS (SELECT 1) SELECT * FROM x"),
        ),
        (
            "CREATE FLOW f AS INSERT INTO t BY NAME SELECT * FROM STREAM(lines)",
            Definition("flow", "f", "t", "SELECT * FROM STREAM(lines)"),
        ),
        ("CREATE TEMP VIEW t AS SELECT 1", Definition("view", "t", "t", "SELECT 1")),
        ("CREATE VIEW v AS SELECT 1", Definition("view", "v", "v", "SELECT 1")),
        (
            "CREATE OR REPLACE TEMPORARY VIEW IF NOT EXISTS v COMMENT 'x' AS SELECT 1",
            Definition("view", "v", "v", "SELECT 1"),
        ),
        ("SET spark.sql.shuffle.partitions = 2", None),
        ("CREATE TABLE t (id INT)", None),
        ("CREATE TEMPORARY VIEW", None),
    ],
)
def test_what_a_statement_defines(statement: str, expected: Definition | None) -> None:
    assert definition(statement) == expected


@pytest.mark.parametrize(
    ("statement", "shown"),
    [
        ("create global temporary view v as select 1", "create global temporary view v"),
        ("CREATE /* a new kind */ LIVE\nTABLE t (id INT)", "CREATE LIVE TABLE t"),
        ("CREATE TEMPORARY VIEW", "CREATE TEMPORARY VIEW"),
        ("CREATE TEMP VIEW v AS SELECT 1", ""),
        ("SET a = 1", ""),
    ],
)
def test_what_is_created_and_not_known(statement: str, shown: str) -> None:
    assert unknown_creation(statement) == shown


@pytest.mark.parametrize(
    ("query", "names"),
    [
        ("SELECT * FROM lines", ["lines"]),
        ("SELECT * FROM STREAM lines WHERE lines.value > 'FROM x'", ["lines"]),
        ("SELECT a FROM STREAM(db.`lines`) AS l JOIN names ON a = b", ["db.lines", "names"]),
        ("SELECT a, b FROM x, y z WHERE c IN (SELECT d, e FROM w)", ["x", "y", "w"]),
        ("SELECT * FROM (SELECT * FROM inner_one) AS q, other", ["inner_one", "other"]),
        ("WITH c AS (SELECT * FROM a) SELECT * FROM c -- FROM b", ["a", "c"]),
        ("SELECT extract(YEAR FROM at), other FROM a", ["at", "a"]),
        ("SELECT * FROM a JOIN b USING (id, at), c", ["a", "b", "c"]),
        ("SELECT * FROM a JOIN b ON f(a.x, a.y) = b.x, c WHERE d IN (e, f)", ["a", "b", "c"]),
        ("SELECT 1", []),
    ],
)
def test_what_a_query_reads(query: str, names: list[str]) -> None:
    assert names_read(query) == names
