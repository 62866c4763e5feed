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


def test_a_name_of_a_specification_that_is_not_there_is_not_looked_for_elsewhere(
    tmp_path: Path,
) -> None:
    make_project(tmp_path, "shop", bootstrap="one:1", in_sql=False)
    wrong = tmp_path / "shop" / "spark-pipelines.yml"
    with pytest.raises(ProjectError, match=rf"there is no {wrong}; next: .*--spec"):
        find_spec(wrong)


def test_of_two_specifications_neither_is_taken(tmp_path: Path) -> None:
    spec = make_project(tmp_path, "shop", bootstrap="one:1", in_sql=False)[0]
    spec.with_suffix(".yaml").write_text("name: other\n")
    with pytest.raises(ProjectError, match=r"both .*\.yml and .*\.yaml; next: remove one"):
        find_spec(tmp_path / "shop")


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "is empty"),
        ("# nothing yet\n", "is empty"),
        ("name: [", "is no specification of a pipeline: "),
        ("shop", "is no specification of a pipeline: it has no 'name:'"),
        ("name: x\nstorage: y\nlibraries: [1]\n", "is no specification of a pipeline: "),
        ("name: x\nstorage: y\n", "names no files: it has no 'libraries:'"),
    ],
)
def test_a_specification_that_is_none_is_named(tmp_path: Path, text: str, what: str) -> None:
    path = tmp_path / "spark-pipeline.yml"
    path.write_text(text)
    with pytest.raises(DefinitionError) as caught:
        load_spec(path)
    assert f"{path}" in str(caught.value)
    assert what in str(caught.value)
    assert "; next: " in str(caught.value)


@pytest.mark.parametrize("include", ["transformations/**", "transformations/topics.py"])
def test_a_glob_without_files_is_named_as_it_is_written(tmp_path: Path, include: str) -> None:
    spec = make_project(tmp_path, "shop", bootstrap="one:1", in_sql=False)[0]
    assert load_spec(spec).name == "shop"
    spec.write_text(f"name: x\nstorage: y\nlibraries: [{{glob: {{include: {include}}}}}]\n")
    assert load_spec(spec).name == "x"
    topics = tmp_path / "shop" / "transformations" / "topics.py"
    # What Python has compiled is no definition.
    (topics.parent / "__pycache__").mkdir()
    topics.rename(topics.parent / "__pycache__" / "topics.pyc")
    with pytest.raises(DefinitionError) as caught:
        load_spec(spec)
    assert f"'include: {include}' matches no file in {spec.parent}; next: " in str(caught.value)


def test_a_glob_must_lie_in_the_project(tmp_path: Path) -> None:
    path = tmp_path / "spark-pipeline.yml"
    path.write_text("name: x\nstorage: y\nlibraries: [{glob: {include: /etc/**}}]\n")
    with pytest.raises(DefinitionError, match=r"'include: /etc/\*\*.* next: write a path relative"):
        load_spec(path)


def test_a_field_that_spark_does_not_know_is_named(tmp_path: Path) -> None:
    path = tmp_path / "spark-pipeline.yml"
    path.write_text("name: x\nstorage: y\ncolour: red\n")
    with pytest.raises(DefinitionError, match="colour"):
        load_spec(path)
