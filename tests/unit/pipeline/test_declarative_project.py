from __future__ import annotations

import ast
from pathlib import Path

import pytest

from penstock.pipeline.declarative.definitions import DefinitionError, load_spec
from penstock.pipeline.declarative.project import (
    ProjectError,
    find_spec,
    make_project,
    read_defaults,
)
from penstock.pipeline.declarative.sql import definition, statements
from penstock.pipeline.session import settings


@pytest.mark.parametrize("in_sql", [False, True])
def test_a_new_project_is_what_spark_takes(tmp_path: Path, in_sql: bool) -> None:
    files = make_project(tmp_path, "shop", bootstrap="one:1,two:2", in_sql=in_sql)
    assert all(path.is_file() for path in files)
    spec = load_spec(tmp_path / "shop" / "spark-pipeline.yml")
    assert spec.name == "shop"
    assert spec.storage == f"file://{tmp_path}/shop/pipeline-storage"
    assert spec.configuration == {"spark.penstock.bootstrap": "one:1,two:2"}
    python = (tmp_path / "shop" / "transformations" / "topics.py").read_text()
    ast.parse(python)
    assert ("def capitals" in python) != in_sql
    assert '"shop-in"' in python
    assert '"shop-out"' in python
    if in_sql:
        (statement,) = statements((files[-1]).read_text())
        assert (found := definition(statement)) is not None
        assert (found.kind, found.name) == ("view", "capitals")


def test_a_project_has_the_settings_of_a_session(tmp_path: Path) -> None:
    make_project(tmp_path, "shop", bootstrap="one:1", in_sql=False)
    assert read_defaults(tmp_path / "shop") == settings()
    assert read_defaults(tmp_path) == {}


def test_settings_are_read_as_spark_reads_them(tmp_path: Path) -> None:
    (tmp_path / "spark-defaults.conf").write_text("# no\n a.b  1 2\nc=d\n\ne = f=g\n")
    assert read_defaults(tmp_path) == {"a.b": "1 2", "c": "d", "e": "f=g"}


def test_nothing_is_written_over(tmp_path: Path) -> None:
    (tmp_path / "shop").mkdir()
    with pytest.raises(ProjectError, match="exists already; next: "):
        make_project(tmp_path, "shop", bootstrap="one:1", in_sql=False)
    assert list((tmp_path / "shop").iterdir()) == []


@pytest.mark.parametrize("name", ["", "a/b", "..", "a b", '"'])
def test_a_name_that_is_none_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ProjectError, match="is no name of a project; next: "):
        make_project(tmp_path, name, bootstrap="one:1", in_sql=False)
    assert list(tmp_path.iterdir()) == []


def test_the_specification_is_found_from_below_and_by_name(tmp_path: Path) -> None:
    spec = make_project(tmp_path, "shop", bootstrap="one:1", in_sql=False)[0]
    assert find_spec(tmp_path / "shop" / "transformations") == spec
    assert find_spec(spec) == spec
    with pytest.raises(ProjectError, match=r"no spark-pipeline\.yml in .* next: "):
        find_spec(tmp_path)


@pytest.mark.parametrize("text", ["", "name: [", "name: x\nstorage: y\nlibraries: [1]\n"])
def test_a_specification_that_is_none_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "spark-pipeline.yml"
    path.write_text(text)
    with pytest.raises(DefinitionError, match=f"{path} is no"):
        load_spec(path)


def test_a_field_that_spark_does_not_know_is_named(tmp_path: Path) -> None:
    path = tmp_path / "spark-pipeline.yml"
    path.write_text("name: x\nstorage: y\ncolour: red\n")
    with pytest.raises(DefinitionError, match="colour"):
        load_spec(path)
